"""Text in, classes out: parameters, a tokenizer and the names of the classes."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.inputs import batches, encode, fill, warn_of_cut
from transformer_flax.decoding.search import log_mean_probability
from transformer_flax.errors import UserError

SETTINGS = ("max_input_length", "batch_size", "window")  # fields of config.decode that mean something here


class Labeller:
    """Classifies text with one trained model, or with several of the same tokenizer and classes, as an ensemble.

    What a line is found to be does not depend on the others, on their order or on the size of the batches.

    Args:
      models: Linen modules that give logits [B, C] of a source [B, S].
      params: those of each model; may be replaced at any time, compiled programs stay. None until they are there.
      tokenizer: of the text.
      classes: the names of the C classes.
      max_input_length: longer lines (in tokens, the end symbol included) are cut, and counted in a warning.
      batch_size: lines at a time; fewer where they are long.
      window: lines that are read, sorted by length and classified before the first of them is put out.
      refuse_long: refuse lines longer than `max_input_length`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        params: Sequence[Any] | None,
        tokenizer: Tokenizer,
        classes: Sequence[str],
        *,
        max_input_length: int,
        batch_size: int,
        window: int,
        refuse_long: bool = False,
    ):
        for name, value, least in (
            ("max_input_length", max_input_length, 2),
            ("batch_size", batch_size, 1),
            ("window", window, 1),
        ):
            if value < least:
                raise UserError(f"{name} is {value}; it must be at least {least}")
        self.models, self.params, self.tokenizer, self.classes = list(models), params, tokenizer, tuple(classes)
        self.compilations = 0
        self._max_input_length, self._refuse_long = max_input_length, refuse_long
        self._batch_size, self._window = batch_size, window
        self._classify = jax.jit(self._classify_batch)

    def label(self, lines: Iterable[str], *, progress: Callable[[int], Any] = lambda done: None) -> list[str]:
        """The likeliest class of each line, in order."""
        return [self.classes[np.argmax(found)] for found in self.log_probabilities(lines, progress=progress)]

    def log_probabilities(
        self, lines: Iterable[str], *, progress: Callable[[int], Any] = lambda done: None
    ) -> Iterator[np.ndarray]:
        """log P of each class, natural, float32 [C], for each line, window by window.

        Args:
          lines: read no further than the window that is being classified. One that is empty is its end symbol alone.
          progress: called with the number of lines done so far.

        Raises:
          UserError: a line is too long and `refuse_long` is set.
        """
        inputs, read, cut = iter(lines), 0, 0
        try:
            while window := list(itertools.islice(inputs, self._window)):
                encoded, shortened = encode(
                    self.tokenizer,
                    window,
                    self._max_input_length,
                    refuse_long=self._refuse_long,
                    lines_before=read,
                )
                before, read, cut = read, read + len(window), cut + len(shortened)
                yield from self._classify_window(encoded, lambda done, before=before: progress(before + done))
        finally:
            warn_of_cut(cut, read, self._max_input_length)

    def _classify_window(self, lines: Sequence[Sequence[int]], progress: Callable[[int], Any]) -> np.ndarray:
        found = np.empty((len(lines), len(self.classes)), np.float32)
        done = 0
        for chosen, rows, width in batches([len(line) for line in lines], self._max_input_length, self._batch_size):
            log_probs = self._classify(self.params, fill([lines[i] for i in chosen], rows, width))
            found[chosen] = np.asarray(log_probs)[: len(chosen)]
            done += len(chosen)
            progress(done)
        return found

    def _classify_batch(self, params, source: jax.Array) -> jax.Array:
        self.compilations += 1  # runs while tracing only, which is once for every shape
        logits: list[Any] = [
            model.apply({"params": one_params}, source) for model, one_params in zip(self.models, params, strict=True)
        ]
        return jax.nn.log_softmax(logits[0]) if len(logits) == 1 else log_mean_probability(logits)
