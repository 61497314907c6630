"""The report of a sweep: the effect of each variant with its interval, beside the paper's, as Markdown and HTML."""

import base64
import html
import json
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import markdown_it
import numpy as np

from transformer_flax.ablation import figures, table3
from transformer_flax.ablation.comparison import (
    ACCURACY,
    BLEU,
    SIGNIFICANT,
    Agreement,
    Comparison,
    Effect,
    Entry,
    Measure,
    agreement,
    compare,
)
from transformer_flax.ablation.results import Result
from transformer_flax.ablation.statistics import Estimate
from transformer_flax.console import counted
from transformer_flax.files import write_whole

TEMPLATE = pathlib.Path(__file__).with_name("report.html")
NONE = "—"  # an empty cell
PICTURES = {  # captions by the names of `figures.draw`
    "differences": "Difference of each variant from base",
    "agreement": "Agreement with the paper over the steps",
    "scores": "Perplexity against score",
    "curves_score": "Score over the steps",
    "curves_perplexity": "Perplexity over the steps",
    "curves_gain": "Source gain over the steps",
}

ABOUT_AGREEMENT = (
    "The same comparison at each evaluation of base: the number of rows that differ from base as in the paper, and the "
    "rank correlation of the effects with the paper's. A row with more steps than base is compared at the same share "
    "of its own. Dotted: expected by chance."
)


def write(results: Sequence[Result], base: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Writes `report.md` with its pictures, and `index.html`, which needs no other file.

    The same results give the same files, in any order.

    Args:
      results: of all runs, finished or failed; of several of a run the last counts.
      base: the head of the results: "name", "config" (flat), and "sessions", each with its "command", "versions",
        "hardware" and "commit".
      folder: created if necessary; pictures of an earlier report that have no data now are removed.

    Returns:
      The path of `report.md`.

    Raises:
      UserError: there are no results.
    """
    comparison = compare(results, base["config"])
    pictures = figures.draw(comparison)
    title = f"Table 3 on {base['name']}" if comparison.is_of_table3 else f"A sweep on {base['name']}"
    markdown = "\n\n".join([f"# {as_text(title)}", *_blocks(comparison, base, pictures.keys())]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        if name in pictures:
            write_whole(folder / f"{name}.png", pictures[name].png)
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)
    svgs = {f"{name}.png": picture.svg for name, picture in pictures.items()}
    write_whole(folder / "index.html", _page(title, markdown, svgs))
    write_whole(folder / "report.md", markdown)
    return folder / "report.md"


def _page(title: str, markdown: str, svgs: Mapping[str, bytes]) -> str:
    """Renders Markdown as a page without scripts of its own, with an SVG in place of each image of that name."""
    renderer = markdown_it.MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = renderer.parse(markdown)
    for child in [child for token in tokens for child in token.children or [] if child.type == "image"]:
        svg = base64.b64encode(svgs[str(child.attrs["src"])]).decode()
        child.attrs["src"] = f"data:image/svg+xml;base64,{svg}"
    body = renderer.renderer.render(tokens, renderer.options, {})
    return TEMPLATE.read_text("utf-8").replace("{{TITLE}}", html.escape(title)).replace("{{BODY}}", body)


def _blocks(comparison: Comparison, base: Mapping[str, Any], pictures: Collection[str]) -> list[str]:
    def shown(*names: str) -> list[str]:
        return [f"![{PICTURES[name]}]({name}.png)" for name in names if name in pictures]

    parts = [entries for entries in (comparison.rows, comparison.own) if entries]
    blocks = [*_summary(comparison), *_missing(comparison, base)]
    if "differences" in pictures:
        blocks += ["## Effects", *shown("differences")]
        # Base has no line in the first table, which is empty without another row.
        blocks += [effects_table(entries, comparison) for entries in parts if entries != [comparison.base]]
        blocks += [_legend(comparison)]
    if "agreement" in pictures:
        blocks += ["## Agreement over training", ABOUT_AGREEMENT, *shown("agreement")]
    if parts:
        blocks += ["## Scores", *shown("scores"), *(levels_table(entries, comparison) for entries in parts)]
        blocks += [
            "Means over seeds (geometric for perplexity) with 95 % intervals where seeds differ. Minutes include "
            "evaluations, and whatever else the machine did; seeds trained together share them. FLOPs are those of all "
            "matrix products of training."
        ]
    if "curves_score" in pictures:
        blocks += ["## Curves", _about_curves(base["config"], with_gain="curves_gain" in pictures)]
        blocks += shown("curves_score", "curves_perplexity", "curves_gain")
    return [*blocks, "## How it was measured", _methods(comparison), "## What was swept", *_swept(base)]


def _summary(comparison: Comparison) -> list[str]:
    counts = sorted({len(entry.runs) for entry in comparison.entries})
    if not counts:
        return ["No run has finished."]
    seeds = "one seed" if counts == [1] else f"{' to '.join(str(n) for n in sorted({counts[0], counts[-1]}))} seeds"
    of = [f"{counted(len(comparison.rows), 'row')} of the paper's table 3"] if comparison.rows else []
    others = sum(entry.variant not in table3.BEYOND for entry in comparison.own)
    rows = len(comparison.own) - others
    of += [f"{counted(rows, 'row')} beyond table 3"] if rows else []
    of += [f"{counted(others, 'variant')} of other fields"] if others else []
    runs = counted(sum(len(entry.runs) for entry in comparison.entries), "finished run")
    blocks = [
        *_in_short(comparison),
        f"{runs}: {' and '.join(of)}, {seeds} each. "
        "Every score is of the validation split at the end of training; the paper's table 3 is of newstest2013.",
    ]
    if counts == [1]:
        blocks.append("**One seed tells nothing about chance:** there are no intervals and no tests.")
    if not comparison.base:
        blocks.append(f"**There is no base among the finished runs,** so no effects: {_mend_base(comparison)}.")
    elif any(entry.effects for entry in comparison.rows):
        measures = reversed(comparison.measures)
        blocks.append("\n".join(_agreement(measure, agreement(comparison, measure)) for measure in measures))
    return blocks


def _in_short(comparison: Comparison) -> list[str]:
    """Names the changes of perplexity that disagree with the paper, and those that are significant."""
    measure = comparison.measures[0]
    effects = {entry.variant: entry.effects[measure] for entry in comparison.rows if entry.effects}
    effects = {variant: effect for variant, effect in effects.items() if effect.paper}
    if len(effects) < 2:
        return []
    against = [variant for variant, effect in effects.items() if not effect.has_papers_sign]
    exceptions = f" (not {', '.join(against)})" if against else ""
    text = (
        f"**{len(effects) - len(against)} of the {len(effects)} changes of table 3 that made the paper's perplexity "
        f"better or worse do the same here**{exceptions}."
    )
    if all(effect.p is None for effect in effects.values()):
        return [f"{text} One seed cannot tell how much of it is chance."]
    for direction, sign in (("the paper's", True), ("the other", False)):
        found = [variant for variant, each in effects.items() if each.significant and each.has_papers_sign == sign]
        text += f" Significant in {direction} direction: {', '.join(found) or 'none'}."
    return [text]


def _mend_base(comparison: Comparison) -> str:
    if any(result.row == "base" and not result.changes for result in comparison.failed):
        return "it has failed"
    if any(run.row == "base" for entry in comparison.entries for run in entry.runs):
        return "give the grid the base's own values, too"
    return "add `base` to `--rows`"


def _agreement(measure: Measure, found: Agreement) -> str:
    beside = f", beside the paper's {measure.paper_name}" if measure.name != measure.paper_name else ""
    text = (
        f"- **{measure.name[0].upper()}{measure.name[1:]}**{beside}: of {counted(found.rows, 'row')} in which the "
        f"paper sees an effect, **{found.same_sign}** {'has' if found.same_sign == 1 else 'have'} its sign here."
    )
    if found.tested:
        of = f" of the {found.tested} that can be tested" if found.tested < found.rows else ""
        text += f" In {found.significant}{of} the effect is significant, "
        text += f"in {found.significant_same_sign} of these with the paper's sign."
    if found.correlation is None:
        return f"{text} They are too few, or too alike, for a rank correlation."
    rho = found.correlation
    interval = f" [{rho.interval[0]:.2f}, {rho.interval[1]:.2f}]" if rho.interval else ""
    text += f" Rank correlation of our effects and the paper's, over {counted(found.ranked, 'row')}: "
    return f"{text}**{rho.value:.2f}**{interval}."


def _missing(comparison: Comparison, base: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- {as_text(result.variant)}, seed {result.seed}, failed: {as_text(result.error or 'unknown reason')}"
        for result in comparison.failed
    ]
    for variant, seeds in comparison.missing_seeds.items():
        lines.append(f"- {as_text(variant)}: no seed {' or '.join(map(str, seeds))}")
    if comparison.missing_rows:
        lines.append(f"- of table 3, not run: {', '.join(comparison.missing_rows)}")
    if not lines:
        return []
    return [
        "## What is missing",
        "\n".join(lines),
        "This command resumes the sweep if its `--workdir` holds `results.jsonl`. Add rows and seeds that it does not "
        "name:",
        _code(base["sessions"][-1]["command"]),
    ]


def _legend(comparison: Comparison) -> str:
    text = (
        f"Differences from {as_text(comparison.base.variant if comparison.base else 'base')} with 95 % intervals. "
        f"Bold: significant, with a corrected p below {SIGNIFICANT:.2g}; the uncorrected p stands before it."
    )
    if comparison.is_of_table3:
        text += " ✓: ours has the paper's sign. ✗: it has not."
    if comparison.other_changes:
        rows = ", ".join(comparison.other_changes)
        text += f" Not compared with the paper, as they change this base in no or the opposite direction: {rows}."
    return text


def _about_curves(config: Mapping[str, Any], *, with_gain: bool) -> str:
    text = "On the validation split: the mean over seeds, and each seed as a faint line."
    if with_gain:
        text += (
            " The source gain is the log-perplexity of targets with the source of another sentence, less that with "
            "their own: 0 if the model ignores the source."
        )
    if sentences := config.get("eval.sentences"):
        text += f" Scores before the last step are of the first {sentences:,} sentences, perplexities of all."
    return text


def _methods(comparison: Comparison) -> str:
    """Explains the numbers of the report."""
    lines = [
        "An effect is a variant's mean over seeds less that of base.",
        "Perplexities are compared by their logarithm, the loss in nats a piece: 0.01 is about 1 % of any perplexity.",
    ]
    if comparison.score is BLEU:
        signatures = sorted({run.signature for entry in comparison.entries for run in entry.runs})
        lines.append(f"BLEU is sacreBLEU's, of detokenised, cased text: {', '.join(map(as_text, signatures))}.")
    elif comparison.score is ACCURACY:
        lines.append("Accuracy is the share of texts whose class is predicted correctly.")
    else:
        lines.append("Exact match is the share of correct sentences; BLEU, which counts four words, is 0 in all runs.")
        if comparison.is_of_table3:
            lines.append("Beside the paper's BLEU it compares in signs and ranks, not in sizes.")
    lines += [
        "Intervals of means are Student's t; if few seeds differ much, they exceed what a score can be. Intervals of "
        "differences, and p, are Welch's. Seeds are not paired: the same seed gives all rows the same order of data, "
        "but most of them other initial parameters.",
        f"The corrected p is Holm's for all variants of a measure: without any effect, at most one sweep in twenty has "
        f"one below {SIGNIFICANT:.2g}.",
    ]
    if comparison.is_of_table3:
        lines.append(
            "Rank correlation is Spearman's, with a 95 % interval by Fisher's z (standard error of Bonett and Wright), "
            "which takes the rows as a sample of possible changes."
        )
    return "\n".join(f"- {line}" for line in lines)


def _swept(base: Mapping[str, Any]) -> list[str]:
    config = base["config"]
    sizes = [
        [f"`{field}`", f"{config[field]:,}", f"{paper:,}"]
        for field, paper in table3.PAPER_BASE.items()
        if field in config  # other kinds of models lack some
    ]
    sessions = base["sessions"]
    commands = dict.fromkeys(session["command"] for session in sessions)
    made = list(dict.fromkeys(map(_made, sessions)))
    return [
        _code("\n".join(commands)),
        *(made if len(made) == 1 else ["It ran in several sessions:", "\n".join(f"- {how}" for how in made)]),
        "The base, beside the paper's:",
        table(["field", "here", "the paper"], sizes),
        "All of its config:",
        _code("\n".join(f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in config.items())),
    ]


def _made(session: Mapping[str, Any]) -> str:
    commit = f"Commit {as_text(session['commit'])}, " if session["commit"] else "Run "
    versions = ", ".join(f"{name} {version}" for name, version in sorted(session["versions"].items()))
    return f"{commit}on {as_text(session['hardware'])}, with {as_text(versions)}."


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def effects_table(entries: Sequence[Entry], comparison: Comparison) -> str:
    """A table of the effect of each variant in both measures; rows of table 3 have the paper's beside them."""
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
    """A table of the scores and costs of each variant; rows of table 3 have the paper's beside them."""
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
    """A table in Markdown; the columns of `words` are aligned to the left, all others to the right."""
    align = ["---" if column in words else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, align, *rows))


def as_text(text: str) -> str:
    """Escapes Markdown and HTML, on one line."""
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
    """The changed fields without their sections; those of `eval`, which change no model, are left out."""
    changes = {field: value for field, value in entry.runs[0].changes.items() if not field.startswith("eval.")}
    return as_text(", ".join(f"{field.split('.')[-1]} {value}" for field, value in changes.items()))
