"""Curves of one or several runs, as they stand in their working directories."""

import os
from collections.abc import Sequence

import matplotlib.figure
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.decoding.scoring import ClassScores
from transformer_flax.errors import UserError
from transformer_flax.training.metrics import read_lines
from transformer_flax.training.optimizer import paper_schedule
from transformer_flax.training.run_directory import Workdir

X_AXES = {"step": ("step", 1), "minutes": ("seconds", 60)}


def plot_curves(
    workdirs: Sequence[str | os.PathLike] | str | os.PathLike,
    metric: str = "valid/bleu",
    *,
    x: str = "minutes",
    file: str | os.PathLike | None = None,
) -> matplotlib.figure.Figure:
    """Draws a metric of each run, for a notebook or into a file.

    Args:
      workdirs: of the runs, or of one.
      metric: as it is named in metrics.jsonl, such as "valid/bleu" or "train/loss".
      x: "minutes" since the run began, evaluation included, or "step".
      file: a picture to write as well; PNG, SVG or PDF by its name.

    Raises:
      UserError: a directory holds no run, or a run has not measured that.
    """
    if x not in X_AXES:
        raise UserError(f"x is {x!r}; it must be one of {', '.join(X_AXES)}")
    name, unit = X_AXES[x]
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for workdir in map(Workdir, [workdirs] if isinstance(workdirs, (str, os.PathLike)) else workdirs):
        run = workdir.load_config().name
        lines = read_lines(workdir.metrics_file)
        points = [(line[name] / unit, line[metric]) for line in lines if metric in line]
        if not points:
            measured = sorted({key for line in lines for key in line} - {"step", "seconds"})
            raise UserError(f"{workdir.path} has no {metric}; it has {', '.join(measured) or 'nothing yet'}")
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else "", label=run)
    axes.set(xlabel=x, ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend()
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure


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


def plot_positions(encoding: np.ndarray, *, file: str | os.PathLike | None = None) -> matplotlib.figure.Figure:
    """Draws encodings of positions as colours, and beside them how alike any two positions are.

    Args:
      encoding: [length, d_model], such as `sinusoids(100, 512)` of `transformer_flax.model.positions`, or a run's
        learned ones, `run.params["positions"]["table"]`.
      file: a picture to write as well; PNG, SVG or PDF by its name.
    """
    encoding = np.asarray(encoding)
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    widest = np.abs(encoding).max()
    image = left.imshow(encoding, cmap="RdBu", vmin=-widest, vmax=widest, aspect="auto", interpolation="nearest")
    left.set(xlabel="feature", ylabel="position", title="encoding")
    figure.colorbar(image, ax=left)
    image = right.imshow(similarity(encoding), cmap="viridis", interpolation="nearest")
    right.set(xlabel="position", ylabel="position", title="cosine of two positions")
    figure.colorbar(image, ax=right)
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure


def similarity(encoding: np.ndarray) -> np.ndarray:
    """The cosine of every two positions, [length, length]. Of the paper's sinusoids it depends on their distance only:

    PE(p) . PE(q) = sum_i sin(p w_i) sin(q w_i) + cos(p w_i) cos(q w_i) = sum_i cos((p - q) w_i)
    """
    norms = np.linalg.norm(encoding, axis=1)
    return encoding @ encoding.T / (norms[:, None] * norms)


def plot_schedule(configs: Sequence[ConfigDict], *, file: str | os.PathLike | None = None) -> matplotlib.figure.Figure:
    """Draws the learning rate of each run's config, from its first step to its last, with its peak in the legend.

    Args:
      configs: such as `configs.base.get_config()` or `run.config`.
      file: a picture to write as well; PNG, SVG or PDF by its name.
    """
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for config in configs:
        # Most points where it bends, at the end of the warm-up.
        warmup = config.optimizer.warmup_steps
        steps = np.unique(np.r_[np.linspace(1, config.steps, 500), np.linspace(1, 2 * warmup, 500), warmup].astype(int))
        steps = steps[steps <= config.steps]
        rate = np.asarray(paper_schedule(config.model.d_model, warmup, config.optimizer.factor)(steps - 1))
        axes.plot(steps, rate, label=f"{config.name}: at most {rate.max():.3g}, at step {steps[rate.argmax()]:,}")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure
