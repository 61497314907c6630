"""Curves of one or several runs, as they stand in their working directories."""

import os
from collections.abc import Sequence

import matplotlib.figure

from transformer_flax.errors import UserError
from transformer_flax.training.metrics import read_lines
from transformer_flax.training.workdir import Workdir

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
