"""Measures how fast text becomes batches: python benchmarks/data.py [--source=FILE --target=FILE].

Compares tokenising a corpus into the cache with the tokenizer's bare `encode_batch_fast`, on the lines of two files
(plain, .gz or .xz) or on number words. Measures the rate of ready batches and the share of their slots that is used, on
synthetic pairs of about 30 tokens a side. Measures how memory grows with the text and with the corpus.
"""

import itertools
import multiprocessing
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import rich.console
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.timing import interleaved
from configs import base, numbers
from transformer_flax import cli
from transformer_flax.data.batches import SIDES, Batches, training_batches
from transformer_flax.data.corpus import Corpus, Sentences, load_corpus, select_training_pairs
from transformer_flax.data.sentence_pairs import CHUNK, Pairs
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.text_files import read_side_by_side
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL, PAD_ID

SOURCE = flags.DEFINE_string("source", None, "a file of sentences; default: number words")
TARGET = flags.DEFINE_string("target", None, "a file of their translations, line by line")
LINES = flags.DEFINE_integer("lines", 50_000, "maximum number of pairs to tokenise")
PAIRS = flags.DEFINE_integer("pairs", 1_000_000, "pairs of the synthetic corpus")
REPEATS = flags.DEFINE_integer("repeats", 9, "timed calls")

MEMORY_PAIRS = (100_000, 5_000_000)
PARTS = ("ids", "offsets")  # arrays of one side's `Sentences`


class Lines(list):
    """Pairs in memory."""

    fingerprint = "of no use: every cache is a new one"

    def read(self, indices):
        return [self[i] for i in indices]


def read_pairs() -> Lines:
    if SOURCE.value is not None:
        sides = read_side_by_side(pathlib.Path(SOURCE.value), pathlib.Path(TARGET.value))
        return Lines(itertools.islice(zip(*sides, strict=True), LINES.value))
    pairs = load_pairs(numbers.get_config().data, "train")
    return Lines(pairs.read(range(min(len(pairs), LINES.value))))


def synthetic(pairs: int) -> Corpus:
    """Draws sources of about 30 tokens, and targets a few tokens longer or shorter."""
    rng = np.random.default_rng(0)
    source = np.clip(rng.normal(30, 12, pairs), 3, 100).astype(np.int64)
    target = np.clip(source + rng.integers(-5, 6, pairs), 3, 100)

    def sentences(lengths) -> Sentences:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = rng.integers(NUM_SPECIAL, 37_000, offsets[-1], dtype=np.uint16)
        ids[offsets[1:] - 1] = END_ID
        return Sentences(ids, offsets)

    return Corpus(sentences(source), sentences(target))


def make_batches(corpus: Corpus, batching: str) -> Batches:
    config = base.get_config().data
    config.update(batching=batching, num_buckets=16)
    return training_batches(corpus, select_training_pairs(corpus, config).indices, config, seed=0, share=(0, 1))


def measure_batches(corpus: Corpus, batching: str) -> list[str]:
    """Measures an epoch: shapes, million tokens a second (planning included), % of the fuller side's slots used."""
    started = time.perf_counter()
    batches = make_batches(corpus, batching)
    used, slots = np.zeros(2, int), 0
    for k in range(batches.batches_per_epoch):
        batch = batches[k]
        used += [np.count_nonzero(batch[side] != PAD_ID) for side in SIDES]
        slots += batch["source"].size
    seconds = time.perf_counter() - started
    return [str(len(batches.shapes)), f"{used.sum() / seconds / 1e6:.1f}", f"{100 * used.max() / slots:.1f}"]


def anonymous_memory() -> int:
    """Returns the bytes of this process's memory that no file backs."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def memory_of(prepare: Callable, *arguments: Any) -> tuple[int, int]:
    """Returns the bytes of anonymous memory held after `prepare`, and the peak until then."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    prepared = prepare(*arguments)  # kept until memory is measured
    held = anonymous_memory()
    done.set()
    watcher.join()
    del prepared
    return held, most


def write_text(folder: pathlib.Path, pairs: int) -> None:
    for language in ("en", "de"):
        with (folder / f"train.{language}").open("w") as file:
            file.writelines(f"{n}\n" for n in range(pairs))


def tokenise(folder: pathlib.Path) -> tuple[Pairs, Corpus]:
    config = base.get_config().data
    config.update(source="folder", path=str(folder), cache_dir=str(folder))
    pairs = load_pairs(config, "train")
    return pairs, load_corpus(pairs, Tokenizer.train(map(str, range(10_000)), 300), config.cache_dir)


def write_corpus(folder: pathlib.Path, pairs: int) -> None:
    corpus = synthetic(pairs)
    for side, part in itertools.product(SIDES, PARTS):
        np.save(folder / f"{side}.{part}", getattr(getattr(corpus, side), part))


def make_two_epochs(folder: pathlib.Path, batching: str) -> Batches:
    sides = (Sentences(*(np.load(folder / f"{side}.{part}.npy", mmap_mode="r") for part in PARTS)) for side in SIDES)
    batches = make_batches(Corpus(*sides), batching)
    for epoch in range(2):
        for k in range(10):
            batches[epoch * batches.batches_per_epoch + k]
    return batches


def growth(write: Callable[[pathlib.Path, int], None], prepare: Callable, *arguments: Any) -> list[str]:
    """Returns the growth of memory in bytes a pair, from few pairs on the disk to many: held, and at the peak."""
    results = []
    for pairs in MEMORY_PAIRS:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            write(folder, pairs)
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # a fresh process
                results.append(pool.apply(memory_of, (prepare, folder, *arguments)))
    few, many = results
    added = MEMORY_PAIRS[1] - MEMORY_PAIRS[0]
    return [f"{(after - before) / added:.1f}" for before, after in zip(few, many, strict=True)]


def main() -> None:
    if (SOURCE.value is None) != (TARGET.value is None):
        raise UserError("--source and --target belong together: give both, or none for number words")
    console = rich.console.Console(highlight=False)
    pairs = read_pairs()
    tokenizer = Tokenizer.train((text for pair in pairs[:20_000] for text in pair), 8_000)
    sides = list(zip(*pairs, strict=True))

    def bare() -> None:
        for start in range(0, len(pairs), CHUNK):
            for side in sides:
                tokenizer._backend.encode_batch_fast(list(side[start : start + CHUNK]))

    def cached() -> None:
        with tempfile.TemporaryDirectory() as cache:
            load_corpus(pairs, tokenizer, cache)

    timings = interleaved({"bare": bare, "cached": cached}, REPEATS.value)
    rate = timings["cached"].per_second(len(pairs))
    console.print(f"tokenising into the cache: {rate} pairs a second")
    console.print(f"  {timings['bare'].median / timings['cached'].median:.2f} of the bare encode_batch_fast's rate")

    table = rich.table.Table("batching", "shapes", "million tokens a second", "% of slots used", title="an epoch")
    corpus = synthetic(PAIRS.value)
    for batching in ("bucketed", "packed"):
        table.add_row(batching, *measure_batches(corpus, batching))
    console.print(table)
    del corpus

    table = rich.table.Table("what", "held", "at most", title="bytes of anonymous memory a pair")
    table.add_row("text, read and tokenised", *growth(write_text, tokenise))
    for batching in ("bucketed", "packed"):
        table.add_row(f"batches, {batching}", *growth(write_corpus, make_two_epochs, batching))
    console.print(table)


if __name__ == "__main__":
    cli.run(main)
