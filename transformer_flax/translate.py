"""Translates lines of text: python -m transformer_flax.translate --workdir=runs/base [FILE ...] < in.txt > out.txt.

Each input line gives one output line, or several with --nbest, in order. An empty line gives an empty line. On a
terminal, the command prompts for lines, unless a FILE, --target or --prefix_file is given. Files may be
plain, .gz or .xz.

With --target, prints the probability of the given translations instead. Each output line has log P (end symbol
included), a tab, log P of each token, a tab, and the tokens. Tokens are spelt as in the vocabulary, byte by byte, with
\u0120 for a blank.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from transformer_flax import cli
from transformer_flax.data.text_files import require_as_many
from transformer_flax.decoding.settings import Sampling
from transformer_flax.line_io import LineIO, open_input

if TYPE_CHECKING:
    from transformer_flax.data.tokenizer import Tokenizer
    from transformer_flax.decoding.translator import Translation

RESTORE = cli.define_run()
IO = LineIO()
NBEST = flags.DEFINE_integer(
    "nbest", None, "print this many hypotheses a line, in the format of Moses: id ||| text ||| ..."
)
SCORES = flags.DEFINE_bool("scores", False, "print a score and a tab before each translation")
TARGET = flags.DEFINE_string(
    "target", None, "print log P of the translations in this file, line by line, instead of translating"
)
PREFIX = flags.DEFINE_string("prefix", None, "text that every output begins with; end it at the end of a word")
PREFIX_FILE = flags.DEFINE_string("prefix_file", None, "a file with such a beginning of each output, line by line")
SAMPLE = flags.DEFINE_bool(
    "sample", False, "sample from the model's distribution instead of searching; --nbest samples a line"
)
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "temperature of samples; 0: greedy search")
TOP_K = flags.DEFINE_integer("top_k", 0, "sample from the k likeliest tokens; 0: from all")
TOP_P = flags.DEFINE_float("top_p", 1.0, "sample from the fewest tokens whose probabilities sum to this")
SEED = flags.DEFINE_integer("seed", 0, "seed of samples")


def main(*files: str) -> None:
    own_settings = _own_settings()
    beside = PREFIX_FILE.value if TARGET.value is None else TARGET.value
    with IO.opened(files, beside=beside):
        # given: the lines of --target or --prefix_file
        lines, given = (IO, []) if beside is None else _read_beside(beside)
        run, settings = RESTORE()
        translator = run.translator(**IO.settings | settings | own_settings)
        with IO.writing(translator, count=None if beside is None else len(given)) as (write, progress):
            if TARGET.value is None:
                prefixes = PREFIX.value or "" if beside is None else given
                for number, found in enumerate(translator.search(lines, prefixes=prefixes, progress=progress)):
                    write(_show(number, found))
            else:
                scores = translator.log_probabilities([*lines], given, progress=progress)
                for target, log_probs in zip(map(translator.normalise[1], given), scores, strict=True):
                    write(_show_scores(target, log_probs, run.tokenizer))


def _own_settings() -> dict[str, Any]:
    """Checks that the flags agree. Returns the settings of the translator that are not in the config."""
    if not SAMPLE.value:
        cli.refuse_idle(("temperature", "top_k", "top_p", "seed"), "without --sample")
    for chosen, idle in {
        "target": ("nbest", "scores", "sample", "prefix", "prefix_file", *cli.SEARCH),
        "sample": ("beam_size",),
        "nbest": ("scores",),
        "prefix": ("prefix_file",),
    }.items():
        if cli.is_given(chosen):
            cli.refuse_idle(idle, f"with --{chosen}")
    sampling = Sampling(temperature=TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value, seed=SEED.value)
    given = {"nbest": NBEST.value, "sampling": sampling if SAMPLE.value else None}
    return {name: value for name, value in given.items() if value is not None}


def _read_beside(name: str) -> tuple[list[str], list[str]]:
    """Returns the lines of the input and of a file, which must have the same number of lines."""
    with open_input(name) as file:
        beside = list(IO.read([file]))
    lines = list(IO)
    require_as_many(name, beside, "the input", lines)
    return lines, beside


def _show(number: int, translations: Sequence["Translation"]) -> str:
    if NBEST.value is not None:
        lines = [f"{number} ||| {t.text} ||| log_prob= {t.log_prob:.4f} ||| {t.score:.4f}" for t in translations]
        return "\n".join(lines)
    best = translations[0]
    return f"{best.score:.4f}\t{best.text}" if SCORES.value else best.text


def _show_scores(target: str, log_probs: Sequence[float], tokenizer: "Tokenizer") -> str:
    pieces = tokenizer.pieces(target)[: len(log_probs)]
    return "\t".join([f"{sum(log_probs):.4f}", " ".join(f"{x:.4f}" for x in log_probs), " ".join(pieces)])


if __name__ == "__main__":
    cli.run(main)
