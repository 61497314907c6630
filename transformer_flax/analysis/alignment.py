"""Word alignments from the decoder's attention, in Pharaoh format, and their error rate."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np

from transformer_flax.analysis.attention import Attention
from transformer_flax.data.text_files import read_lines
from transformer_flax.errors import UserError, look_up

Links = frozenset[tuple[int, int]]  # (source word, target word), counted from 0
LINK = re.compile(r"(\d+)([-?p])(\d+)")
SHIFTS = {"written": 0, "read": -1}  # from the position that has a word's weights to the word's own


def word_weights(
    attention: Attention,
    *,
    layers: Sequence[int] | None = (-1,),
    heads: Sequence[int] | None = None,
    by: str = "written",
) -> np.ndarray:
    """Returns the share of attention that each target word gives each source word: [target words, source words].

    Weights are summed over the pieces of a source word, and averaged over the pieces of a target word. The end symbol
    and tokens of blanks alone belong to no word, so a row sums to 1 minus their weight. The row of a word without a
    token of its own is zero.

    Args:
      layers: the decoder layers to average; None for all.
      heads: the heads to average; None for all.
      by: "written": the weights when the decoder writes a word. "read": the weights when the decoder reads the word,
        one position later.

    Raises:
      UserError: there is no such layer or head, or `by` is unknown.
    """
    shift = look_up("by", by, SHIFTS)
    layers = range(len(attention.layers("cross"))) if layers is None else layers
    chosen = [attention.layer("cross", layer)[attention.heads("cross", heads)].mean(axis=0) for layer in layers]
    # [T, S]. The row that the shift moves to the end is the end symbol's, which belongs to no word.
    weights = np.roll(np.mean(chosen, axis=0), shift, axis=0)
    source, target = (_membership(side.words_of, len(side.words)) for side in (attention.source, attention.target))
    pieces = np.maximum(target.sum(axis=0), 1)[:, None]  # 0 for a word that only shares a blank's token
    return target.T @ weights @ source / pieces


def _membership(words_of: Sequence[Sequence[int]], words: int) -> np.ndarray:
    """Returns [tokens, words]: 1 if a token belongs to a word. A token of several words divides the 1 among them."""
    member = np.zeros((len(words_of), words))
    for token, its_words in enumerate(words_of):
        member[token, list(its_words)] = 1 / max(len(its_words), 1)
    return member


def align(
    attention: Attention,
    *,
    layers: Sequence[int] | None = (-1,),
    heads: Sequence[int] | None = None,
    by: str = "written",
) -> Links:
    """Links each target word to the source word that it attends to most; arguments as in `word_weights`."""
    weights = word_weights(attention, layers=layers, heads=heads, by=by)
    return frozenset((int(row.argmax()), number) for number, row in enumerate(weights) if row.any())


def to_pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Formats links as a line: "0-0 1-2", source word first."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


@dataclasses.dataclass(frozen=True)
class Gold:
    """The links of a sentence, made by human annotators."""

    sure: Links
    possible: Links  # includes the sure ones


def read_gold(file: str | os.PathLike[str], *, first: int = 0) -> list[Gold]:
    """Reads a file with the links of one sentence in each line: "0-0" is sure, "1?2" and "1p2" are possible.

    `first` is the number of a sentence's first word, which is 1 in some data sets.

    Raises:
      UserError: a line is malformed.
    """
    gold = []
    for number, line in enumerate(read_lines(pathlib.Path(file)), 1):
        sure, possible = set(), set()
        for link in line.split():
            match = LINK.fullmatch(link)
            if match is None or min(int(match[1]), int(match[3])) < first:
                raise UserError(
                    f"{file}, line {number:,}: {link[:40]!r} is not a link; write 0-1 (sure) or 0?1 (possible), "
                    f"the source word first, counted from {first}"
                )
            pair = int(match[1]) - first, int(match[3]) - first
            possible.add(pair)
            if match[2] == "-":
                sure.add(pair)
        gold.append(Gold(frozenset(sure), frozenset(possible)))
    return gold


def error_rate(alignments: Sequence[Links], gold: Sequence[Gold]) -> float:
    """Returns AER = 1 - (|A & S| + |A & P|) / (|A| + |S|) over all sentences (Och and Ney, 2003, equation 31).

    Raises:
      UserError: there are no links, neither found nor sure.
    """
    found = sum(len(a & g.sure) + len(a & g.possible) for a, g in zip(alignments, gold, strict=True))
    of = sum(len(a) + len(g.sure) for a, g in zip(alignments, gold, strict=True))
    if not of:
        raise UserError("there is no alignment error rate without links, neither found nor sure ones; check the texts")
    return 1 - found / of
