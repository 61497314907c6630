"""The pictures of a sweep's report."""

import io
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from transformer_flax.ablation.comparison import (
    SOURCE_GAIN,
    Comparison,
    Effect,
    Entry,
    Measure,
    agreement,
    curve_of,
    over_training,
)
from transformer_flax.ablation.statistics import Estimate, mean

INK = "#1f2328"  # of text and axes
COLOURS = ("#3b82c4", "#d9822b", "#2a9d6f", "#b0559d", "#8c6d46", "#6f6fd0", "#c94f4f")  # legible on white and on black
BASE_COLOUR = "#8a9099"
GROUP_COLOURS = dict(zip(("A", "B", "C", "D", "E", "big"), COLOURS, strict=False))
MARKERS = "os^DvP*Xp<>hd8"  # tell points of the same colour apart
MOST_NAMED = 24  # variants in a column of a legend
LONGEST_TITLE = 34  # most characters of a panel's title
INCHES_PER_LETTER = 0.07  # of a variant's name
PAPER_MARK: dict[str, Any] = {
    "color": INK,
    "marker": "D",
    "markersize": 4,
    "markerfacecolor": "none",
    "linestyle": "none",
}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # names of variants may contain dollar signs
    "svg.hashsalt": "transformer_flax",  # without this salt, SVG has random ids
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


class Picture(NamedTuple):
    """A figure as PNG and as SVG; the same results give the same bytes."""

    png: bytes  # on white, for Markdown
    svg: bytes  # transparent, in the colours that the reader's system prefers


def draw(comparison: Comparison) -> dict[str, Picture]:
    """Draws the figures of `report.PICTURES` for which there are data."""
    with matplotlib.rc_context(STYLE):
        perplexity, score = comparison.measures
        figures = {
            "differences": differences(comparison),
            "scores": scores(comparison),
            "curves_perplexity": curves(comparison, perplexity),
            "curves_score": curves(comparison, score),
            "curves_gain": curves(comparison, SOURCE_GAIN),
            "agreement": agreement_over_training(comparison),
        }
        return {name: _picture(figure) for name, figure in figures.items() if figure}


def differences(comparison: Comparison) -> Figure | None:
    """Draws our effects beside the paper's, row by row, in both measures. Returns None if there is no effect."""
    entries = [entry for entry in comparison.entries if entry.effects]
    if not entries:
        return None
    figure = Figure(figsize=(8.3 + INCHES_PER_LETTER * _longest_name(entries), 1.7 + 0.25 * len(entries)))
    for axes, measure in zip(figure.subplots(1, 2, sharey=True), comparison.measures, strict=True):
        effects = [entry.effects[measure] for entry in entries]
        scale = _papers_scale(measure, effects)
        axes.axvline(0, color=INK, linewidth=0.8)
        for y, (entry, effect) in enumerate(zip(entries, effects, strict=True)):
            _dumbbell(axes, y, effect, _colour(entry, comparison), scale)
        better = "more" if measure.more_is_better else "less"
        axes.set(title=f"{measure.name}, difference from base", xlabel=f"{measure.unit} ({better} is better)")
        papers = [effect.paper / scale for effect in effects if effect.paper is not None]
        axes.set_xlim(_limits(measure, [effect.ours for effect in effects], [0.0, *papers]))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(9, steps=(1, 2, 5, 10)))
        axes.set_yticks(range(len(entries)), [entry.variant for entry in entries])
        axes.grid(axis="y", visible=False)
        if scale != 1:
            top = axes.secondary_xaxis("top", functions=(lambda x, s=scale: x * s, lambda x, s=scale: x / s))
            top.set_xlabel(f"the paper's {measure.paper_name}")
    figure.axes[0].set_ylim(len(entries) - 0.5, -0.5)
    ours = {"color": BASE_COLOUR, "marker": "o", "linewidth": 1}
    legend = [
        Line2D([], [], **ours, label="here, with its 95 % interval; significant"),
        Line2D([], [], **ours, markerfacecolor="none", label="not significant"),
    ]
    if comparison.is_of_table3:
        legend.append(Line2D([], [], **PAPER_MARK, label="the paper"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3)
    return figure


def scores(comparison: Comparison) -> Figure | None:
    """Draws perplexity against score, here and in the paper. Returns None if there is no entry."""
    if not comparison.entries:
        return None
    perplexity, score = comparison.measures
    panels, columns = 1 + comparison.is_of_table3, -(-len(comparison.entries) // MOST_NAMED)
    figure = Figure(figsize=(4 * panels + (0.6 + INCHES_PER_LETTER * _longest_name(comparison.entries)) * columns, 4.2))
    axes, *papers = figure.subplots(1, panels, squeeze=False).flat
    axes.set(title="here", ylabel=score.level_name)
    markers: dict[str, Iterator[str]] = {}
    points = {}
    for entry in comparison.entries:
        x, y = entry.means[perplexity], entry.means[score]
        place, colour = (perplexity.level(x.value), score.level(y.value)), _colour(entry, comparison)
        marker = next(markers.setdefault(colour, itertools.cycle(MARKERS)))
        bars = {"xerr": _bar(perplexity, x), "yerr": _bar(score, y)}
        axes.errorbar(*place, **bars, fmt="none", color=colour, alpha=0.5, elinewidth=0.7)
        (points[entry.variant],) = axes.plot(*place, marker, color=colour, alpha=0.8)
        for paper in papers:
            paper.set(title="the paper", ylabel=score.paper_name)
            if entry.row:
                paper.plot(entry.row.perplexity, entry.row.bleu, marker, color=colour, alpha=0.8)
    for name, measure in (("x", perplexity), ("y", score)):
        limits = _limits(measure, [entry.means[measure] for entry in comparison.entries])
        getattr(axes, f"set_{name}lim")(*map(measure.level, limits))
    for axes in figure.axes:
        axes.set(xlabel="perplexity", xscale="log")
        low, high = axes.get_xlim()
        _set_ticks(axes.xaxis, wide=high > 3 * low)
    figure.legend(points.values(), points, loc="outside right center", ncols=columns)
    return figure


def curves(comparison: Comparison, measure: Measure) -> Figure | None:
    """Draws a measure over the steps. Returns None if there is no curve.

    Each set of fields that variants change has its own panels. Base is grey.
    """
    drawn = [entry for entry in comparison.entries if any(len(curve_of(run, measure)) > 1 for run in entry.runs)]
    if not drawn:
        return None
    families: dict[str, list[Entry]] = {}
    for entry in drawn:
        if entry is not comparison.base:
            families.setdefault(_varied(entry, comparison), []).append(entry)
    panels = [
        (fields, entries[first : first + len(COLOURS)])
        for fields, entries in families.items()
        for first in range(0, len(entries), len(COLOURS))
    ] or [("base", [])]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width = max(3, 0.9 + INCHES_PER_LETTER * _longest_name(drawn))  # each panel holds its legend
    figure = Figure(figsize=(width * max(columns, 2), 0.4 + 2.3 * rows))
    all_axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for place, (axes, (fields, entries)) in enumerate(zip(all_axes, panels, strict=False)):
        lines = [_curve(axes, comparison.base, measure, BASE_COLOUR)] if comparison.base in drawn else []
        lines += [_curve(axes, entry, measure, colour) for entry, colour in zip(entries, COLOURS, strict=False)]
        if not measure.more_is_better:
            axes.set_yscale("log")
            _set_ticks(axes.yaxis, wide=True)
        axes.set(
            title=textwrap.shorten(fields, LONGEST_TITLE, placeholder=" ..."),
            xlabel="step" if place + columns >= len(panels) else "",
            ylabel="" if place % columns else measure.level_name,
        )
        # Without handles, matplotlib leaves out names that begin with an underscore.
        axes.legend(lines, [line.get_label() for line in lines], handlelength=1.2)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    _cut_the_beginning(all_axes[0], measure, [curve_of(run, measure) for entry in drawn for run in entry.runs])
    return figure


def agreement_over_training(comparison: Comparison) -> Figure | None:
    """Draws the number of rows with the paper's sign, and the rank correlation with the paper's effects, by step.

    Returns None if there are fewer than two evaluations, or too few rows for a rank correlation.
    """
    found = {
        step: then for step, then in over_training(comparison).items() if any(entry.effects for entry in then.rows)
    }
    agreements_in = {
        measure: {step: agreement(then, measure) for step, then in found.items()} for measure in comparison.measures
    }
    rows_in = {measure: max((each.rows for each in of.values()), default=0) for measure, of in agreements_in.items()}
    if len(found) < 2 or not any(each.correlation for of in agreements_in.values() for each in of.values()):
        return None
    figure = Figure(figsize=(9, 3))
    signs, ranks = figure.subplots(1, 2)
    for (measure, agreements), colour in zip(agreements_in.items(), COLOURS, strict=False):
        rows = rows_in[measure]
        if not rows:
            continue
        label = f"{measure.name}, of {rows}"
        signs.plot(list(agreements), [len(each.same) for each in agreements.values()], color=colour, label=label)
        correlations = {step: each.correlation for step, each in agreements.items() if each.correlation}
        ranks.plot(list(correlations), [each.value for each in correlations.values()], color=colour, label=measure.name)
        intervals = {step: each.interval for step, each in correlations.items() if each.interval}
        if intervals:
            low, high = zip(*intervals.values(), strict=True)
            ranks.fill_between(list(intervals), low, high, color=colour, alpha=0.12, linewidth=0)
        signs.axhline(rows / 2, color=INK, linewidth=0.6, linestyle=":")  # expected by chance
    ranks.axhline(0, color=INK, linewidth=0.6, linestyle=":")
    signs.set(title="rows with the paper's sign", xlabel="step of base", ylim=(0, max(rows_in.values())))
    signs.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ranks.set(title="rank correlation with the paper's effects", xlabel="step of base", ylim=(-1, 1))
    signs.legend()
    return figure


def _dumbbell(axes: Axes, y: int, effect: Effect, colour: str, papers_scale: float) -> None:
    if effect.ours.interval:
        axes.plot(effect.ours.interval, [y, y], color=colour, linewidth=1, gid="interval")
    axes.plot(effect.ours.value, y, "o", color=colour, markerfacecolor=colour if effect.significant else "none")
    if effect.paper is not None:
        paper = effect.paper / papers_scale
        axes.plot([paper, effect.ours.value], [y, y], color=colour, linewidth=4, alpha=0.2, solid_capstyle="round")
        axes.plot(paper, y, **PAPER_MARK)


def _set_ticks(axis: Axis, *, wide: bool) -> None:
    """Labels a logarithmic axis: at round numbers if it is `wide`, otherwise at six even steps or fewer."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)) if wide else ticker.MaxNLocator(6))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(ticker.NullLocator())


def _longest_name(entries: Sequence[Entry]) -> int:
    return max(len(entry.variant) for entry in entries)


def _papers_scale(measure: Measure, effects: Sequence[Effect]) -> float:
    """Returns the number of the paper's units in one of ours.

    It is 1 if the measures are the same. Otherwise the largest effects get the same length.
    """
    ours = max(abs(effect.ours.value) for effect in effects)
    paper = max(abs(effect.paper or 0.0) for effect in effects)
    return 1 if measure.name == measure.paper_name or not paper else paper / max(ours, measure.resolution)


def _limits(measure: Measure, estimates: Sequence[Estimate], others: Sequence[float] = ()) -> tuple[float, float]:
    """Returns the ends of an axis. Intervals reach beyond all values by at most half of what these are apart.

    Otherwise two seeds that differ much, whose interval is huge, would move all points into one.
    """
    values = [*others, *(estimate.value for estimate in estimates)]
    spread = max(max(values) - min(values), measure.resolution)
    low, high = min(values) - spread / 2, max(values) + spread / 2
    ends = [*values, *(min(max(end, low), high) for estimate in estimates for end in estimate.interval or ())]
    margin = max(0.05 * (max(ends) - min(ends)), measure.resolution)
    return min(ends) - margin, max(ends) + margin


def _curve(axes: Axes, entry: Entry, measure: Measure, colour: str) -> Line2D:
    """Draws a faint line for each seed, and the mean at the steps that all seeds have. Returns the mean's line."""
    by_seed = [curve_of(run, measure) for run in entry.runs]
    for points in by_seed if len(by_seed) > 1 else []:
        axes.plot(list(points), [measure.level(value) for value in points.values()], color=colour, lw=0.6, alpha=0.4)
    steps = [step for step in by_seed[0] if all(step in points for points in by_seed)]
    means = [measure.level(mean([points[step] for points in by_seed]).value) for step in steps]
    (line,) = axes.plot(steps, means, color=colour, linewidth=1.6, label=entry.variant)
    return line


def _cut_the_beginning(axes: Axes, measure: Measure, all_points: Sequence[dict[float, float]]) -> None:
    """Limits the axis to each curve's values after its first quarter, whose values would flatten the curves."""
    late = [value for points in all_points for step, value in points.items() if step >= max(points) / 4]
    spread = max(late) - min(late)
    margin = 0.08 * spread if spread > measure.resolution else 0.1
    axes.set_ylim(measure.level(min(late) - margin), measure.level(max(late) + margin))


def _varied(entry: Entry, comparison: Comparison) -> str:
    """Returns the fields that a variant changes, or else its name."""
    changes = entry.row.changes if entry.row else entry.runs[0].changes
    return ", ".join(map(comparison.short_name, changes)) or entry.variant


def _colour(entry: Entry, comparison: Comparison) -> str:
    if entry is comparison.base:
        return BASE_COLOUR
    if entry.row:
        return GROUP_COLOURS[entry.variant.split("-")[0]]
    own = [each for each in comparison.own if each is not comparison.base]
    return COLOURS[own.index(entry) % len(COLOURS)]  # as in the curves, where they have one panel


def _bar(measure: Measure, estimate: Estimate) -> list[list[float]] | None:
    """Returns the lengths of an error bar below and above the value, as matplotlib expects them."""
    if estimate.interval is None:
        return None
    value, low, high = (measure.level(number) for number in (estimate.value, *estimate.interval))
    return [[value - low], [high - value]]


def _picture(figure: Figure) -> Picture:
    if layout := figure.get_layout_engine():
        layout.execute(figure)
    figure.set_layout_engine("none")  # no second layout when saving
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # An image in a page inherits no text colour, so the picture sets its own.
    style = f"svg{{color:{INK}}}@media(prefers-color-scheme:dark){{svg{{color:#e6edf3}}}}"
    drawn = svg.getvalue().decode().replace(INK, "currentColor")
    return Picture(png.getvalue(), drawn.replace("<defs>", f"<style>{style}</style><defs>", 1).encode())
