"""Pictures of attention: heads as heatmaps, as lines like the paper's figures 3 to 5, and of whole words."""

import os
from collections.abc import Sequence

import matplotlib
import matplotlib.figure
import numpy as np
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import Rectangle

from transformer_flax.analysis.alignment import Links, word_weights
from transformer_flax.analysis.attention import Attention
from transformer_flax.errors import UserError

INCH_A_TOKEN = 0.26
INCH_A_LETTER = 0.09
INCHES_OF_LINES = 1.7  # from the words above to those below
WHO_ATTENDS = {"encoder": ("source", "source"), "decoder": ("read", "read"), "cross": ("written", "source")}


def head_colours(count: int) -> list[str]:
    """A colour for each head, as "#rrggbb"."""
    if count <= 10:
        return [to_hex(matplotlib.colormaps["tab10"](number)) for number in range(count)]
    return [to_hex(matplotlib.colormaps["hsv"](number / count)) for number in range(count)]


def plot_heads(
    attention: Attention,
    kind: str = "cross",
    layer: int = -1,
    *,
    heads: Sequence[int] | None = None,
    file: str | os.PathLike | None = None,
) -> matplotlib.figure.Figure:
    """A heatmap of each head of a layer: a row for each token that attends, a column for each that is attended to.

    Args:
      attention: what is drawn.
      kind: "encoder" or "decoder" (self-attention), or "cross".
      layer: counted from 0, or from -1 backwards.
      heads: counted from 0; None for all.
      file: a picture to write as well; PNG, SVG or PDF by its name.
    """
    weights, heads = attention.weights(kind, layer), attention.heads(heads)
    rows, columns = attention.labels(kind)
    across = min(len(heads), 4)
    down = -(-len(heads) // across)
    size = (
        across * (INCH_A_TOKEN * len(columns) + 0.3) + 1.2,
        down * (INCH_A_TOKEN * len(rows) + 0.5) + 1.0,
    )
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(heads) :]:
        axes.set_axis_off()
    for axes, head in zip(grid.flat, heads, strict=False):
        _heatmap(axes, weights[head], rows, columns)
        axes.set_title(f"head {head}", fontsize=9)
    who, what = WHO_ATTENDS[kind]
    figure.suptitle(f"{kind} attention, layer {layer % len(attention.layers(kind))}", fontsize=10)
    figure.supylabel(who, fontsize=9)
    figure.supxlabel(what, fontsize=9)
    return _written(figure, file)


def _heatmap(axes, weights: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> None:
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    # Not as formulas: two dollars in a text are no mathematics.
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
    axes.tick_params(length=0)


def plot_lines(
    attention: Attention,
    kind: str = "encoder",
    layer: int = -1,
    *,
    word: int | str | None = None,
    heads: Sequence[int] | None = None,
    file: str | os.PathLike | None = None,
) -> matplotlib.figure.Figure:
    """The paper's figures 3 to 5: lines from tokens, above, to what they attend to, below, in a colour for each head.

    Args:
      attention: what is drawn.
      kind: "encoder" or "decoder" (self-attention), or "cross".
      layer: counted from 0, or from -1 backwards.
      word: draw the lines of this one alone, and mark what it attends to: the number of a token, from 0, or its label,
        or a whole word of several tokens; None for all.
      heads: counted from 0; None for all.
      file: a picture to write as well; PNG, SVG or PDF by its name.

    Raises:
      UserError: there is no such word, or more than one.
    """
    weights, heads = attention.weights(kind, layer), attention.heads(heads)
    colours = head_colours(weights.shape[0])
    rows, columns = attention.labels(kind)
    chosen = range(len(rows)) if word is None else _find(word, attention, kind)
    wide = max(len(rows), len(columns))
    above, below = ((wide - len(labels)) / 2 for labels in (rows, columns))  # the shorter side is centred
    room = [(INCH_A_LETTER * max(map(len, labels)) + 0.15) / INCHES_OF_LINES for labels in (rows, columns)]
    height = INCHES_OF_LINES * (1 + sum(room))
    figure = matplotlib.figure.Figure(figsize=(INCH_A_TOKEN * (wide + 1), height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1, wide), ylim=(-room[1], 1 + room[0]))
    axes.set_axis_off()
    lines, shades, stripes = [], [], []
    width = 0.9 / len(heads)  # side by side, so that none hides another
    for number, head in enumerate(heads):
        beside = width * (number + 0.5) - 0.45
        for row in chosen:
            for column in range(len(columns)):
                lines.append([(row + above + beside, 1), (column + below + beside, 0)])
                shades.append(to_rgba(colours[head], float(weights[head, row, column])))
                stripes.append(Rectangle((column + below + beside - width / 2, -room[1]), width, room[1] - 0.02))
    axes.add_collection(LineCollection(lines, colors=shades, linewidths=1.5))
    if word is not None:
        paler = [(*shade[:3], 0.6 * shade[3]) for shade in shades]  # so that words stay legible
        axes.add_collection(PatchCollection(stripes, facecolors=paler, edgecolors="none", zorder=0))
        for row in chosen:
            axes.add_patch(Rectangle((row + above - 0.45, 1.02), 0.9, room[0], color="0.88", zorder=0))
    style = {"rotation": 90, "ha": "center", "fontsize": 9, "parse_math": False}
    for number, label in enumerate(rows):
        axes.text(number + above, 1.05, label, va="bottom", **style)
    for number, label in enumerate(columns):
        axes.text(number + below, -0.05, label, va="top", **style)
    return _written(figure, file)


def _find(word: int | str, attention: Attention, kind: str) -> list[int]:
    """The rows that a word, or a token of that label, has."""
    labels, _ = attention.labels(kind)
    if isinstance(word, int):
        if not 0 <= word < len(labels):
            raise UserError(f"word is {word}; it must be from 0 to {len(labels) - 1}, or one of {' '.join(labels)}")
        return [word]
    sentence = attention.source if kind == "encoder" else attention.target
    later = kind == "decoder"  # a token is read a position later than it is written
    found = [[row] for row, label in enumerate(labels) if label == word] or [
        [row + later for row, its_words in enumerate(sentence.words_of) if number in its_words]
        for number, other in enumerate(sentence.words)
        if other == word
    ]
    if len(found) != 1:
        first = [rows[0] for rows in found]
        what = f"there are {len(found)}, at {first}; give the number of one" if found else "there is none"
        raise UserError(f"word is {word!r}; {what}; the tokens are {' '.join(labels)}")
    return found[0]


def plot_words(
    attention: Attention,
    links: Links = frozenset(),
    *,
    layers: Sequence[int] | None = (-1,),
    heads: Sequence[int] | None = None,
    by: str = "written",
    file: str | os.PathLike | None = None,
) -> matplotlib.figure.Figure:
    """A heatmap of how whole words attend, as `word_weights` has it, with a dot where a link of an alignment is."""
    weights = word_weights(attention, layers=layers, heads=heads, by=by)
    size = INCH_A_TOKEN * len(attention.source.words) + 1.6, INCH_A_TOKEN * len(attention.target.words) + 1.4
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    _heatmap(axes, weights, attention.target.words, attention.source.words)
    for source, target in links:
        axes.plot(source, target, "o", color="tab:orange", markersize=5)
    return _written(figure, file)


def _written(figure: matplotlib.figure.Figure, file: str | os.PathLike | None) -> matplotlib.figure.Figure:
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure
