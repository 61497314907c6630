"""Word alignments by cross-attention: python -m transformer_flax.align --workdir=runs/base --source=F --target=F > out.

Prints a line of links "0-0 1-2" (Pharaoh format, source word first) for each pair of lines. Blanks separate words.
Without --target, aligns the run's own translations, and writes them to --translations=FILE. With --gold=FILE, prints
the alignment error rate to standard error. A line of more than --max_input_length tokens is an error.
"""

import pathlib
import re
import sys
from collections.abc import Iterable, Sequence

from absl import flags

from transformer_flax import cli
from transformer_flax.data.text_files import one_line, read_lines, read_side_by_side, require_as_many
from transformer_flax.errors import UserError

RESTORE = cli.define_run()
SOURCE = flags.DEFINE_string("source", None, "a file of sentences, one a line; plain, .gz or .xz")
TARGET = flags.DEFINE_string("target", None, "a file of their translations, line by line")
GOLD = flags.DEFINE_string("gold", None, "a file of links made by people: 0-1 is sure, 0?1 possible")
FIRST = flags.DEFINE_integer("first", 0, "number of a sentence's first word in the gold file", 0)
LAYERS = flags.DEFINE_list("layers", ["-1"], "layers of the decoder to average; -1 is the last")
HEADS = flags.DEFINE_list("heads", None, "heads to average; default: all")
BY = flags.DEFINE_enum(
    "by",
    "written",
    ["written", "read"],
    "use the attention of the step that writes a word, or of the step that reads it",
)
TRANSLATIONS = flags.DEFINE_string("translations", None, "write the run's own translations to this file")
PAGE = flags.DEFINE_string("page", None, "write an interactive page of all sentences to this file")


def main() -> None:
    if SOURCE.value is None:
        raise UserError("name a text to align: --source=FILE")
    if GOLD.value is not None and TARGET.value is None:
        raise UserError("--gold needs --target=FILE, the sentences whose words it links")
    layers, heads = (_numbers(flag) for flag in (LAYERS, HEADS))
    if TARGET.value is None:
        sources, targets = list(read_lines(pathlib.Path(SOURCE.value))), None
    else:
        cli.refuse_idle((*cli.SEARCH, "batch_size", "window", "translations"), "with --target")
        sources, targets = read_side_by_side(pathlib.Path(SOURCE.value), pathlib.Path(TARGET.value))
    for output in (PAGE.value, TRANSLATIONS.value):
        cli.require_output(output, SOURCE.value, TARGET.value, GOLD.value)
    from transformer_flax.analysis.alignment import align, error_rate, read_gold, to_pharaoh
    from transformer_flax.analysis.attention_page import write_page

    gold = None
    if GOLD.value is not None:
        gold = read_gold(GOLD.value, first=FIRST.value)
        require_as_many(pathlib.Path(SOURCE.value), sources, pathlib.Path(GOLD.value), gold)
        for number, (links, *pair) in enumerate(zip(gold, sources, targets or [], strict=True), 1):
            _require_in(number, links.possible, *(len(line.split()) for line in pair))
    run, settings = RESTORE()
    if "cross" not in (counts := run.count_heads()):
        raise UserError(f"{run.name} has no attention from target to source, by which words are aligned")
    num_layers, num_heads = counts["cross"]
    known = {"layers": (layers, range(-num_layers, num_layers)), "heads": (heads, range(num_heads))}
    for name, (chosen, there) in known.items():
        if unknown := [number for number in chosen or () if number not in there]:
            raise UserError(f"--{name} has {unknown[0]}; the model has {name} 0 to {there[-1]}")
    alignments, translations, shown = [], [], []
    for number, attention in enumerate(run.attentions(sources, targets, **settings)):
        _require_same_words("--source", number + 1, sources[number], attention.source.words)
        if targets is not None:
            _require_same_words("--target", number + 1, targets[number], attention.target.words)
        alignments.append(align(attention, layers=layers, heads=heads, by=BY.value))
        translations.append(one_line(attention.target.text))
        shown += [attention] if PAGE.value is not None else []
        print(to_pharaoh(alignments[-1]))
    if TRANSLATIONS.value is not None:
        cli.write_lines(TRANSLATIONS.value, translations)
    if PAGE.value is not None:
        write_page(shown, PAGE.value)
    if gold is not None:
        print(f"alignment error rate: {error_rate(alignments, gold):.4f}", file=sys.stderr)


def _require_in(number: int, links: Iterable[tuple[int, int]], source_words: int, target_words: int) -> None:
    """Checks that the gold links of a line are between words that the line has."""
    for source, target in links:
        if source >= source_words or target >= target_words:
            raise UserError(
                f"{GOLD.value}, line {number:,}: {source + FIRST.value}-{target + FIRST.value} is a link of a word "
                f"that is not there, as the sentences have {source_words:,} and {target_words:,} words; --first says "
                "whether words are counted from 0 or 1"
            )


def _require_same_words(flag: str, number: int, line: str, words: Sequence[str]) -> None:
    """Checks that the run keeps the number of words in a line. Otherwise the links would have wrong numbers."""
    if len(line.split()) != len(words):
        raise UserError(
            f"{flag}, line {number:,}, has {len(line.split()):,} words, and {len(words):,} as the run reads them; "
            "align needs words that neither Moses' tokenizer (config.data.tokenized) nor the run's tokenizer changes"
        )


def _numbers(flag: flags.FlagHolder) -> list[int] | None:
    if flag.value is None:
        return None
    if not flag.value or not all(re.fullmatch("-?[0-9]+", number) for number in flag.value):
        raise UserError(f"--{flag.name} is {','.join(flag.value)!r}; it must be whole numbers, as in 0,2")
    return [int(number) for number in flag.value]


if __name__ == "__main__":
    cli.run(main)
