"""Scores a trained run: python -m transformer_flax.evaluate --workdir=runs/base [--split=test].

Scores a split of the run's data, or two text files: --source=FILE --reference=FILE, where the reference has a
translation or a label for each line. Prints a table to standard error, and the same values as JSON to standard output.
--lowercase and --tokenized, alone or together, add a BLEU of normalised text. Compare it with published scores that are
measured in this way, such as most scores on Multi30k.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from transformer_flax import cli
from transformer_flax.console import Progress, counted
from transformer_flax.data.sentence_pairs import SPLITS
from transformer_flax.data.text_files import read_side_by_side
from transformer_flax.errors import UserError

if TYPE_CHECKING:
    from transformer_flax.decoding.scoring import TranslationScores
    from transformer_flax.run import ClassReport, Report, Run

RESTORE = cli.define_run()
SPLIT = flags.DEFINE_enum("split", "test", SPLITS, "split of the run's data")
SOURCE = flags.DEFINE_string("source", None, "score on this file instead of a split, one sentence a line")
REFERENCE = flags.DEFINE_string("reference", None, "a file with the translations or labels of --source, line by line")
TRANSLATIONS = flags.DEFINE_string("translations", None, "write the translations to this file")
LOWERCASE = flags.DEFINE_bool("lowercase", False, "also print the BLEU of the lower-cased translations and references")
TOKENIZED = flags.DEFINE_bool("tokenized", False, "also print the BLEU of their tokens as Moses makes them")
CONFUSION = flags.DEFINE_string(
    "confusion", None, "draw the confusion matrix of a classifier to this file, PNG, SVG or PDF"
)

logger = logging.getLogger(__name__)


def main() -> None:
    if (SOURCE.value is None) != (REFERENCE.value is None):
        raise UserError("give both --source and --reference: a text, and its translations or labels line by line")
    cli.require_output(TRANSLATIONS.value, SOURCE.value, REFERENCE.value)
    if CONFUSION.value is not None:
        cli.require_picture("confusion", CONFUSION.value)
    texts = None
    if SOURCE.value is not None and REFERENCE.value is not None:
        cli.refuse_idle(["split"], "with --source")
        texts = read_side_by_side(pathlib.Path(SOURCE.value), pathlib.Path(REFERENCE.value))
    run, settings = RESTORE()
    which = f"with {run.config.name}, which"
    if run.classes is None:
        cli.refuse_idle(["confusion"], f"{which} translates")
    else:
        cli.refuse_idle(["lowercase", "tokenized"], f"{which} classifies")
        cli.refuse_idle(["translations"], f"{which} classifies (python -m transformer_flax.classify prints its labels)")
    for name in ("lowercase", "tokenized"):
        if run.config.data[name]:
            cli.refuse_idle([name], f"{which} has config.data.{name}=True")
    sources, references = texts or _split(run)
    what = SOURCE.value or f"{SPLIT.value} split"
    from transformer_flax.run import ClassReport

    with Progress(stderr=True) as progress, progress.bar("lines") as update:
        report = run.evaluate(sources, references, progress=lambda done: update(done, len(sources)), **settings)
    head = {"run": run.name, "workdirs": flags.FLAGS["workdir"].value, "text": what, "sentences": len(sources)}
    title = f"{run.name}, {what}: {len(sources):,} sentences"
    if isinstance(report, ClassReport):
        values = _show_labels(report, title, progress)
    else:
        values = _show_translations(report, _score_normalised(run, report, references), title, progress)
    json.dump(head | values, sys.stdout, indent=2)
    print(flush=True)
    if not isinstance(report, ClassReport) and TRANSLATIONS.value is not None:
        cli.write_lines(TRANSLATIONS.value, report.translations)
    if isinstance(report, ClassReport) and CONFUSION.value is not None:
        from transformer_flax.analysis.plots import plot_confusion

        plot_confusion(report, file=CONFUSION.value)


def _split(run: "Run") -> tuple[list[str], list[str]]:
    """Returns the sources and references of --split; without that split, the error names the flags of files."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # TFDS prints while it prepares a data set
            return run.split(SPLIT.value)
    except UserError as error:
        raise UserError(f"{error}; --source and --reference score two files instead") from error


def _score_normalised(run: "Run", report: "Report", references: list[str]) -> "TranslationScores | None":
    """Scores the translations with the normalisation of --lowercase and --tokenized; None if neither is set."""
    from transformer_flax.data.normalisation import Normaliser
    from transformer_flax.decoding.scoring import score

    _, own = run.normalise
    more = Normaliser(run.config.data.target_language, LOWERCASE.value, TOKENIZED.value)
    if not more:
        return None
    text = Normaliser(more.language, more.lowercase or own.lowercase, more.tokenized or own.tokenized)
    return score([*map(more, report.translations)], [more(own(line)) for line in references], text)


def _show_translations(
    report: "Report", normalised: "TranslationScores | None", title: str, progress: Progress
) -> dict[str, Any]:
    """Prints a table; returns the values for JSON."""
    for warning in report.warnings:
        logger.warning(warning)
    rows = {
        "BLEU": f"{report.bleu:.2f}",
        "chrF": f"{report.chrf:.2f}",
        "BLEU, tokenised as in the paper's table 2": f"{report.table2_bleu:.2f}",
    }
    signatures = {"BLEU": report.signature, "chrF": report.chrf_signature, "table 2": report.table2_signature}
    values = dataclasses.asdict(report)
    del values["translations"]
    if normalised:
        how = ", lower-cased" * LOWERCASE.value + ", of Moses' tokens" * TOKENIZED.value
        rows[f"BLEU{how}"] = f"{normalised.bleu:.2f}"
        signatures["normalised"] = normalised.signature
        values |= {"normalised_bleu": normalised.bleu, "normalised_signature": normalised.signature}
    compiled = counted(report.compilations, "compilation")
    rows |= {
        "exact matches, of whole lines": f"{100 * report.exact_match:.1f} %",
        "perplexity of the references, per piece": f"{report.perplexity:.3f}",
        "length ratio to the references, in tokens of BLEU": f"{report.length_ratio:.3f}",
        f"sentences per second, {compiled} included": f"{report.sentences_per_second:.1f}",
    }
    progress.table(title, ["", ""], [[*row] for row in rows.items()])
    for name, text in {"parameters": report.params_from, **signatures}.items():
        progress.say(f"{name + ':':<12}{text}")  # a whole line, so that a signature can be copied
    return values


def _show_labels(report: "ClassReport", title: str, progress: Progress) -> dict[str, Any]:
    """Prints a table; returns the values for JSON."""
    columns = {"precision": report.precision, "recall": report.recall, "f1": report.f1, "texts": report.support}
    each = {name: {what: of[n].item() for what, of in columns.items()} for n, name in enumerate(report.classes)}
    rows = [
        [name, f"{of['precision']:.1%}", f"{of['recall']:.1%}", f"{of['f1']:.1%}", f"{of['texts']:,}"]
        for name, of in each.items()
    ]
    progress.table(title, ["class", "precision", "recall", "F1", "texts"], rows)
    for name, text in {
        "accuracy": f"{report.accuracy:.2%}",
        "macro-F1": f"{report.macro_f1:.2%}",
        "perplexity": f"{report.perplexity:.3f} of the right classes",
        "lines": f"{report.lines_per_second:,.1f} a second, {counted(report.compilations, 'compilation')} included",
        "parameters": report.params_from,
    }.items():
        progress.say(f"{name + ':':<12}{text}")
    names = ("accuracy", "macro_f1", "perplexity", "lines_per_second", "compilations", "params_from")
    values = {name: getattr(report, name) for name in names}
    return {**values, "classes": each, "confusion": report.confusion.tolist()}


if __name__ == "__main__":
    cli.run(main)
