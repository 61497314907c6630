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
    EXACT_MATCH,
    SIGNIFICANT,
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
from transformer_flax.data.normalisation import NORMALISATION
from transformer_flax.files import write_whole

TEMPLATE = pathlib.Path(__file__).with_name("report.html")
MOST_IN_TITLE = 3  # most fields that a title names
# Fields that change the tokens of the text, or the tokens that a model has learned for it.
PIECES = ("bpe_dropout", "vocab_size", "tokenizer", "tokenizer_file", *NORMALISATION)
TOKENS = {"init_from", *(f"data.{name}" for name in (*PIECES, "source_language", "target_language"))}
# Fields that change the text that a tokenizer is learned from.
LEARNED = {
    f"data.{name}"
    for name in ("num_pairs", "held_out", "tokenizer_sample", "seed", "source", "name", "path", "longest_trained")
}
NONE = "—"  # an empty cell
SEEDS = r" --seeds[= ]([0-9,]+)"  # in a command
LEFT_COLUMNS = ("row", "variant", "field", "changes")  # columns aligned to the left
Cell = tuple[str, str]  # the name of its column, and its text
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
ABOUT_SCORES = (
    "Means over seeds (geometric for perplexity) with 95 % intervals where seeds differ. Minutes include evaluations, "
    "and whatever else the machine did; seeds trained together share them. FLOPs are those of all matrix products of "
    "training, estimated from the timed steps."
)


def write(head: Mapping[str, Any], results: Iterable[Result], folder: pathlib.Path) -> pathlib.Path:
    """Writes `report.md` with its pictures, and `index.html`, which needs no other file; returns the former's path.

    The head and the results are those of `results.read`. The same results, in any order, give the same files. Removes
    an earlier report's pictures that have no data now.
    """
    comparison = compare(results, head["config"], asked=_seeds_of(head["sessions"][-1]["command"]))
    pictures = figures.draw(comparison)
    markdown = as_markdown(comparison, head, pictures.keys())
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        if name in pictures:
            write_whole(folder / f"{name}.png", pictures[name].png)
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)
    write_whole(folder / "index.html", _page(_title(comparison, head), markdown, pictures))
    write_whole(folder / "report.md", markdown)
    return folder / "report.md"


def _title(comparison: Comparison, head: Mapping[str, Any]) -> str:
    if comparison.is_of_table3 or comparison.missing_rows:
        return f"Table 3 on {head['name']}"
    fields = sorted({comparison.short_name(field) for result in comparison.results for field in result.changes})
    of = f" of {' and '.join(fields)}" if 0 < len(fields) <= MOST_IN_TITLE else ""
    return f"A sweep{of} on {head['name']}"


def _page(title: str, markdown: str, pictures: Mapping[str, figures.Picture]) -> str:
    """Renders Markdown as an HTML page, with an SVG in place of each image. The Markdown can add no scripts."""
    body = markdown_it.MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    for name, picture in pictures.items():  # the quotes of other text are escaped
        svg = base64.b64encode(picture.svg).decode()
        body = body.replace(f'src="{name}.png"', f'src="data:image/svg+xml;base64,{svg}"')
    return TEMPLATE.read_text("utf-8").replace("{{TITLE}}", html.escape(title)).replace("{{BODY}}", body)


def as_markdown(comparison: Comparison, head: Mapping[str, Any], pictures: Collection[str]) -> str:
    """Returns the report as Markdown. `pictures` are the names in PICTURES that lie beside it."""

    def shown(*names: str) -> list[str]:
        return [f"![{PICTURES[name]}]({name}.png)" for name in names if name in pictures]

    parts = [entries for entries in (comparison.rows, comparison.own) if entries]
    blocks = [f"# {as_text(_title(comparison, head))}", *_summary(comparison), *_missing(comparison, head)]
    if any(entry.effects for entry in comparison.entries):
        blocks += ["## Effects", *shown("differences")]
        blocks += [effects_table(entries, comparison) for entries in parts if any(entry.effects for entry in entries)]
        blocks += [_legend(comparison)]
    if "agreement" in pictures:
        blocks += ["## Agreement over training", ABOUT_AGREEMENT, *shown("agreement")]
    if parts:
        blocks += ["## Scores", *shown("scores"), *(levels_table(entries, comparison) for entries in parts)]
        blocks += [ABOUT_SCORES]
    if "curves_score" in pictures:
        blocks += ["## Curves", _about_curves(comparison, with_gain="curves_gain" in pictures)]
        blocks += shown("curves_score", "curves_perplexity", "curves_gain")
    swept = _swept(head, beside_paper=bool(comparison.rows))
    blocks += ["## How it was measured", _methods(comparison), "## What was swept", *swept]
    return "\n\n".join(blocks) + "\n"


def _summary(comparison: Comparison) -> list[str]:
    counts = sorted({len(entry.runs) for entry in comparison.entries})
    if not counts:
        return ["No run has finished."]
    seeds = "one seed" if counts == [1] else f"{' to '.join(map(str, _extremes(counts)))} seeds"
    own = {entry.variant for entry in comparison.own}
    numbers = {
        "row{} of the paper's table 3": len(comparison.rows),
        "row{} beyond table 3": len(own & table3.ALL.keys() - table3.ROWS.keys()),
        "variant{}": len(own - table3.ALL.keys()),
    }
    of = ["base"] if "base" in own else []
    of += [f"{count:,} {text.format('s' * (count != 1))}" for text, count in numbers.items() if count]
    translates = comparison.score is not ACCURACY  # accuracy is always of the whole split, as perplexity is
    sentences = translates and comparison.config.get("eval.final_sentences")
    few = f" (its first {sentences:,} sentences; perplexities are of all)" if sentences else ""
    newstest = "; the paper's table 3 is of newstest2013" if comparison.rows else ""
    agreements = [text for measure in comparison.measures if (text := _agreement(comparison, measure))]
    blocks = [
        *(["\n".join(agreements)] if agreements else []),
        f"{counted(len(comparison.finished), 'finished run')}: {' and '.join(of)}, {seeds} each. Every "
        f"score is of the validation split{few} at the end of training{newstest}.",
    ]
    if others := comparison.of_other_text:
        blocks.append(
            f"**Of another validation text** than base, so without effects: {', '.join(map(as_text, others))}."
        )
    if counts == [1]:
        blocks.append("**One seed:** no intervals and no tests.")
    if not comparison.base and any(result.row == "base" and not result.changes for result in comparison.failed):
        blocks.append("**No run of base has finished,** so no effects.")
    elif not comparison.base:
        blocks.append(
            "**There is no base among the finished runs,** so no effects: add `base` to `--rows`, and the base's own "
            "value to each `--grid`."
        )
    return blocks


def _agreement(comparison: Comparison, measure: Measure) -> str:
    """Names the changes that disagree with the paper and the significant changes; empty if no change compares."""
    found = agreement(comparison, measure)
    if not found.rows:
        return ""
    exceptions = f" (not {', '.join(found.other)})" if found.other else ""
    text = (
        f"- **{measure.name[0].upper()}{measure.name[1:]}**: **{len(found.same)} of the {found.rows}** changes that "
        f"made the paper's {measure.paper_name} better or worse do the same here{exceptions}."
    )
    if found.tested:
        of = f", of the {found.tested} that can be tested" if found.tested < found.rows else ""
        ours, others = (", ".join(names) or "none" for names in (found.significant_same, found.significant_other))
        text += f" Significant{of}: in the paper's direction {ours}; in the other {others}."
    if found.correlation is None:
        return f"{text} They are too few, or too alike, for a rank correlation."
    rho = found.correlation
    interval = f" [{rho.interval[0]:.2f}, {rho.interval[1]:.2f}]" if rho.interval else ""
    ranked = counted(found.ranked, "row")
    return f"{text} Rank correlation with the paper's effects, over {ranked}: **{rho.value:.2f}**{interval}."


def _missing(comparison: Comparison, head: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- {as_text(result.variant)}, seed {result.seed}, failed: {as_text(result.error)}"
        for result in comparison.failed
    ]
    for variant, seeds in comparison.missing_seeds.items():
        lines.append(f"- {as_text(variant)}: no seed {' or '.join(map(str, seeds))}")
    if comparison.missing_rows:
        lines.append(f"- of table 3, not run: {', '.join(comparison.missing_rows)}")
    if not lines:
        return []
    seeds = ",".join(map(str, comparison.seeds))
    command = re.sub(SEEDS, "", head["sessions"][-1]["command"])
    return [
        "## What is missing",
        "\n".join(lines),
        "This command resumes the sweep if its `--workdir` holds `results.jsonl`. Add rows that it does not name:",
        _code(f"{command} --seeds={seeds}{'' if ',' in seeds else ','}"),
    ]


def _seeds_of(command: str) -> Iterable[int]:
    """Returns the seeds of a sweep's command: `--seeds=3` means 0, 1 and 2; `--seeds=3,` means 3; none means 0."""
    found = re.search(SEEDS, command)
    text = found[1] if found else "1"
    numbers = [int(number) for number in text.split(",") if number]
    return numbers if "," in text else range(numbers[0])


def _legend(comparison: Comparison) -> str:
    text = (
        f"Differences from {as_text(comparison.base.variant if comparison.base else 'base')} with 95 % intervals. "
        f"Bold: significant, with a corrected p below {SIGNIFICANT:.2g}; the uncorrected p stands before it. The "
        "pictures cut intervals that are much wider than the differences."
    )
    if comparison.is_of_table3:
        text += " ✓: ours has the paper's sign. ✗: it has not."
    if comparison.other_changes:
        rows = ", ".join(comparison.other_changes)
        text += f" Not compared with the paper, as they change this base in no or the opposite direction: {rows}."
    return text


def _about_curves(comparison: Comparison, *, with_gain: bool) -> str:
    text = "On the validation split: the mean over seeds, and each seed as a faint line."
    if with_gain:
        text += (
            " The source gain is the log-perplexity of targets with the source of another sentence, less that with "
            "their own: 0 if the model ignores the source."
        )
    sentences = comparison.config.get("eval.sentences")
    if sentences and comparison.score is not ACCURACY:
        text += f" Scores before the last step are of the first {sentences:,} sentences, perplexities of all."
    return text


def _methods(comparison: Comparison) -> str:
    """Explains the numbers of the report."""
    log_perplexity, score = comparison.measures
    lines = [
        "An effect is a variant's mean over seeds less that of base.",
        f"Perplexities are compared by their logarithm, the loss in {log_perplexity.unit}: 0.01 is about 1 % of any "
        "perplexity.",
    ]
    changed = {field for run in comparison.finished for field in run.changes}
    learned = set() if comparison.config.get("data.tokenizer_file") else LEARNED
    if score is not ACCURACY and changed & (TOKENS | learned):  # a classifier's perplexities are of labels
        lines.append(
            "Perplexities of variants that change the pieces of the text are of other pieces, or, with BPE-dropout, of "
            "one spelling among several that the model has learned. Only their scores compare with base's, "
            "where these are of the same text."
        )
    if score is BLEU:
        signatures = sorted({run.signature for run in comparison.finished})
        tokens = "tokenised" if comparison.config.get("data.tokenized") else "detokenised"
        case = "lower-cased" if comparison.config.get("data.lowercase") else "cased"
        is_same = len({signature.partition("|version:")[0] for signature in signatures}) == 1
        text = f"of {tokens}, {case} text" if is_same else "of different texts, so the scores do not compare"
        lines.append(f"BLEU is sacreBLEU's, {text}: {', '.join(map(as_text, signatures))}.")
    elif score is ACCURACY:
        lines.append("Accuracy is the share of texts whose class is predicted correctly.")
    elif score is EXACT_MATCH and comparison.entries:
        lines.append("Exact match is the share of correct sentences; BLEU counts four words, which these hardly have.")
        if comparison.is_of_table3:
            lines.append("Beside the paper's BLEU it compares in signs and ranks, not in sizes.")
    lines += [
        "Intervals of means are Student's t; if few seeds differ much, they exceed what a score can be. Intervals of "
        "differences, and p, are Welch's, for independent runs: runs of one seed share the order of their data and, in "
        "many rows, most of their first parameters, so these intervals are rather too wide.",
        f"The corrected p is Holm's for all variants of a measure: without any effect, at most one sweep in twenty has "
        f"one below {SIGNIFICANT:.2g} in that measure.",
    ]
    if comparison.is_of_table3:
        lines.append(
            "Rank correlation is Spearman's, with a 95 % interval by Fisher's z (standard error of Bonett and Wright), "
            "which takes the rows as a sample of possible changes."
        )
    return "\n".join(f"- {line}" for line in lines)


def _swept(head: Mapping[str, Any], *, beside_paper: bool) -> list[str]:
    config, sessions = head["config"], head["sessions"]
    sizes = [
        [("field", f"`{field}`"), ("here", f"{config[field]:,}"), ("the paper", f"{papers:,}")]
        for field, papers in table3.PAPER_BASE.items()
        if field in config  # other kinds of models lack some
    ]
    commands = dict.fromkeys(session["command"] for session in sessions)
    made = list(dict.fromkeys(map(_made, sessions)))
    return [
        _code("\n".join(commands)),
        *(made if len(made) == 1 else ["It ran in several sessions:", "\n".join(f"- {how}" for how in made)]),
        *(["The base, beside the paper's:", _table(sizes)] if beside_paper else []),
        "The whole config of the base:",
        _code("\n".join(f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in config.items())),
    ]


def _made(session: Mapping[str, Any]) -> str:
    commit = f"Commit {as_text(session['commit'])}, " if session["commit"] else "Run "
    versions = ", ".join(f"{name} {version}" for name, version in sorted(session["versions"].items()))
    return f"{commit}on {as_text(session['hardware'])}, with {as_text(versions)}."


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def effects_table(entries: Sequence[Entry], comparison: Comparison) -> str:
    """Returns a table of each variant's effect in both measures, beside the paper's effect for rows of table 3."""
    agreements = {measure: agreement(comparison, measure) for measure in comparison.measures}
    rows = []
    for entry in entries:
        if not entry.effects:
            continue
        row = [_name(entry)]
        for measure, found in agreements.items():
            effect = entry.effects[measure]
            row.append((f"{measure.name}, {measure.unit}", _difference(effect, measure)))
            if entry.row:
                mark = " ✓" if entry.variant in found.same else " ✗" if entry.variant in found.other else ""
                paper = NONE if effect.paper is None else f"{effect.paper:+z.{measure.paper_digits}f}{mark}"
                row.append((f"paper's {measure.paper_name}", paper))
            p = NONE if effect.ours.p is None else f"{effect.ours.p:.2g} ({effect.corrected_p:.2g})"
            row.append(("p (corrected)", p))
        changes = entry.runs[0].changes.items()
        text = ", ".join(f"{comparison.short_name(field)} {value}" for field, value in changes)
        rows.append([*row, ("changes", as_text(text))])
    return _table(rows)


def levels_table(entries: Sequence[Entry], comparison: Comparison) -> str:
    """Returns a table of each variant's scores and costs, beside the paper's for rows of table 3."""
    perplexity, score = comparison.measures
    rows = []
    for entry in entries:
        runs, paper = entry.runs, entry.row
        flops = np.mean([run.flops for run in runs])
        cells: list[tuple[str, str | None]] = [  # None: there is no such column
            (perplexity.level_name, _level(perplexity, entry.means[perplexity], 3)),
            ("paper's perplexity", f"{paper.perplexity:.2f}" if paper else None),
            (score.level_name, _level(score, entry.means[score], score.digits)),
            ("paper's BLEU", f"{paper.bleu:.1f}" if paper else None),
            ("parameters, millions", f"{runs[0].parameters / 1e6:.3g}"),
            ("paper's parameters", str(paper.parameters or "") if paper else None),
            ("seeds", str(len(runs))),
            ("steps", " to ".join(f"{steps:,}" for steps in _extremes([run.steps for run in runs]))),
            ("minutes", f"{np.mean([run.seconds for run in runs]) / 60:.1f}"),
            ("FLOPs", f"{flops:.2e}".replace("e+", "e") if flops else NONE),
        ]
        rows.append([_name(entry), *((name, text) for name, text in cells if text is not None)])
    return _table(rows)


def _extremes(numbers: Sequence[int]) -> list[int]:
    """Returns the smallest and the largest number; one if they are equal."""
    return sorted({min(numbers), max(numbers)})


def _name(entry: Entry) -> Cell:
    return "row" if entry.row else "variant", as_text(entry.variant)


def _table(rows: Sequence[Sequence[Cell]]) -> str:
    """Returns a Markdown table of rows with the same columns. Numbers are aligned to the right."""
    names = [name for name, _ in rows[0]]
    align = ["---" if name in LEFT_COLUMNS else "---:" for name in names]
    lines = [names, align, *([text for _, text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_text(text: str) -> str:
    """Escapes Markdown and HTML in a text, and joins the text into one line."""
    return re.sub(r"([\\`*\[\]<>|~&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", " ".join(text.split()))


def _difference(effect: Effect, measure: Measure) -> str:
    text = f"{effect.ours.value:+z.{measure.digits}f}"
    if effect.ours.interval:
        text += f" ± {effect.ours.interval[1] - effect.ours.value:.{measure.digits}f}"
    return f"**{text}**" if effect.significant else text


def _level(measure: Measure, mean: Estimate, digits: int) -> str:
    text = f"{measure.level(mean.value):.{digits}f}"
    if mean.interval is None:
        return text
    low, high = map(measure.level, mean.interval)
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"
