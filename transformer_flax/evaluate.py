"""Measures a trained run: python -m transformer_flax.evaluate --workdir=runs/base [--split=test].

On a split of the run's own data, or on two text files, line by line: --source=FILE --reference=FILE. A table goes to
standard error, the same as JSON to standard output.
"""

import dataclasses
import json
import logging
import os
import pathlib
import sys

from absl import flags

from transformer_flax import cli
from transformer_flax.data.pairs import SPLITS
from transformer_flax.data.text import read_side_by_side
from transformer_flax.errors import UserError

RESTORE = cli.define_run()
SPLIT = flags.DEFINE_enum("split", "test", SPLITS, "of the data that the run was made with")
SOURCE = flags.DEFINE_string("source", None, "a file to translate in place of a split, one sentence a line")
REFERENCE = flags.DEFINE_string("reference", None, "its translation, line by line")
TRANSLATIONS = flags.DEFINE_string("translations", None, "write the translations to this file")

logger = logging.getLogger(__name__)


def main() -> None:
    if (SOURCE.value is None) != (REFERENCE.value is None):
        raise UserError("--source and --reference belong together: a text, and its translation line by line")
    if SOURCE.value is not None and flags.FLAGS["split"].present:
        raise UserError("--split does nothing beside --source: leave one of them out")
    if TRANSLATIONS.value is not None:
        texts = [file for file in (SOURCE.value, REFERENCE.value) if file is not None]
        if os.path.isfile(TRANSLATIONS.value) and any(os.path.samefile(TRANSLATIONS.value, file) for file in texts):
            raise UserError(f"{TRANSLATIONS.value} is an input; write the translations to another file")
        open(TRANSLATIONS.value, "ab").close()  # refused now, if at all, and not after the work
    sources, references, what = [], [], f"{SPLIT.value} split"
    if SOURCE.value is not None and REFERENCE.value is not None:
        what = SOURCE.value
        sources, references = read_side_by_side(pathlib.Path(SOURCE.value), pathlib.Path(REFERENCE.value))
    run, settings = RESTORE()
    print(f"{run.config.name}: {run.parameters}", file=sys.stderr)
    if SOURCE.value is None:
        sources, references = run.split(SPLIT.value)

    from transformer_flax.training.progress import Progress, counted

    with Progress(stderr=True) as progress, progress.bar("lines") as update:
        report = run.evaluate(sources, references, progress=lambda done: update(done, len(sources)), **settings)
    for warning in report.warnings:
        logger.warning(warning)
    progress.table(
        f"{run.config.name}, {what}: {len(sources):,} sentences",
        ["", ""],
        [
            ["BLEU", f"{report.bleu:.2f}"],
            ["chrF", f"{report.chrf:.2f}"],
            ["BLEU, tokenised as in the paper", f"{report.tokenised_bleu:.2f}"],
            ["exact matches, of whole lines", f"{100 * report.exact_match:.1f} %"],
            ["perplexity of the references, per word-piece", f"{report.perplexity:.3f}"],
            ["length ratio to the references, in 13a tokens", f"{report.length_ratio:.3f}"],
            [
                f"sentences per second, {counted(report.compilations, 'compilation')} included",
                f"{report.sentences_per_second:.1f}",
            ],
        ],
    )
    for name, text in {  # lines of their own, as a signature that is broken cannot be copied
        "parameters": report.parameters,
        "BLEU": report.signature,
        "chrF": report.chrf_signature,
        "tokenised": report.tokenised_signature,
    }.items():
        progress.say(f"{name + ':':<12}{text}")
    if TRANSLATIONS.value is not None:
        pathlib.Path(TRANSLATIONS.value).write_text("".join(f"{line}\n" for line in report.translations), "utf-8")
    values = {name: value for name, value in dataclasses.asdict(report).items() if name != "translations"}
    json.dump({"run": run.config.name, "text": what, "sentences": len(sources), **values}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    cli.run(main)
