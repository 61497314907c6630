"""Pictures of attention and of runs.

Each function `plot_...` returns a figure, for a notebook. With `file`, it also writes the figure. The file's name
chooses PNG, SVG or PDF.
Arguments count layers and heads from 0, as arrays do; pictures count them from 1, as the paper does.
"""

import math
import os
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from ml_collections import ConfigDict

from transformer_flax.analysis.alignment import Links, word_weights
from transformer_flax.analysis.attention import Attention
from transformer_flax.decoding.scoring import ClassScores
from transformer_flax.errors import UserError, look_up
from transformer_flax.files import read_json_lines
from transformer_flax.training.optimizer import make_schedule
from transformer_flax.training.run_directory import RunDirectory

File = str | os.PathLike[str] | None
INCH_A_TOKEN = 0.26
INCHES_PER_LETTER = 0.09
INCHES_OF_LINES = 1.7  # from the tokens above to the tokens below
INCHES_OF_TITLE = 2.6  # the least width of a figure with lines
INCHES_A_HEAD = 0.65, 0.2  # in a legend, across and down
WHO_ATTENDS = {"encoder": ("source", "source"), "decoder": ("read", "read"), "cross": ("written", "source")}
X_AXES = {"step": ("step", 1), "minutes": ("seconds", 60)}
CELL = 0.55  # inches
MOST_NUMBERED = 30  # most classes with numbers; more numbers would not be legible


def save(figure: Figure, file: File) -> Figure:
    """Writes a figure if a file is given; returns the figure."""
    if file is not None:
        figure.savefig(file, dpi=120)
    return figure


def head_colours(count: int) -> list[str]:
    """Returns a colour for each head, as "#rrggbb"."""
    if count <= 10:
        return [to_hex(matplotlib.colormaps["tab10"](number)) for number in range(count)]
    return [to_hex(matplotlib.colormaps["hsv"](number / count)) for number in range(count)]


def plot_heads(
    attention: Attention, kind: str = "cross", layer: int = -1, *, heads: Sequence[int] | None = None, file: File = None
) -> Figure:
    """Draws a heatmap of each head of a layer: rows are tokens that attend, columns are tokens attended to.

    Args:
      kind: "encoder" or "decoder" (self-attention), or "cross".
      layer: counted from 0, or backwards from -1.
      heads: counted from 0; None for all.

    Raises:
      UserError: there is no such layer or head.
    """
    weights, heads = attention.layer(kind, layer), attention.heads(kind, heads)
    rows, columns = attention.labels(kind)
    across = min(len(heads), 4)
    down = -(-len(heads) // across)
    width = across * (INCH_A_TOKEN * len(columns) + 0.3) + 1.8
    height = down * (INCH_A_TOKEN * len(rows) + 0.5) + 1.0
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(heads) :]:
        axes.set_axis_off()
    images = []
    for axes, head in zip(grid.flat, heads, strict=False):
        images.append(_heatmap(axes, weights[head], rows, columns))
        axes.set_title(f"head {head + 1}", fontsize=9)
    bar = figure.colorbar(images[0], ax=grid, shrink=min(1, 2.5 / height), aspect=12, pad=0.01, ticks=(0, 0.5, 1))
    bar.set_label("weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    attending, attended = WHO_ATTENDS[kind]
    figure.suptitle(_title(attention, kind, layer), fontsize=10)
    figure.supylabel(attending, fontsize=9)
    figure.supxlabel(attended, fontsize=9)
    return save(figure, file)


def plot_words(
    attention: Attention,
    links: Links = frozenset(),
    *,
    layers: Sequence[int] | None = (-1,),
    heads: Sequence[int] | None = None,
    by: str = "written",
    file: File = None,
) -> Figure:
    """Draws a heatmap of `word_weights`, with a dot for each link of an alignment."""
    weights = word_weights(attention, layers=layers, heads=heads, by=by)
    size = INCH_A_TOKEN * len(attention.source.words) + 1.6, INCH_A_TOKEN * len(attention.target.words) + 1.4
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    _heatmap(axes, weights, attention.target.words, attention.source.words)
    for source, target in links:
        axes.plot(source, target, "o", color="tab:orange", markersize=5)
    return save(figure, file)


def _title(attention: Attention, kind: str, layer: int) -> str:
    count = len(attention.layers(kind))
    return f"{kind} attention, layer {layer % count + 1} of {count}"


def _heatmap(axes: Axes, weights: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> AxesImage:
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    # parse_math=False: two dollar signs in a text are not a formula.
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
    axes.tick_params(length=0)
    return image


def plot_lines(
    attention: Attention,
    kind: str = "encoder",
    layer: int = -1,
    *,
    word: int | str | None = None,
    heads: Sequence[int] | None = None,
    file: File = None,
) -> Figure:
    """Draws the paper's figures 3 to 5: lines from tokens (above) to the tokens attended to, a colour for each head.

    Args:
      kind, layer, heads: as in `plot_heads`.
      word: draw only the lines of this word, and mark the tokens it attends to. Given as the number of a token, from 0;
        the label of a token; or a whole word of several tokens. None for all words.

    Raises:
      UserError: there is no such layer or head, no such word, or more than one.
    """
    weights, heads = attention.layer(kind, layer), attention.heads(kind, heads)
    colours = head_colours(weights.shape[0])
    rows, columns = attention.labels(kind)
    chosen = range(len(rows)) if word is None else _find(word, attention, kind)
    wide = max(len(rows), len(columns))
    above, below = ((wide - len(labels)) / 2 for labels in (rows, columns))  # centres the shorter side
    room = [(INCHES_PER_LETTER * max(map(len, labels)) + 0.15) / INCHES_OF_LINES for labels in (rows, columns)]
    width = max(INCH_A_TOKEN * (wide + 1), INCHES_OF_TITLE)
    down = math.ceil(len(heads) * INCHES_A_HEAD[0] / width)
    head_room = 0.3 + INCHES_A_HEAD[1] * down  # inches of the title and the legend
    height = INCHES_OF_LINES * (1 + sum(room)) + head_room
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1 - head_room / height))
    beyond = (width / INCH_A_TOKEN - wide) / 2  # margin on each side, in tokens
    axes.set(xlim=(-0.5 - beyond, wide - 0.5 + beyond), ylim=(-room[1], 1 + room[0]))
    axes.set_axis_off()
    figure.suptitle(_title(attention, kind, layer), fontsize=10, y=1 - 0.05 / height)
    axes.legend(
        handles=[Patch(facecolor=colours[head], label=f"head {head + 1}") for head in heads],
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        borderaxespad=0,
        ncols=math.ceil(len(heads) / down),
        fontsize=8,
        frameon=False,
        handlelength=0.8,
        columnspacing=0.8,
    )
    lines, shades, stripes = [], [], []
    width = 0.9 / len(heads)  # lines of different heads are side by side
    for number, head in enumerate(heads):
        beside = width * (number + 0.5) - 0.45
        for row in chosen:
            for column in range(len(columns)):
                lines.append([(row + above + beside, 1), (column + below + beside, 0)])
                shades.append(to_rgba(colours[head], float(weights[head, row, column])))
                stripes.append(Rectangle((column + below + beside - width / 2, -room[1]), width, room[1] - 0.02))
    axes.add_collection(LineCollection(lines, colors=shades, linewidths=1.5))
    if word is not None:
        paler = [(*shade[:3], 0.6 * shade[3]) for shade in shades]  # keeps words legible
        axes.add_collection(PatchCollection(stripes, facecolors=paler, edgecolors="none", zorder=0))
        for row in chosen:
            axes.add_patch(Rectangle((row + above - 0.45, 1.02), 0.9, room[0], color="0.88", zorder=0))
    for labels, left, y, va in ((rows, above, 1.05, "bottom"), (columns, below, -0.05, "top")):
        for number, label in enumerate(labels):
            axes.text(number + left, y, label, va=va, ha="center", rotation=90, fontsize=9, parse_math=False)
    return save(figure, file)


def _find(word: int | str, attention: Attention, kind: str) -> list[int]:
    """Returns the rows of a word, or of a token with that number or label."""
    labels, _ = attention.labels(kind)
    sentence = attention.source if kind == "encoder" else attention.target
    later = kind == "decoder"  # a token is read one position after it is written
    found = [[row] for row, label in enumerate(labels) if word in (row, label)] or [
        [row + later for row, its_words in enumerate(sentence.words_of) if number in its_words]
        for number, other in enumerate(sentence.words)
        if other == word
    ]
    if len(found) != 1:
        first = [rows[0] for rows in found]
        what = f"there are {len(found)}, at {first}; give the number of one" if found else "there is none"
        raise UserError(f"word is {word!r}; {what}; the tokens are {' '.join(labels)}")
    return found[0]


def plot_curves(
    workdirs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    metric: str = "valid/bleu",
    *,
    x: str = "minutes",
    file: File = None,
) -> Figure:
    """Draws a metric of one or several runs. The legend has the runs' names, or their directories if names repeat.

    The last point is the final evaluation, which may be of the mean of more checkpoints, or of more sentences.

    Args:
      workdirs: the runs' working directories, or a single one.
      metric: a name in metrics.jsonl, such as "valid/bleu" or "train/loss".
      x: "minutes" since the run began, evaluation included, or "step".

    Raises:
      UserError: a directory holds no run, a run lacks the metric, or `x` is unknown.
    """
    name, unit = look_up("x", x, X_AXES)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    directories = [*map(RunDirectory, [workdirs] if isinstance(workdirs, (str, os.PathLike)) else workdirs)]
    names = [workdir.load_config().name for workdir in directories]
    for workdir, run in zip(directories, names, strict=True):
        lines = read_json_lines(workdir.metrics_file)
        points = [(line[name] / unit, line[metric]) for line in lines if metric in line]
        if not points:
            measured = sorted({key for line in lines for key in line} - {"step", "seconds"})
            raise UserError(f"{workdir.path} has no {metric}; it has {', '.join(measured) or 'nothing yet'}")
        label = str(workdir.path) if names.count(run) > 1 else run
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else "", label=label)
    axes.set(xlabel=x, ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend()
    return save(figure, file)


def plot_schedule(configs: Sequence[ConfigDict], *, file: File = None) -> Figure:
    """Draws the learning rate of each config from the first step to the last, with its peak in the legend.

    A config is, for example, `configs.base.get_config()` or `run.config`.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for config in configs:
        warmup = config.optimizer.warmup_steps  # most points are near the end of the warm-up, where the curve bends
        steps = np.unique(np.r_[np.linspace(1, config.steps, 500), np.linspace(1, 2 * warmup, 500), warmup].astype(int))
        steps = steps[steps <= config.steps]
        rate = np.asarray(make_schedule(config)(steps - 1))
        axes.plot(steps, rate, label=f"{config.name}: at most {rate.max():.3g}, at step {steps[rate.argmax()]:,}")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    return save(figure, file)


def plot_confusion(scores: ClassScores, *, file: File = None) -> Figure:
    """Draws the number of texts by true class (row) and predicted class (column), darker with the share of the row.

    `scores` are a classifier's, such as `run.evaluate(*run.split("test"))`.
    """
    count = len(scores.classes)
    size = max(3.5, CELL * min(count, MOST_NUMBERED) + 1.5)
    figure = Figure(figsize=(size, size), layout="constrained")
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
    return save(figure, file)


def principal_plane(vectors: np.ndarray) -> np.ndarray:
    """Projects vectors [N, d_model] onto the plane in which they differ most: [N, 2].

    The vectors are scaled to length 1 first, so that directions count and not the frequency of words.
    """
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    u, s, _ = np.linalg.svd(directions - directions.mean(axis=0), full_matrices=False)
    return u[:, :2] * s[:2]


def plot_plane(words: Sequence[str], vectors: np.ndarray, *, file: File = None) -> Figure:
    """Draws at least three words in the principal plane of their vectors [words, d_model]."""
    points = principal_plane(vectors)
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*points.T, s=6, color="grey")
    for word, point in zip(words, points, strict=True):
        axes.annotate(word, point, xytext=(3, 2), textcoords="offset points", fontsize=8, parse_math=False)
    axes.set(xlabel="first principal component", ylabel="second")
    axes.grid(alpha=0.3)
    return save(figure, file)


def plot_positions(encoding: np.ndarray, *, file: File = None) -> Figure:
    """Draws encodings of positions as colours, beside the cosine of each pair of positions.

    `encoding` is [length, d_model], such as `sinusoids(100, 512)` of `transformer_flax.model.positions`, or a run's
    learned encodings, `run.params["positions"]["table"]`.
    """
    encoding = np.asarray(encoding)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    widest = np.abs(encoding).max()
    image = left.imshow(encoding, cmap="RdBu", vmin=-widest, vmax=widest, aspect="auto", interpolation="nearest")
    left.set(xlabel="feature", ylabel="position", title="encoding")
    figure.colorbar(image, ax=left)
    image = right.imshow(similarity(encoding), cmap="viridis", interpolation="nearest")
    right.set(xlabel="position", ylabel="position", title="cosine of two positions")
    figure.colorbar(image, ax=right)
    return save(figure, file)


def similarity(encoding: np.ndarray) -> np.ndarray:
    """Returns the cosine of each pair of positions, [length, length].

    For sinusoids, the cosine depends only on the distance between the positions:

    PE(p) . PE(q) = sum_i sin(p w_i) sin(q w_i) + cos(p w_i) cos(q w_i) = sum_i cos((p - q) w_i)
    """
    norms = np.linalg.norm(encoding, axis=1)
    return encoding @ encoding.T / (norms[:, None] * norms)
