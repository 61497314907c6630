"""The memory that a folder of text takes until it is a tokenised corpus, as the system counts it."""

import json

import pytest

from tests.conftest import long
from tests.data.processes import run
from tests.data.test_sources import write

FEW, MANY = 1_000, 200_000  # pairs
HELD, MOST = 16, 24  # bytes a pair
CONSTANT = 8 << 20  # bytes: what is read and encoded at a time, what allocators keep

MEASURE = """
import gc, json, pathlib, sys, threading
import numpy as np
from tests.data.make import data_config
from transformer_flax.data.corpus import load_corpus
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.tokenizer import sample_texts


class Bytes:
    # A tokenizer that keeps nothing, unlike those of the library.

    vocab_size = 259

    def to_json(self):
        return "bytes"

    def encode_flat(self, texts):
        lengths = np.array([len(text.encode()) for text in texts])
        return np.frombuffer("".join(texts).encode(), np.uint8).astype(np.int32) + 3, lengths


def anonymous_memory():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def watch():
    global most
    while not done.wait(0.001):
        most = max(most, anonymous_memory())


def prepare(folder):
    pairs = load_pairs(data_config(source="folder", path=folder, cache_dir=folder), "train")
    for text in sample_texts(pairs, 1_000, seed=0):
        pass
    return pairs, load_corpus(pairs, Bytes(), folder)


few, many = sys.argv[1:]
most, done = 0, threading.Event()
prepare(few)
gc.collect()
before = anonymous_memory()
watcher = threading.Thread(target=watch)
watcher.start()
prepared = prepare(many)
done.set()
watcher.join()
gc.collect()
json.dump([anonymous_memory() - before, most - before], sys.stdout)
"""


@pytest.mark.parametrize("suffix", ["", long(".gz"), ".xz"])
def test_text_takes_few_bytes_a_pair_whatever_its_files(tmp_path, suffix):
    for pairs in (FEW, MANY):
        numbers = [str(n) for n in range(pairs)]
        write(tmp_path / str(pairs), suffix=suffix, en=numbers, de=numbers[::-1])
    # With an allocator for each thread, what they keep is a matter of chance.
    steady = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    held, most = json.loads(run(MEASURE, str(tmp_path / str(FEW)), str(tmp_path / str(MANY)), **steady))
    assert held < HELD * MANY + CONSTANT
    assert most < MOST * MANY + CONSTANT
