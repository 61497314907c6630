"""A picture of the learning rate (section 5.3)."""

import os
from collections.abc import Sequence

import matplotlib.figure
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.training.optimizer import paper_schedule


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
