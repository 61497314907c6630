"""Classifies text, with models, a tokenizer and the names of the classes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import numpy as np

from transformer_flax.data.normalisation import PLAIN, Normaliser
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.inference import Inference, LogProbs, fill
from transformer_flax.decoding.settings import Settings
from transformer_flax.errors import UserError


class Predictor(Inference):
    """A classifier of text: a trained model, or an ensemble of models with the same tokenizer and classes.

    The result for a line does not depend on the other lines, their order or the batch size.

    Args:
      models: Linen modules that return logits [B, C] for a source [B, S].
      classes: the names of the C classes.
      normalise: applied to each line.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        params: Sequence[Any],
        tokenizer: Tokenizer,
        classes: Sequence[str],
        normalise: Normaliser = PLAIN,
        *,
        settings: Settings,
    ):
        super().__init__(params, tokenizer, settings)
        self.classes, self._normalise = tuple(classes), normalise
        self._classify = self._compile(LogProbs(tuple(models)))

    def predict(self, lines: Iterable[str], *, progress: Callable[[int], Any] = lambda done: None) -> list[str]:
        """Returns the likeliest class of each line."""
        return [self.classes[np.argmax(found)] for found in self.log_probabilities(lines, progress=progress)]

    def log_probabilities(
        self, lines: Iterable[str], *, progress: Callable[[int], Any] = lambda done: None
    ) -> Iterator[np.ndarray]:
        """Yields the natural log P of each class, float32 [C], for each line. Empty lines are classified too.

        Lines are read window by window. `progress` is called with the number of lines done.

        Raises:
          UserError: a line is too long and `refuse_long` is set, or the model's parameters are not finite.
        """
        for before, encoded in self._windows(lines, self._normalise):
            found = np.empty((len(encoded), len(self.classes)), np.float32)
            lengths = [len(ids) for ids in encoded]
            for chosen, rows, width in self._batches(lengths, progress, before=before):
                log_probs = self._classify(self.params, fill([encoded[i] for i in chosen], rows, width))
                found[chosen] = np.asarray(log_probs)[: len(chosen)]
            if np.isnan(found).any():
                raise UserError("no class has a probability: the model's parameters are not finite")
            yield from found
