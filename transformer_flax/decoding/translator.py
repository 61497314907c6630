"""Text in, text out: parameters, a tokenizer and a search."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.search import beam_search, greedy_search
from transformer_flax.special_tokens import END_ID, PAD_ID

logger = logging.getLogger(__name__)

NARROWEST = 16  # source widths are powers of two from here, so that a handful of programs serves all lengths
ROOMY = 64  # beyond this width there are fewer rows, so that memory stays bounded


class Translator:
    """Translates lists of strings with a trained model.

    Args:
      model: a Linen module with the methods `begin(source, hypotheses, length)` and `step(tokens, position)`.
      params: its parameters; may be replaced at any time, compiled programs stay. None until they are there.
      tokenizer: of both languages.
      beam_size: K; 1 is greedy search.
      alpha: of the length penalty.
      max_extra_length: an output has at most as many tokens as its input and so many more.
      max_input_length: longer inputs (in tokens, the end symbol included) are cut, and counted in a warning.
      batch_size: sentences at a time; fewer where they are long.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Any,
        tokenizer: Tokenizer,
        *,
        beam_size: int,
        alpha: float,
        max_extra_length: int,
        max_input_length: int,
        batch_size: int,
    ):
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.beam_size, self.alpha = beam_size, alpha
        self.max_extra_length, self.max_input_length = max_extra_length, max_input_length
        self.batch_size = batch_size
        self.compilations = 0
        self._search = jax.jit(self._search_batch)

    def translate(
        self, lines: Sequence[str], *, progress: Callable[[int, int], None] = lambda done, of: None
    ) -> list[str]:
        """One translation for each line, in order; an empty line stays empty.

        Args:
          lines: sentences.
          progress: called with (lines done, of all lines).
        """
        encoded = [[*ids, END_ID] for ids in self.tokenizer.encode(lines)]
        if cut := sum(len(ids) > self.max_input_length for ids in encoded):
            logger.warning("%d of %d lines were cut to %d tokens", cut, len(lines), self.max_input_length)
            encoded = [ids if len(ids) <= self.max_input_length else self._cut(ids) for ids in encoded]
        translations = [""] * len(lines)
        pending = sorted((i for i, line in enumerate(lines) if line), key=lambda i: len(encoded[i]), reverse=True)
        total = len(pending)
        while pending:
            width = NARROWEST
            while width < len(encoded[pending[0]]):
                width *= 2
            width = min(width, self.max_input_length)
            rows = max(1, self.batch_size * ROOMY // max(width, ROOMY))
            batch, pending = pending[:rows], pending[rows:]
            source = np.full((rows, width), PAD_ID, np.int32)
            for row, i in enumerate(batch):
                source[row, : len(encoded[i])] = encoded[i]
            tokens = np.asarray(self._search(self.params, source).tokens)
            for row, i in enumerate(batch):
                translations[i] = self.tokenizer.decode(tokens[row, 0])
            progress(total - len(pending), total)
        return translations

    def _cut(self, ids: list[int]) -> list[int]:
        return [*ids[: self.max_input_length - 1], END_ID]

    def _search_batch(self, params, source):
        self.compilations += 1  # runs while tracing only, which is once for every shape
        lengths = jnp.sum(source != PAD_ID, axis=1)
        limits = jnp.where(lengths > 0, lengths + self.max_extra_length, 1)
        max_length = source.shape[1] + self.max_extra_length
        _, state = self.model.apply(
            {"params": params}, source, self.beam_size, max_length, method="begin", mutable=["memory", "cache"]
        )

        def step(tokens, position, cache):
            variables = {"params": params, "memory": state["memory"], "cache": cache}
            logits, updated = self.model.apply(variables, tokens, position, method="step", mutable=["cache"])
            return logits, updated["cache"]

        settings: dict[str, Any] = {"max_length": max_length, "alpha": self.alpha}
        if self.beam_size == 1:
            return greedy_search(step, state["cache"], limits, **settings)
        return beam_search(step, state["cache"], limits, beam_size=self.beam_size, **settings)
