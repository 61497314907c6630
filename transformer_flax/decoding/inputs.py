"""Lines on their way into a model: ids, cut where they are too many, and batches of like length in few shapes."""

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, PAD_ID

logger = logging.getLogger(__name__)

NARROWEST = 16  # widths are powers of two from here, so that a handful of programs serves all lengths
ROOMY = 64  # beyond this width there are fewer rows, so that memory stays bounded


def encode(
    tokenizer: Tokenizer, lines: Sequence[str], limit: int, *, refuse_long: bool, lines_before: int = 0
) -> tuple[list[list[int]], list[int]]:
    """The ids of each line with the end symbol, at most `limit`, and which lines were cut.

    Raises:
      UserError: `refuse_long`, and a line would be cut; it is told by its number, which counts those before too.
    """
    encoded = [[*ids, END_ID] for ids in tokenizer.encode(lines)]
    long = [i for i, ids in enumerate(encoded) if len(ids) > limit]
    if long and refuse_long:
        raise UserError(
            f"line {lines_before + long[0] + 1:,} has {len(encoded[long[0]]):,} tokens and at most {limit:,} are "
            "taken; split it, or raise max_input_length"
        )
    for i in long:
        encoded[i] = [*encoded[i][: limit - 1], END_ID]
    return encoded, long


def warn_of_cut(cut: int, lines: int, limit: int) -> None:
    if cut:
        logger.warning("%d of %d lines were cut to %d tokens", cut, lines, limit)


def batches(
    lengths: Sequence[int], longest: int, batch_size: int, *, roomy: int = ROOMY
) -> Iterator[tuple[list[int], int, int]]:
    """Groups sentences of like length, long ones first: (their indices, rows, width) of few shapes.

    Args:
      lengths: in tokens; those without any are left out.
      longest: that there can be.
      batch_size: rows of up to `roomy` tokens; fewer of longer ones.
    """
    pending = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    while pending:
        width = NARROWEST
        while width < lengths[pending[0]]:
            width *= 2
        width = min(width, longest)
        rows = max(1, batch_size * roomy // max(width, roomy))
        yield pending[:rows], rows, width
        pending = pending[rows:]


def fill(lines: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Ids side by side in [rows, width], padding elsewhere."""
    filled = np.full((rows, width), PAD_ID, np.int32)
    for row, ids in enumerate(lines):
        filled[row, : len(ids)] = ids
    return filled
