"""How good translations are by how long the sentences are, such as those longer than any that was trained on."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import matplotlib.figure
import numpy as np

from transformer_flax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Sentences of like length."""

    shortest: int
    longest: int
    right: int  # sentences whose translation is the reference, to the letter
    count: int

    @property
    def share(self) -> float:
        """Of the right ones among all."""
        return self.right / self.count


def exact_match_by_length(
    lengths: Sequence[int], translations: Sequence[str], references: Sequence[str], *, width: int = 1
) -> list[Bucket]:
    """How many translations are exactly right, in buckets of `width` lengths: 1 .. width, width + 1 .. 2 width, ...

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
    right = np.array([ours == theirs for ours, theirs in zip(translations, references, strict=True)], bool)
    bucket = (np.asarray(lengths, int) - 1) // width
    return [
        Bucket(int(b * width + 1), int((b + 1) * width), int(right[bucket == b].sum()), int((bucket == b).sum()))
        for b in np.unique(bucket)
    ]


def plot_exact_match(
    curves: Mapping[str, Sequence[Sequence[Bucket]]],
    *,
    trained: int | None = None,
    xlabel: str = "tokens of the source",
    file: str | os.PathLike | None = None,
) -> matplotlib.figure.Figure:
    """Draws the share of exactly right translations over length: the mean of some runs, and around it all of them.

    Args:
      curves: for each name, its runs (seeds of one config, say), in buckets of the same lengths.
      trained: the greatest length that was trained on, which is marked.
      xlabel: what lengths are.
      file: a picture to write as well; PNG, SVG or PDF by its name.
    """
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, runs in curves.items():
        middle = [(bucket.shortest + bucket.longest) / 2 for bucket in runs[0]]
        shares = np.array([[100 * bucket.share for bucket in run] for run in runs])
        [line] = axes.plot(middle, shares.mean(axis=0), marker=".", label=name)
        axes.fill_between(middle, shares.min(axis=0), shares.max(axis=0), color=line.get_color(), alpha=0.15)
    if trained is not None:
        axes.axvline(trained + 0.5, color="grey", linestyle="--", linewidth=1, label="longest trained on")
    axes.set(xlabel=xlabel, ylabel="exactly right, %", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend()
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure
