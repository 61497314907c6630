"""The attention weights of a model on a sentence and its translation, with readable labels.

Letters of shapes: N layers, H heads, S source tokens, T target tokens, end symbols included.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from transformer_flax.data.batches import round_up
from transformer_flax.data.tokenizer import SPECIAL_TOKENS, Tokenizer, is_mark, starts_with_letter
from transformer_flax.decoding.inference import fill
from transformer_flax.errors import UserError
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.registry import attention_maps, param_shapes
from transformer_flax.special_tokens import BEGIN_ID, NUM_SPECIAL

KINDS = ("encoder", "decoder", "cross")
WIDTH = 16  # lengths are padded to multiples of this, so few programs are compiled
ROWS = 16  # most sentences in a batch
CONTINUED = "·"  # before a piece that continues a word
BLANK = "␣"


@dataclasses.dataclass(frozen=True)
class Sentence:
    """The tokens of a sentence, with readable labels."""

    text: str
    pieces: tuple[str, ...]  # a label for each token; "·" begins the label of a piece that continues a word
    words: tuple[str, ...]  # the words of the text, separated by blanks
    words_of: tuple[tuple[int, ...], ...]  # the indices of each token's words; none for special tokens and blanks


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """All attention weights of one pass over a sentence and its translation, float32; every row sums to 1.

    At each position the decoder reads a token (first the begin symbol, then the target's tokens) and writes the next
    token. A kind of attention that the model lacks is None.
    """

    source: Sentence
    target: Sentence
    encoder: np.ndarray | None = None  # [N, H, S, S], from source tokens to source tokens
    decoder: np.ndarray | None = None  # [N, H, T, T], from tokens read to tokens read so far
    cross: np.ndarray | None = None  # [N, H, T, S], from tokens written to source tokens

    def __repr__(self) -> str:
        arrays = ", ".join(f"{kind} {[*getattr(self, kind).shape]}" for kind in self.kinds)
        return f"<Attention {self.source.text!r} -> {self.target.text!r}: {arrays}>"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention that the model has, among "encoder", "decoder" and "cross"."""
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def num_heads(self) -> int:
        """The number of heads; the largest, if kinds of attention differ."""
        return max(self.layers(kind).shape[1] for kind in self.kinds)

    def labels(self, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the labels of the rows (tokens that attend) and of the columns (tokens attended to)."""
        source, written = self.source.pieces, self.target.pieces
        read = (SPECIAL_TOKENS[BEGIN_ID], *written[:-1])
        return {"encoder": (source, source), "decoder": (read, read), "cross": (written, source)}[kind]

    def layers(self, kind: str) -> np.ndarray:
        """Returns the weights of a kind of attention, [N, H, rows, columns].

        Raises:
          UserError: the model has no such kind of attention.
        """
        if kind not in self.kinds:
            raise UserError(
                f"kind is {kind!r}; it must be one of {', '.join(self.kinds)}: the model has no other attention"
            )
        return getattr(self, kind)

    def layer(self, kind: str, layer: int) -> np.ndarray:
        """Returns the weights of a layer, [H, rows, columns]; -1 is the last layer.

        Raises:
          UserError: the model has no such kind of attention, or no such layer.
        """
        weights = self.layers(kind)
        if not -len(weights) <= layer < len(weights):
            raise UserError(f"layer is {layer}; the model has layers 0 to {len(weights) - 1}")
        return weights[layer]

    def heads(self, kind: str, heads: Sequence[int] | None) -> list[int]:
        """Returns the given heads of a kind of attention, or all its heads for None.

        Raises:
          UserError: there is no such head.
        """
        count = self.layers(kind).shape[1]
        chosen = list(range(count)) if heads is None else list(heads)
        if not chosen or not all(0 <= head < count for head in chosen):
            raise UserError(f"heads is {chosen}; the model has heads 0 to {count - 1}")
        return chosen


# The static argument is the model, not its config: a notebook may register another module for that config.
@functools.partial(jax.jit, static_argnums=0)
def _maps(model: Any, params: Any, *sides: jax.Array) -> dict[str, jax.Array]:
    return attention_maps(model.config, params, *sides)


@functools.cache
def count_heads(model: Any) -> dict[str, tuple[int, int]]:
    """Returns the numbers of layers and heads of each kind of attention of a Linen module. Runs no model.

    Raises:
      UserError: the model has no attention.
    """
    line = jax.ShapeDtypeStruct((1, 1), np.int32)
    maps = jax.eval_shape(functools.partial(attention_maps, model.config), param_shapes(model.config), line, line)
    if not maps:
        raise UserError("the model has no attention that it shows")
    return {kind: (weights.shape[0], weights.shape[2]) for kind, weights in maps.items()}


def attend(
    model: Any, params: Any, tokenizer: Tokenizer, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[Attention]:
    """Yields the attention of each pair of (source, target) token ids, both of which end with the end symbol.

    `model` is a Linen module with its config.
    """
    rows = min(ROWS, len(pairs))
    for start in range(0, len(pairs), ROWS):
        chosen = pairs[start : start + ROWS]
        sides = [[pair[side] for pair in chosen] for side in (0, 1)]
        filled = [fill(side, rows, _width(max(map(len, side)), model.config)) for side in sides]
        maps = jax.device_get(_maps(model, params, *filled))
        for row, (source, target) in enumerate(chosen):
            s, t = len(source), len(target)
            shapes = {"encoder": (s, s), "decoder": (t, t), "cross": (t, s)}
            cut = {kind: maps[kind][:, row, :, :r, :c].copy() for kind, (r, c) in shapes.items() if kind in maps}
            yield Attention(read_tokens(tokenizer, source), read_tokens(tokenizer, target), **cut)


def _width(longest: int, config: ModelConfig) -> int:
    """Returns the padded length: a multiple of WIDTH, or as many positions as the model has."""
    return max(longest, min(round_up(longest, WIDTH), config.most_positions))


def read_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> Sentence:
    """Decodes token ids, and labels each token with its part of the text.

    A token that holds only some bytes of a character is labelled with the whole character.
    """
    text = tokenizer.decode(ids)
    words = [match.span() for match in re.finditer(r"\S+", text)]
    pieces, words_of, start = [], [], 0
    for number, token in enumerate(ids):
        if token < NUM_SPECIAL:
            pieces.append(SPECIAL_TOKENS[token])
            words_of.append(())
            continue
        so_far = tokenizer.decode(ids[: number + 1])
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(so_far, text, strict=False))
        whole = max(start, sum(1 for _ in same))  # characters of the text that are complete
        end = min(whole + (len(so_far) > whole), len(text))  # one more character if its bytes are incomplete
        pieces.append(_label(text, start, end))
        own = (n for n, (first, last) in enumerate(words) if first < end and start < last)
        words_of.append(tuple(own) if text[start:end].strip() else ())
        start = whole
    return Sentence(text, tuple(pieces), tuple(text[slice(*span)] for span in words), tuple(words_of))


def _label(text: str, start: int, end: int) -> str:
    piece = text[start:end]
    if not piece.strip():
        return BLANK
    before = next((c for c in reversed(text[:start]) if not is_mark(c)), "")
    within = before.isalnum() and starts_with_letter(piece)
    readable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece.strip())
    return CONTINUED * within + readable
