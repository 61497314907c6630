"""Names beside points, where there is room."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

DIRECTIONS = np.array([(1, 0), (-1, 0), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7), (0, 1), (0, -1)])
DISTANCES = np.array([5, 12, 20, 30, 42])  # from the point, in typographic points; beyond the first a line leads there
OFFSETS = np.concatenate(DISTANCES[:, None, None] * DIRECTIONS)  # [P places, 2], the nearest first
CLEAR = 4  # typographic points around each point, where no name shall be
FONT_SIZE = 7.5


def label_points(
    axes: Axes, points: Sequence[tuple[float, float]], names: Sequence[str], colours: Sequence[str]
) -> None:
    """Writes the name of each point in its colour, each at the nearest place that covers least of what is there.

    Args:
      axes: in a figure whose layout is settled.
      points: [N] of (x, y).
      names, colours: [N].
    """
    renderer = FigureCanvasAgg(axes.get_figure(root=True)).get_renderer()
    scale = axes.figure.dpi / 72  # pixels in a typographic point
    sides = np.sign(OFFSETS)  # on which of its sides a name's box lies
    places = axes.transData.transform(points)  # [N, 2], in pixels
    taken = _boxes(places, 0, np.full(2, 2 * CLEAR * scale))  # [N points and the names so far, 4]
    for point, place, name, colour in zip(points, places, names, colours, strict=True):
        text = axes.text(0, 0, name, fontsize=FONT_SIZE)
        size = np.array(text.get_window_extent(renderer).size)
        text.remove()
        boxes = _boxes(place + OFFSETS * scale, sides, size)  # [P, 4]
        outside = size.prod() - _overlaps(boxes, np.array([axes.bbox.extents]))[:, 0]
        best = int(np.argmin(np.round(outside + _overlaps(boxes, taken).sum(axis=1))))
        taken = np.concatenate([taken, boxes[best : best + 1]])
        axes.annotate(
            name,
            point,
            xytext=OFFSETS[best],
            textcoords="offset points",
            horizontalalignment={1: "left", 0: "center", -1: "right"}[int(sides[best, 0])],
            verticalalignment={1: "bottom", 0: "center", -1: "top"}[int(sides[best, 1])],
            fontsize=FONT_SIZE,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5} if best >= len(DIRECTIONS) else None,
        ).set_in_layout(False)


def _boxes(anchors: np.ndarray, sides: np.ndarray | int, size: np.ndarray) -> np.ndarray:
    """[N, 4] of (left, bottom, right, top): right of its anchor, around or left of it where the side is 1, 0 or -1."""
    low = anchors + (sides - 1) / 2 * size
    return np.concatenate([low, low + size], axis=1)


def _overlaps(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The area [N, M] that each box of [N, 4] shares with each of [M, 4]."""
    low = np.maximum(ours[:, None, :2], theirs[None, :, :2])
    high = np.minimum(ours[:, None, 2:], theirs[None, :, 2:])
    return np.clip(high - low, 0, None).prod(axis=2)
