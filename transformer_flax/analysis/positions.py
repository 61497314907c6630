"""Pictures of how positions are told apart (section 3.5)."""

import os

import matplotlib.figure
import numpy as np


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
