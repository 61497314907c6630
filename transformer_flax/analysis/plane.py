"""A picture of word vectors in a plane."""

import os
from collections.abc import Sequence

import matplotlib.figure
import numpy as np


def principal_plane(vectors: np.ndarray) -> np.ndarray:
    """Where vectors [N, d_model] lie in the plane in which they differ most: [N, 2].

    They are taken at length 1, so that their cosines count and not how frequent the words are.
    """
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    u, s, _ = np.linalg.svd(directions - directions.mean(axis=0), full_matrices=False)
    return u[:, :2] * s[:2]


def plot_plane(
    words: Sequence[str], vectors: np.ndarray, *, file: str | os.PathLike | None = None
) -> matplotlib.figure.Figure:
    """Writes words where their vectors [words, d_model] lie in their principal plane.

    Args:
      words: at least three.
      vectors: theirs.
      file: a picture to write as well; PNG, SVG or PDF by its name.
    """
    points = principal_plane(vectors)
    figure = matplotlib.figure.Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*points.T, s=6, color="grey")
    for word, point in zip(words, points, strict=True):
        axes.annotate(word, point, xytext=(3, 2), textcoords="offset points", fontsize=8, parse_math=False)
    axes.set(xlabel="first principal component", ylabel="second")
    axes.grid(alpha=0.3)
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure
