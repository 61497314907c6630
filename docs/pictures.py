"""Makes the pictures of docs/attention.md: python docs/pictures.py [--numbers=runs/numbers] [--multi30k=runs/multi30k].

It takes the runs that are named, with the parameters of their last evaluation.
"""

import pathlib
import re
import sys

import numpy as np
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import transformer_flax
from configs import base, big
from transformer_flax import cli
from transformer_flax.analysis.alignment import align, to_pharaoh
from transformer_flax.analysis.attention import BLANK, CONTINUED, Attention
from transformer_flax.analysis.attention_page import write_page
from transformer_flax.analysis.plots import plot_heads, plot_lines, plot_positions, plot_schedule, plot_words
from transformer_flax.model.positions import sinusoids

NUMBERS = flags.DEFINE_string("numbers", None, "the working directory of a run of configs/numbers.py")
MULTI30K = flags.DEFINE_string("multi30k", None, "the working directory of a run of configs/multi30k.py")
OUTPUT = flags.DEFINE_string("output", str(pathlib.Path(__file__).parent), "where pictures are written")

NUMBER = "three hundred and twenty-one"
ONES_AND_TENS = re.compile(r"(ein|zwei|drei|vier|fünf|sechs|sieben|acht|neun)und(\w{3,7}[zß]ig)$")
SENTENCES = 5  # of the test split: the first of WORDS
WORDS = range(8, 13)


def main() -> None:
    docs = pathlib.Path(OUTPUT.value)
    plot_positions(sinusoids(100, 128), file=docs / "positions.png")
    plot_schedule([base.get_config(), big.get_config()], file=docs / "schedule.png")
    if NUMBERS.value:
        draw_numbers(transformer_flax.restore(NUMBERS.value), docs)
    if MULTI30K.value:
        draw_sentences(transformer_flax.restore(MULTI30K.value), docs)


def draw_numbers(run: transformer_flax.Run, docs: pathlib.Path) -> None:
    """Draws what a number is written from, and counts how often ones and tens are written crosswise."""
    attention = run.attention(NUMBER)
    plot_heads(attention, "cross", file=docs / "numbers_heads.png")
    plot_lines(attention, "encoder", 0, word="·ty", file=docs / "numbers_lines.png")
    pairs = [pair for pair in zip(*run.split("test"), strict=True) if ONES_AND_TENS.search(pair[1])]
    crossed = [crosses(attention) for attention in run.attentions(*map(list, zip(*pairs, strict=True)))]
    print(f"{NUMBER} -> {attention.target.text}")
    print(f"{sum(crossed)} of {len(crossed)} numbers of the test split with ones behind tens cross")


def draw_sentences(run: transformer_flax.Run, docs: pathlib.Path) -> None:
    """Draws the word alignments of some test sentences with their translations by the run."""
    sources = [source for source in run.split("test")[0] if len(source.split()) in WORDS][:SENTENCES]
    attentions = list(run.attentions(sources))
    for number, attention in enumerate(attentions, 1):
        links = align(attention)
        plot_words(attention, links, file=docs / f"multi30k_alignment_{number}.png")
        print(f"{attention.source.text} -> {attention.target.text}   {to_pharaoh(links)}")
    write_page(attentions, docs / "multi30k_attention.html")


def crosses(attention: Attention) -> bool:
    """Returns whether a number's ones are written from farther back in the source than its tens.

    German writes the ones first. They are written from where the last layer's heads look, on average.
    """
    where = attention.layers("cross")[-1].mean(axis=0) @ np.arange(len(attention.source.pieces))
    lengths = [len(piece.removeprefix(CONTINUED)) for piece in attention.target.pieces if piece != BLANK]
    begins = np.cumsum([0, *lengths])[:-1]  # of each piece in the text, which is one word
    where = where[-len(begins) :]
    found = ONES_AND_TENS.search(attention.target.text)
    assert found is not None
    ones, tens = ((begins >= found.start(group)) & (begins < found.end(group)) for group in (1, 2))
    return bool(where[ones].mean() > where[tens].mean())


if __name__ == "__main__":
    cli.run(main)
