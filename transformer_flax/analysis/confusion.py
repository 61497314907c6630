"""What a classifier takes for what, as a picture."""

import os

import matplotlib.figure
import numpy as np

from transformer_flax.decoding.f1 import ClassScores

CELL = 0.55  # inches
MOST_NUMBERED = 30  # classes, beyond which numbers would not be readable


def plot_confusion(scores: ClassScores, *, file: str | os.PathLike | None = None) -> matplotlib.figure.Figure:
    """Draws how many texts of each class (row) are found to be of which (column), for a notebook or into a file.

    The darker a cell, the larger its share of the row.

    Args:
      scores: such as `run.evaluate(*run.split("test"))` gives for a run that classifies.
      file: a picture to write as well; PNG, SVG or PDF by its name.
    """
    count = len(scores.classes)
    size = max(3.5, CELL * min(count, MOST_NUMBERED) + 1.5)
    figure = matplotlib.figure.Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    shares = scores.confusion / np.maximum(scores.support, 1)[:, None]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    ticks = range(count)
    axes.set_xticks(ticks, scores.classes, rotation=90 if max(map(len, scores.classes)) > 3 else 0, parse_math=False)
    axes.set_yticks(ticks, scores.classes, parse_math=False)
    axes.set(xlabel="found to be", ylabel="is")
    axes.set_title(f"accuracy {scores.accuracy:.1%}, macro-F1 {scores.macro_f1:.1%}", fontsize="medium")
    if count <= MOST_NUMBERED:
        for (row, column), number in np.ndenumerate(scores.confusion):
            if number:
                colour = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, f"{number:,}", ha="center", va="center", color=colour, fontsize="small")
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure
