"""How fast text becomes batches: python benchmarks/data.py [--source=FILE --target=FILE].

Tokenising a corpus into the cache against the tokenizer's bare `encode_batch`, on the lines of two files (plain, .gz or
.xz) or on number words; and the rate of ready batches and the share of their slots that is used, on a synthetic corpus
of pairs of about 30 tokens a side.
"""

import itertools
import pathlib
import sys
import tempfile
import time

import numpy as np
import rich.console
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.timing import interleaved
from configs import numbers
from transformer_flax.data.batches import Batches
from transformer_flax.data.corpus import CHUNK, Corpus, Sentences, load_corpus
from transformer_flax.data.pairs import load_pairs
from transformer_flax.data.text import read_side_by_side
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL, PAD_ID

SOURCE = flags.DEFINE_string("source", None, "a file of sentences; default: number words")
TARGET = flags.DEFINE_string("target", None, "their translations, line by line")
LINES = flags.DEFINE_integer("lines", 50_000, "of the files, at most")
PAIRS = flags.DEFINE_integer("pairs", 1_000_000, "of the synthetic corpus")
BATCHES = flags.DEFINE_integer("batches", 300, "to be made")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls")


class Lines(list):
    """Pairs in memory."""

    fingerprint = "of no use: every cache is a new one"


def read_pairs() -> Lines:
    if SOURCE.value is not None:
        sides = read_side_by_side(pathlib.Path(SOURCE.value), pathlib.Path(TARGET.value))
        return Lines(itertools.islice(zip(*sides, strict=True), LINES.value))
    pairs = load_pairs(numbers.get_config().data, "train")
    return Lines(pairs[i] for i in range(min(len(pairs), LINES.value)))


def synthetic(pairs: int) -> Corpus:
    """Sources of about 30 tokens, targets a few longer or shorter."""
    rng = np.random.default_rng(0)
    source = np.clip(rng.normal(30, 12, pairs), 3, 100).astype(np.int64)
    target = np.clip(source + rng.integers(-5, 6, pairs), 3, 100)

    def sentences(lengths) -> Sentences:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = rng.integers(NUM_SPECIAL, 37_000, offsets[-1]).astype(np.uint16)
        ids[offsets[1:] - 1] = END_ID
        return Sentences(ids, offsets)

    return Corpus(sentences(source), sentences(target))


def main(_) -> None:
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
    console.print(f"  {timings['bare'].median / timings['cached'].median:.2f} of the rate of the bare encode_batch")

    corpus = synthetic(PAIRS.value)
    started = time.perf_counter()
    batches = Batches(
        corpus,
        np.arange(len(corpus)),
        tokens_per_batch=25_000,
        num_buckets=16,
        rows_multiple_of=8,
        data_seed=0,
        seed=0,
    )
    made = [batches[k] for k in range(BATCHES.value)]  # the first plans its epoch
    seconds = time.perf_counter() - started
    used = [[int(np.sum(batch[side] != PAD_ID)) for side in ("source", "target")] for batch in made]
    slots = sum(batch["source"].size for batch in made)
    console.print(f"batches: {np.sum(used) / seconds / 1e6:.1f} million tokens a second, source and target")
    console.print(f"  {100 * sum(map(max, used)) / slots:.1f} % of the slots used in {len(batches.shapes)} shapes")


if __name__ == "__main__":
    app.run(main)
