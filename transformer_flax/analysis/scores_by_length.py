"""The quality of translations by sentence length, also beyond the lengths of training."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from transformer_flax.analysis.plots import File, save
from transformer_flax.data.sources import load_pairs
from transformer_flax.errors import UserError
from transformer_flax.training.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The translations of sentences of similar length."""

    shortest: int
    longest: int
    count: int
    right: float  # share of translations that equal the reference
    begun: float  # mean share of a reference's words before the first wrong one


def load_written(workdir: RunDirectory, split: str) -> list[tuple[str, str, str]]:
    """Loads a split's sources and references, each with the last translation that a run wrote.

    If config.eval limits the sentences to translate, only these are loaded.

    Raises:
      UserError: the run has not translated this split, or the split has changed.
    """
    config = workdir.load_config()
    pairs = load_pairs(config.data, split)
    if workdir.load_fingerprints().get(split) != pairs.fingerprint:
        raise UserError(
            f"{workdir.path} was not measured with this {split} split: it has changed, or eval.test was off"
        )
    translations = workdir.load_translations(split)
    return [(*pair, ours) for pair, ours in zip(pairs.read(range(len(translations))), translations, strict=True)]


def measure_by_length(
    lengths: Sequence[int], translations: Sequence[str], references: Sequence[str], *, width: int = 1
) -> list[Bucket]:
    """Measures translations in buckets of `width` lengths: 1 .. width, width + 1 .. 2 width, ...

    Empty buckets are left out. A length of 0 counts as 1.
    """
    pairs = list(zip(translations, references, strict=True))
    right = np.array([ours == theirs for ours, theirs in pairs], float)
    begun = np.array([_begun(ours.split(), theirs.split()) for ours, theirs in pairs], float)
    bucket = (np.maximum(lengths, 1) - 1) // width
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
    curves: Mapping[str, Sequence[Sequence[Bucket]]], *, trained: int | None = None, file: File = None
) -> Figure:
    """Draws both measures over length: for each name, the mean over its runs, with their range as a band.

    Args:
      curves: by name, the buckets of each run, such as the seeds of one config. These runs have the same lengths.
      trained: the longest length of training, which a line marks.
      file: the picture's file.

    Raises:
      UserError: the runs of a name have buckets of different lengths.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
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
        axes.set(xlabel="tokens of the source", ylabel=label, ylim=(-3, 103))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    return save(figure, file)
