"""The tables of a sweep's report, in Markdown."""

import re
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from transformer_flax.ablation.comparison import Comparison, Effect, Entry
from transformer_flax.ablation.measures import Measure
from transformer_flax.ablation.statistics import Estimate

NONE = "—"


def effects_table(entries: Sequence[Entry], comparison: Comparison) -> str:
    """What each variant but base changes, in both measures; of rows of table 3 beside the paper's."""
    papers = any(entry.row for entry in entries)
    head = ["row" if papers else "variant"]
    for measure in comparison.measures:
        head += [f"{measure.name}, {measure.unit}"]
        head += [f"paper's {measure.paper_name}"] if papers else []
        head += ["p (corrected)"]
    rows = []
    for entry in entries:
        if entry is comparison.base:
            continue
        row = [as_text(entry.variant)]
        for measure in comparison.measures:
            effect = entry.effects[measure]
            row += [_difference(effect, measure.digits)]
            row += [_papers(effect, measure)] if papers else []
            row += [_ps(effect)]
        rows.append([*row, _changes(entry)])
    return table([*head, "changes"], rows, words=(0, len(head)))


def levels_table(entries: Sequence[Entry], comparison: Comparison) -> str:
    """What each variant reached and took; of rows of table 3 beside the paper's."""
    papers = any(entry.row for entry in entries)
    perplexity, score = comparison.measures
    beside = ["perplexity", "BLEU", "parameters"]
    head = [perplexity.level_name, score.level_name, "parameters, millions"]
    if papers:
        head = [name for pair in zip(head, [f"paper's {name}" for name in beside], strict=True) for name in pair]
    rows = []
    for entry in entries:
        run = entry.runs[0]
        row = [_level(perplexity, entry.means[perplexity], 3), _level(score, entry.means[score], score.digits)]
        row += [f"{run.parameters / 1e6:.3g}"]
        if entry.row:
            published = [f"{entry.row.perplexity:.2f}", f"{entry.row.bleu:.1f}", str(entry.row.parameters or "")]
            row = [cell for pair in zip(row, published, strict=True) for cell in pair]
        row += [str(len(entry.runs)), f"{run.steps:,}", f"{np.mean([each.seconds for each in entry.runs]) / 60:.1f}"]
        rows.append([as_text(entry.variant), *row, _flops(run.flops)])
    return table(["row" if papers else "variant", *head, "seeds", "steps", "minutes", "FLOPs"], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = (0,)) -> str:
    """Of these columns are words, of the others numbers."""
    align = ["---" if column in words else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, align, *rows))


def as_text(text: str) -> str:
    """As it is: on one line, and nothing in it is Markdown or HTML."""
    return re.sub(r"([\\`*\[\]<>|~&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", " ".join(text.split()))


def _difference(effect: Effect, digits: int) -> str:
    text = f"{effect.ours.value:+z.{digits}f}"
    if effect.ours.interval:
        text += f" ± {effect.ours.interval[1] - effect.ours.value:.{digits}f}"
    return f"**{text}**" if effect.significant else text


def _ps(effect: Effect) -> str:
    return NONE if effect.ours.p is None else f"{effect.ours.p:.2g} ({effect.p:.2g})"


def _papers(effect: Effect, measure: Measure) -> str:
    if effect.paper is None:
        return NONE
    mark = {True: " ✓", False: " ✗", None: ""}[effect.has_papers_sign]
    return f"{effect.paper:+z.{measure.paper_digits}f}{mark}"


def _level(measure: Measure, mean: Estimate, digits: int) -> str:
    text = f"{measure.level(mean.value):.{digits}f}"
    if mean.interval is None:
        return text
    low, high = map(measure.level, mean.interval)
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def _flops(flops: float) -> str:
    return f"{flops:.2e}".replace("e+", "e") if flops else NONE


def _changes(entry: Entry) -> str:
    """Of the base config; without sections, and without how a run is evaluated, which is no part of the model."""
    changes = {field: value for field, value in entry.runs[0].changes.items() if not field.startswith("eval.")}
    return as_text(", ".join(f"{field.split('.')[-1]} {value}" for field, value in changes.items()))
