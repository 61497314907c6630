"""Draws docs/length.md's pictures, of runs that are trained: python docs/length.py --output=docs/copy_length.png RUN...

    python docs/length.py --output=docs/copy_length.png runs/sweep-copy/*/seed?

Measured are the translations that the runs have written at their end: of the validation split, as long as what was
trained on, and of the test split. Runs whose config has the same positions are one curve. The table, of translations
that are exactly right / words before the first wrong one, goes to standard output.
"""

import collections
import pathlib
import sys

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from transformer_flax import cli
from transformer_flax.errors import UserError

OUTPUT = flags.DEFINE_string("output", None, "the picture: PNG, SVG or PDF by its name")
WIDTH = flags.DEFINE_integer("width", 2, "lengths that are one point of a curve", 1)


def main(*paths: str) -> None:
    if not paths:
        raise UserError("name the directories of trained runs, such as runs/sweep-copy/*/seed0")
    from transformer_flax.analysis.scores_by_length import (
        plot_by_length,  # not before the flags are checked: it loads JAX
    )

    curves, trained, lengths = collections.defaultdict(list), set(), set()
    for path in paths:
        name, longest, buckets = measure(path)
        curves[name].append(buckets)
        trained.add(longest)
        lengths.add(tuple(bucket.shortest for bucket in buckets))
    if len(lengths) > 1:
        raise UserError("the runs were tested on sources of different lengths; draw them apart")
    if len(trained) > 1:
        raise UserError(f"the longest sources trained on have {sorted(trained)} tokens; draw these runs apart")
    if OUTPUT.value is not None:
        plot_by_length(curves, trained=trained.pop(), file=OUTPUT.value)
    names = [f"{name} ({len(runs)})" for name, runs in curves.items()]
    print("\n".join(["| tokens | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]))
    for point in zip(*(zip(*runs, strict=True) for runs in curves.values()), strict=True):
        shares = [
            " / ".join(f"{sum(100 * getattr(b, name) for b in runs) / len(runs):.1f} %" for name in ("right", "begun"))
            for runs in point
        ]
        bucket = point[0][0]
        span = f"{bucket.shortest}" + (f" to {bucket.longest}" if bucket.longest > bucket.shortest else "")
        print("| " + " | ".join([span, *shares]) + " |")


def measure(path: str):
    """Returns a run's positions, the tokens of its longest training source, and its scores by length."""
    from transformer_flax.analysis.scores_by_length import load_written, measure_by_length
    from transformer_flax.data.sources import load_pairs
    from transformer_flax.training.run_directory import RunDirectory
    from transformer_flax.training.trained_model import load_setup

    place = RunDirectory(path)
    config, tokenizer, _ = load_setup(place)
    written = [triple for split in ("valid", "test") for triple in load_written(place, split)]
    sources, references, translations = map(list, zip(*written, strict=True))
    lengths = [len(ids) for ids in tokenizer.encode(sources)]
    train = load_pairs(config.data, "train")
    texts = zip(*train.read(range(len(train))), strict=True)
    pairs = zip(*(tokenizer.encode(side) for side in texts), strict=True)
    fits = [source for source, target in pairs if max(len(source), len(target)) < config.data.max_length]
    trained = max(map(len, fits))
    return config.model.positions, trained, measure_by_length(lengths, translations, references, width=WIDTH.value)


if __name__ == "__main__":
    cli.run(main)
