"""Prepares lines for a model: token ids, in batches with few shapes."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, PAD_ID

NARROWEST = 16  # widths are powers of two from NARROWEST on, so that a few programs serve all lengths
ROOMY = 64  # wider batches have fewer rows, which bounds the memory

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """An encoder that makes batches from lines, window by window."""

    tokenizer: Tokenizer
    max_input_length: int  # tokens, the end symbol included; longer lines are cut and counted in a warning
    batch_size: int  # rows of a batch on each device; long lines, and windows of fewer lines, get fewer rows
    window: int  # lines to read and sort by length at a time
    refuse_long: bool = False  # raise an error for longer lines instead of cutting them
    devices: int = 1  # number of devices that share a batch

    def windows(self, lines: Iterable[str]) -> Iterator[tuple[int, list[list[int]]]]:
        """Yields (number of lines before, ids of each line) for each window. Reads no line beyond the window."""
        remaining = iter(lines)
        read = cut = 0
        try:
            while window := list(itertools.islice(remaining, self.window)):
                before, read = read, read + len(window)
                encoded, shortened = self.encode(window, self.max_input_length, lines_before=before)
                cut += len(shortened)
                yield before, encoded
        finally:
            self.warn_of_cut(cut, read)

    def encode(self, lines: Sequence[str], limit: int, *, lines_before: int = 0) -> tuple[list[list[int]], list[int]]:
        """Encodes lines, and cuts them to `limit` ids. Returns the ids of each line, and the indices of the lines cut.

        Every line, also a cut one, ends with the end symbol.
        """
        encoded = [[*ids, END_ID] for ids in self.tokenizer.encode(lines)]
        long = [i for i, ids in enumerate(encoded) if len(ids) > limit]
        if long and self.refuse_long:
            raise UserError(
                f"line {lines_before + long[0] + 1:,} has {len(encoded[long[0]]):,} tokens and at most {limit:,} are "
                "taken; split it, or raise max_input_length"
            )
        for i in long:
            encoded[i] = [*encoded[i][: limit - 1], END_ID]
        return encoded, long

    def warn_of_cut(self, cut: int, lines: int, to: str = "") -> None:
        if cut:
            logger.warning("%d of %d lines were cut to %s", cut, lines, to or f"{self.max_input_length} tokens")

    def batches(
        self,
        lengths: Sequence[int],
        progress: Callable[[int], Any],
        *,
        done: int = 0,
        longest: int | None = None,
        roomy: int = ROOMY,
    ) -> Iterator[tuple[list[int], int, int]]:
        """Groups lines of similar length into batches of few shapes, long lines first.

        Args:
          lengths: the tokens of each line; lines of length 0 are left out.
          progress: called with the number of lines done after each batch.
          done: the number of lines done before.
          longest: the largest width; `max_input_length` if None.
          roomy: batches of up to this width have `batch_size` rows a device; wider batches have fewer.

        Yields:
          (indices of the lines, rows, width) of each batch.
        """
        most = min(self.batch_size, -(-self.window // self.devices))
        pending = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
        while pending:
            width = NARROWEST
            while width < lengths[pending[0]]:
                width *= 2
            width = min(width, longest or self.max_input_length)
            rows = self.devices * max(1, most * roomy // max(width, roomy))
            yield pending[:rows], rows, width
            done += len(pending[:rows])
            progress(done)
            pending = pending[rows:]


def fill(lines: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Returns the ids as an array with padding: int32 [rows, width]."""
    filled = np.full((rows, width), PAD_ID, np.int32)
    for row, ids in enumerate(lines):
        filled[row, : len(ids)] = ids
    return filled
