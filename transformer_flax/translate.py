"""Translates lines of text: python -m transformer_flax.translate --workdir=runs/base [FILE ...] < in.txt > out.txt.

One line out for each line in, in order, an empty one for an empty one. On a terminal it is a prompt. With --score it
puts out how likely given translations are instead: log P, the end symbol included, a tab, log P of each token, a tab,
the tokens as the vocabulary spells them: byte by byte, a blank as \u0120. Files may be plain, .gz or .xz.
"""

import contextlib
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from absl import flags

from transformer_flax import cli
from transformer_flax.data.text import DAMAGES, LONGEST, decode_lines, open_text
from transformer_flax.errors import UserError

if TYPE_CHECKING:
    from transformer_flax.data.tokenizer import Tokenizer
    from transformer_flax.decoding.translator import Translation

RESTORE = cli.define_run()
OUTPUT = flags.DEFINE_string("output", None, "write to this file in place of standard output")
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
INVALID = flags.DEFINE_enum("invalid", "replace", ["replace", "refuse"], "what to do with lines that are not UTF-8")
LONG = flags.DEFINE_enum("long", "cut", ["cut", "refuse"], "what to do with lines longer than --max_input_length")

logger = logging.getLogger(__name__)


def main(*files: str) -> None:
    with contextlib.ExitStack() as stack:
        inputs = [stack.enter_context(_open_input(file)) for file in files] or [sys.stdin.buffer]
        at_prompt = not files and sys.stdin.isatty() and SCORE.value is None
        lines = _prompt() if at_prompt else _read(inputs)
        own_settings = _own_settings()
        prefixes: str | list[str] = PREFIX.value or ""
        targets = None
        if SCORE.value is not None:
            lines, targets = _read_side_by_side(lines, SCORE.value)
        elif PREFIX_FILE.value is not None:
            lines, prefixes = _read_side_by_side(lines, PREFIX_FILE.value)
        out = stack.enter_context(_open_output(inputs))

        run, settings = RESTORE()
        print(f"{run.config.name}: {run.parameters}", file=sys.stderr)
        translator = run.translator(**({"batch_size": 1, "window": 1} if at_prompt else {}) | settings | own_settings)
        if OUTPUT.value is not None and os.path.isfile(OUTPUT.value):  # and no pipe
            out.truncate(0)
        progress = (lambda done: None) if at_prompt else _watch(stack, lines, inputs)
        started = time.perf_counter()
        if isinstance(lines, list) and targets is not None:
            scored = translator.score(lines, targets, progress=progress)
            results = (_show_scores(*result, run.tokenizer) for result in zip(targets, scored, strict=True))
        else:
            found = translator.search(lines, prefixes=prefixes, progress=progress)
            results = (_show(number, translations) for number, translations in enumerate(found))
        done = 0
        for result in results:
            out.write(f"{result}\n".encode())
            out.flush()  # so that a prompt is answered, and a closed pipe noticed, at once
            done += 1
        seconds = time.perf_counter() - started
    if not at_prompt:
        from transformer_flax.training.progress import counted

        rate = f"{counted(done, 'line')} in {counted(round(seconds), 'second')}, {done / seconds:,.1f} a second"
        print(f"{rate}; {counted(translator.compilations, 'compilation')}", file=sys.stderr)


def _open_input(name: str) -> BinaryIO:
    if os.path.isdir(name):
        raise UserError(f"{name} is a directory, not a text; a run is named by --workdir={name}")
    return open_text(pathlib.Path(name))


def _open_output(inputs: Sequence[BinaryIO]) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opened before the work, so that it is refused before it, and not emptied yet."""
    name = OUTPUT.value
    if name is None:
        return contextlib.nullcontext(sys.stdout.buffer)
    if os.path.isfile(name) and any(os.path.samestat(os.stat(name), os.fstat(file.fileno())) for file in inputs):
        raise UserError(f"{name} is an input; write to another file")
    return open(name, "ab")


def _watch(stack: contextlib.ExitStack, lines: Any, inputs: Sequence[BinaryIO]) -> Callable[[int], None]:
    """A bar on standard error that is told how many lines are done."""
    if not sys.stderr.isatty() or (OUTPUT.value is None and sys.stdout.isatty()):
        return lambda done: None  # nobody watches, or the lines themselves are the progress
    from transformer_flax.training.progress import Progress

    update = stack.enter_context(stack.enter_context(Progress(stderr=True)).bar("lines"))
    of = len(lines) if isinstance(lines, list) else _count_lines(inputs)
    return lambda done: update(done, of)


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
    settings: dict[str, Any] = {"refuse_long": LONG.value == "refuse"}
    if NBEST.value is not None:
        settings["nbest"] = NBEST.value
    if SAMPLE.value:
        from transformer_flax.decoding.search import Sampling

        settings["sampling"] = Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value, SEED.value)
    return settings


def _prompt() -> Iterator[str]:
    import readline  # noqa: F401  it gives input() its history and line editing

    with contextlib.suppress(EOFError):
        while True:
            line = input("> " if sys.stdout.isatty() else "")
            yield line.encode(errors="surrogateescape").decode(errors="replace")  # what was typed may not be UTF-8
    print(file=sys.stderr)


def _read(files: Sequence[BinaryIO]) -> Iterator[str]:
    """The lines of files, one after the other; none is read before it is asked for."""
    spoilt: list[str] = []
    for file in files:
        name = getattr(file, "name", "the input")  # which .xz does not tell
        yield from decode_lines(file, name, spoilt=None if INVALID.value == "refuse" else spoilt)
    if spoilt:
        logger.warning("%d lines are not UTF-8 (%s first); bytes were replaced by U+FFFD", len(spoilt), spoilt[0])


def _read_side_by_side(lines: Iterable[str], name: str) -> tuple[list[str], list[str]]:
    """All lines of the input, and those of a file that has one for each."""
    with _open_input(name) as file:
        beside = list(_read([file]))
    lines = list(lines)
    if len(beside) != len(lines):
        raise UserError(f"{name} has {len(beside):,} lines and the input {len(lines):,}: one must belong to each")
    return lines, beside


def _count_lines(files: Sequence[BinaryIO]) -> int | None:
    """None where reading them ahead would lose them, or finds one damaged."""
    if not all(file.seekable() for file in files):
        return None
    total = 0
    for file in files:
        start = file.tell()
        try:
            total += sum(1 for _ in iter(lambda file=file: file.readline(LONGEST), b""))
        except DAMAGES:
            return None  # whoever reads it tells where
        finally:
            file.seek(start)
    return total


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
