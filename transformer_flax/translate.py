"""Translates lines of text: python -m transformer_flax.translate --workdir=runs/base [FILE ...] < in.txt > out.txt.

One line out for each line in, in order, an empty one for an empty one. On a terminal it is a prompt. With --score it
puts out how likely given translations are instead: log P, the end symbol included, a tab, log P of each token, a tab,
the tokens as the vocabulary spells them: byte by byte, a blank as \u0120. Files may be plain, .gz or .xz.
"""

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from transformer_flax import cli
from transformer_flax.data.text_files import require_characters
from transformer_flax.errors import UserError
from transformer_flax.line_io import Streams, open_input, prompt

if TYPE_CHECKING:
    from transformer_flax.data.tokenizer import Tokenizer
    from transformer_flax.decoding.translator import Translation

RESTORE = cli.define_run()
STREAMS = Streams()
NBEST = flags.DEFINE_integer("nbest", None, "put out so many hypotheses a line, as Moses does: id ||| text ||| ...")
SCORES = flags.DEFINE_bool("scores", False, "put each translation's score and a tab before it")
SCORE = flags.DEFINE_string("score", None, "a file of translations, line by line, to score instead of translating")
PREFIX = flags.DEFINE_string("prefix", None, "what every output must begin with")
PREFIX_FILE = flags.DEFINE_string("prefix_file", None, "a file of what each output must begin with, line by line")
SAMPLE = flags.DEFINE_bool("sample", False, "draw at random from the model's distribution; --nbest: so many a line")
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "of samples; 0: greedy search")
TOP_K = flags.DEFINE_integer("top_k", 0, "sample among the k likeliest tokens only; 0: all")
TOP_P = flags.DEFINE_float("top_p", 1.0, "sample among the fewest tokens that together have this probability")
SEED = flags.DEFINE_integer("seed", 0, "of samples")


def main(*files: str) -> None:
    with contextlib.ExitStack() as stack:
        inputs = STREAMS.open_inputs(stack, files)
        at_prompt = not files and sys.stdin.isatty() and SCORE.value is None
        lines = prompt() if at_prompt else STREAMS.read(inputs)
        own_settings = _own_settings()
        prefixes: str | list[str] = PREFIX.value or ""
        require_characters(PREFIX.value or "", "--prefix")
        targets = None
        if SCORE.value is not None:
            lines, targets = _read_side_by_side(lines, SCORE.value)
        elif PREFIX_FILE.value is not None:
            lines, prefixes = _read_side_by_side(lines, PREFIX_FILE.value)
        out = STREAMS.open_output(stack, inputs)

        run, settings = RESTORE()
        print(f"{run.config.name}: {run.parameters}", file=sys.stderr)
        translator = run.translator(**({"batch_size": 1, "window": 1} if at_prompt else {}) | settings | own_settings)
        STREAMS.begin(out)
        progress = (lambda done: None) if at_prompt else STREAMS.watch(stack, lines, inputs)
        if isinstance(lines, list) and targets is not None:
            scored = translator.score(lines, targets, progress=progress)
            results = (_show_scores(*result, run.tokenizer) for result in zip(targets, scored, strict=True))
        else:
            found = translator.search(lines, prefixes=prefixes, progress=progress)
            results = (_show(number, translations) for number, translations in enumerate(found))
        rate = STREAMS.put_out(out, results)
    if not at_prompt:
        from transformer_flax.console import counted

        print(f"{rate}; {counted(translator.compilations, 'compilation')}", file=sys.stderr)


def _own_settings() -> dict[str, Any]:
    """Those of a translator that no config has."""
    for name in ("temperature", "top_k", "top_p", "seed"):
        if flags.FLAGS[name].present and not SAMPLE.value:
            raise UserError(f"--{name} is of samples, and without --sample there are none")
    for chosen, idle in (
        ("score", ("nbest", "scores", "sample", "prefix", "prefix_file", "beam_size", "length_penalty", "alpha")),
        ("sample", ("beam_size",)),
        ("nbest", ("scores",)),
        ("prefix", ("prefix_file",)),
    ):
        for name in idle:
            if flags.FLAGS[chosen].present and flags.FLAGS[name].present:
                raise UserError(f"--{name} does nothing beside --{chosen}: leave one of them out")
    settings: dict[str, Any] = {"refuse_long": STREAMS.refuse_long}
    if NBEST.value is not None:
        settings["nbest"] = NBEST.value
    if SAMPLE.value:
        from transformer_flax.decoding.search import Sampling

        settings["sampling"] = Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value, SEED.value)
    return settings


def _read_side_by_side(lines: Iterable[str], name: str) -> tuple[list[str], list[str]]:
    """All lines of the input, and those of a file that has one for each."""
    with open_input(name) as file:
        beside = list(STREAMS.read([file]))
    lines = list(lines)
    if len(beside) != len(lines):
        raise UserError(f"{name} has {len(beside):,} lines and the input {len(lines):,}: one must belong to each")
    return lines, beside


def _show(number: int, translations: Sequence["Translation"]) -> str:
    if NBEST.value is not None:
        return "\n".join(
            f"{number} ||| {t.text} ||| log_prob= {t.log_prob:.4f} ||| {t.score:.4f}" for t in translations
        )
    best = translations[0]
    return f"{best.score:.4f}\t{best.text}" if SCORES.value else best.text


def _show_scores(target: str, log_probs: Sequence[float], tokenizer: "Tokenizer") -> str:
    pieces = tokenizer.pieces(target)[: len(log_probs)]
    return "\t".join([f"{sum(log_probs):.4f}", " ".join(f"{x:.4f}" for x in log_probs), " ".join(pieces)])


if __name__ == "__main__":
    cli.run(main, takes_files=True)
