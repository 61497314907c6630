"""The common base of translators and classifiers: models on the local devices, and lines in batches of few shapes."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.search import combine
from transformer_flax.decoding.settings import Settings
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, PAD_ID

ROWS = "rows"
NARROWEST = 16  # widths are powers of two from NARROWEST on, so that a few programs serve all lengths
ROOMY = 64  # wider batches have fewer rows, which bounds the memory
GROWTH = 8  # few lines have batches of 1, 8, 64, ... rows, so that a few programs serve all numbers of lines

logger = logging.getLogger(__name__)


class Inference:
    """Reads lines window by window, and computes their batches on the local devices.

    The models' parameters are on every device. Each device computes its own rows, without waiting for the others. A
    batch has fewer rows than `batch_size` for long or few lines, or if `window` is smaller.
    """

    def __init__(self, params: Sequence[Any], tokenizer: Tokenizer, settings: Settings):
        self._mesh = local_mesh(settings.num_devices)
        self.num_devices = self._mesh.size
        self.params, self.tokenizer, self.settings = on_devices(params, settings.num_devices), tokenizer, settings
        self._most_rows = min(settings.batch_size, -(-settings.window // self.num_devices))  # on each device
        self._traced: list[tuple[list[None], int]] = []  # (a program's compilations, number of them before)

    @property
    def compilations(self) -> int:
        """The number of programs compiled for these models. Programs that were compiled earlier do not count."""
        return sum(len(traced) - before for traced, before in self._traced)

    def _compile(self, function: Callable) -> Callable:
        """Compiles `function(params, *arrays)`, whose rows must be independent. Equal functions share programs."""
        program, traced = compile_rows(function, self._mesh)
        self._traced.append((traced, len(traced)))
        return program

    def _windows(self, lines: Iterable[str], normalise: Callable[[str], str]) -> Iterator[tuple[int, list[list[int]]]]:
        """Yields (number of lines before, ids of each line) for each window. Reads no line beyond the window.

        Raises:
          UserError: `lines` is one string.
        """
        if isinstance(lines, (str, bytes)):
            raise UserError(f"lines is {lines[:40]!r}; it must be a list of lines, not a string")
        remaining = map(normalise, lines)
        read = cut = 0
        try:
            while window := list(itertools.islice(remaining, self.settings.window)):
                before, read = read, read + len(window)
                encoded, shortened = self.encode(window, self.settings.max_input_length, lines_before=before)
                cut += len(shortened)
                yield before, encoded
        finally:
            warn_of_cut(cut, read, self.settings.max_input_length)

    def encode(
        self, lines: Sequence[str], limit: int, *, lines_before: int = 0, what: str = "line"
    ) -> tuple[list[list[int]], list[int]]:
        """Encodes lines, and cuts them to `limit` ids. Returns the ids of each line, and the indices of the lines cut.

        `what` names a line in messages. Every line, also a cut one, ends with the end symbol.
        """
        encoded = [[*ids, END_ID] for ids in self.tokenizer.encode(lines)]
        long = [i for i, ids in enumerate(encoded) if len(ids) > limit]
        if long and self.settings.refuse_long:
            raise UserError(
                f"{what} {lines_before + long[0] + 1:,} has {len(encoded[long[0]]):,} tokens and at most {limit:,} are "
                "taken; split it, or raise max_input_length"
            )
        for i in long:
            encoded[i] = [*encoded[i][: limit - 1], END_ID]
        return encoded, long

    def _batches(
        self,
        lengths: Sequence[int],
        progress: Callable[[int], Any],
        *,
        before: int = 0,
        longest: int | None = None,
        roomy: int = ROOMY,
    ) -> Iterator[tuple[list[int], int, int]]:
        """Groups lines of similar length into batches of few shapes, long lines first.

        Args:
          lengths: the tokens of each line; lines of length 0 are left out.
          progress: called with the number of lines done after each batch.
          before: the number of lines in earlier windows.
          longest: the largest width; `max_input_length` if None.
          roomy: batches of up to this width have up to `batch_size` rows a device; wider batches have fewer.

        Yields:
          (indices of the lines, rows, width) of each batch.
        """
        pending = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
        done = before + len(lengths) - len(pending)
        enough = self._most_rows if before else 1  # the rest of a long text is not worth another program
        while enough * self.num_devices < len(pending):
            enough *= GROWTH
        while pending:
            width = NARROWEST
            while width < lengths[pending[0]]:
                width *= 2
            width = min(width, longest or self.settings.max_input_length)
            rows = self.num_devices * min(enough, max(1, self._most_rows * roomy // max(width, roomy)))
            yield pending[:rows], rows, width
            done += len(pending[:rows])
            progress(done)
            pending = pending[rows:]


def warn_of_cut(cut: int, lines: int, tokens: int, *, what: str = "line") -> None:
    """Warns that some of the lines, if any, were cut to a number of tokens. `what` is the name of a line."""
    if cut:
        logger.warning("%d of %d %ss were cut to %d tokens", cut, lines, what, tokens)


def fill(lines: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Returns the ids as an array with padding: int32 [rows, width]."""
    filled = np.full((rows, width), PAD_ID, np.int32)
    for row, ids in enumerate(lines):
        filled[row, : len(ids)] = ids
    return filled


def on_devices(params: Any, num_devices: int) -> Any:
    """Returns parameters on every device. Those that are there already are not copied."""
    return jax.device_put(params, NamedSharding(local_mesh(num_devices), PartitionSpec()))


def local_mesh(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.local_devices()[: num_devices or None]), (ROWS,))


@functools.lru_cache(maxsize=16)
def compile_rows(function: Callable, mesh: Mesh) -> tuple[Callable, list[None]]:
    """Compiles a function of rows for the devices of a mesh. The list gets an entry for each shape that is compiled."""
    traced: list[None] = []

    def counted(params, *arrays):
        traced.append(None)  # executed only during tracing
        if mesh.size == 1:
            return function(params, *arrays)
        # With check_vma=False, a loop may begin with values that are the same on all devices.
        rows = PartitionSpec(ROWS)
        in_specs = PartitionSpec(), *[rows] * len(arrays)
        spread = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
        return spread(params, *arrays)

    return jax.jit(counted), traced


@dataclasses.dataclass(frozen=True)
class LogProbs:
    """The log of the models' mean probabilities for the sides of a batch: [rows, ...] -> [rows, ..., V]."""

    models: tuple[nn.Module, ...]

    def __call__(self, params: Sequence[Any], *sides: jax.Array) -> jax.Array:
        logits = [model.apply({"params": own}, *sides) for model, own in zip(self.models, params, strict=True)]
        return jax.nn.log_softmax(combine(logits))
