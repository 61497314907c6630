"""How good translations are by how long the sentences are, such as those longer than any that was trained on."""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence

import matplotlib.figure
import numpy as np

from transformer_flax.data.sources import load_pairs
from transformer_flax.errors import UserError
from transformer_flax.training.run_directory import Workdir


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Translations of sentences of like length."""

    shortest: int
    longest: int
    count: int
    right: float  # share of translations that are the reference, to the letter
    begun: float  # share of a reference's words that are there before the first wrong one, on average


def load_written(workdir: Workdir, split: str) -> list[tuple[str, str, str]]:
    """The sources and references of a split, each with the translation that a run has written at its end.

    Raises:
      UserError: the run has none of this text.
    """
    config = workdir.load_config()
    pairs = load_pairs(config.data, split)
    if workdir.load_fingerprints().get(split) != pairs.fingerprint:
        raise UserError(
            f"{workdir.path} was not measured with this {split} split: it has changed, or eval.test was off"
        )
    return [(*pairs[i], ours) for i, ours in enumerate(workdir.load_translations(split, config.steps))]


def measure_by_length(
    lengths: Sequence[int], translations: Sequence[str], references: Sequence[str], *, width: int = 1
) -> list[Bucket]:
    """How right translations are, in buckets of `width` lengths: 1 .. width, width + 1 .. 2 width, ...

    Buckets without a sentence are left out.

    Raises:
      UserError: there are not as many of each, or the width is below 1.
    """
    if not len(lengths) == len(translations) == len(references):
        raise UserError(
            f"there are {len(lengths):,} lengths, {len(translations):,} translations and {len(references):,} "
            "references: each sentence needs one of each"
        )
    if width < 1:
        raise UserError(f"width is {width}; a bucket has at least one length")
    pairs = list(zip(translations, references, strict=True))
    right = np.array([ours == theirs for ours, theirs in pairs], float)
    begun = np.array([_begun(ours.split(), theirs.split()) for ours, theirs in pairs], float)
    bucket = (np.asarray(lengths, int) - 1) // width
    found = []
    for b in np.unique(bucket).tolist():
        own = bucket == b
        shares = float(right[own].mean()), float(begun[own].mean())
        found.append(Bucket(b * width + 1, (b + 1) * width, int(own.sum()), *shares))
    return found


def _begun(ours: list[str], theirs: list[str]) -> float:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    return same / len(theirs) if theirs else float(not ours)


def plot_by_length(
    curves: Mapping[str, Sequence[Sequence[Bucket]]],
    *,
    trained: int | None = None,
    xlabel: str = "tokens of the source",
    file: str | os.PathLike | None = None,
) -> matplotlib.figure.Figure:
    """Draws how right translations are over length: the mean of some runs, and around it all of them.

    Args:
      curves: for each name, its runs (seeds of one config, say), in buckets of the same lengths.
      trained: the greatest length that was trained on, which is marked.
      xlabel: what lengths are.
      file: a picture to write as well; PNG, SVG or PDF by its name.

    Raises:
      UserError: the runs of a name are not measured at the same lengths.
    """
    figure = matplotlib.figure.Figure(figsize=(11, 4), layout="constrained")
    measures = {"right": "exactly right, %", "begun": "words before the first wrong one, %"}
    for axes, (measure, label) in zip(figure.subplots(1, 2, sharex=True), measures.items(), strict=True):
        for name, runs in curves.items():
            if len({tuple((bucket.shortest, bucket.longest) for bucket in run) for run in runs}) > 1:
                raise UserError(f"the runs of {name!r} are not measured at the same lengths; draw them apart")
            middle = [(bucket.shortest + bucket.longest) / 2 for bucket in runs[0]]
            shares = np.array([[100 * getattr(bucket, measure) for bucket in run] for run in runs])
            [line] = axes.plot(middle, shares.mean(axis=0), marker=".", label=name)
            axes.fill_between(middle, shares.min(axis=0), shares.max(axis=0), color=line.get_color(), alpha=0.15)
        if trained is not None:
            axes.axvline(trained + 0.5, color="grey", linestyle="--", linewidth=1, label="longest trained on")
        axes.set(xlabel=xlabel, ylabel=label, ylim=(-3, 103))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure
