"""The tasks that a model can learn: each has a loss, outputs for a text, and scores for these."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
from ml_collections import ConfigDict

from transformer_flax.data.normalisation import normalisers
from transformer_flax.decoding.predictor import SETTINGS, Predictor
from transformer_flax.decoding.scoring import score, score_labels
from transformer_flax.decoding.translator import Translator
from transformer_flax.model.registry import kind_of
from transformer_flax.training.loss import LossFn, classification_loss, translation_loss
from transformer_flax.training.setup import Data


class Scores(NamedTuple):
    """Scores of outputs against their references."""

    scalars: dict[str, float]
    signatures: dict[str, str]  # by the score: how exactly it was made, where there are several ways


class Task(Protocol):
    """A task, as the training loop sees it."""

    outputs: str  # the name of its outputs, and of the folder that keeps them
    score: str  # the validation score that says which checkpoint is best
    reads_target: bool  # teacher-forced: the model may ignore the source

    @property
    def compilations(self) -> int:
        """The number of programs compiled for `write`."""
        ...

    def write(self, params: Any, sources: Sequence[str], progress: Callable[[int], Any]) -> list[str]:
        """Translates or classifies each text, with parameters that are on the device."""
        ...

    def measure(self, outputs: Sequence[str], references: Sequence[str]) -> Scores:
        """Scores outputs against their references."""
        ...


class Translation:
    """Sentences in one language, from sentences in another."""

    outputs, score, reads_target = "translations", "bleu", True

    def __init__(self, config: ConfigDict, model: nn.Module, data: Data):
        _, self._text = normalisers(config.data)
        # Without normalisers: the pairs of `data` are normalised already.
        self._translator = Translator(
            [model], None, data.tokenizer, num_devices=config.parallel.num_devices, **config.decode
        )

    @property
    def compilations(self) -> int:
        return self._translator.compilations

    def write(self, params: Any, sources: Sequence[str], progress: Callable[[int], Any]) -> list[str]:
        self._translator.params = [params]
        translations = self._translator.translate(sources, progress=progress)
        self._translator.params = None  # training has use for the memory
        return translations

    def measure(self, outputs: Sequence[str], references: Sequence[str]) -> Scores:
        found = score(outputs, references, self._text)
        return Scores({"bleu": found.bleu, "exact_match": found.exact_match}, {"BLEU": found.signature})


class Classification:
    """The class of each text."""

    outputs, score, reads_target = "labels", "accuracy", False

    def __init__(self, config: ConfigDict, model: nn.Module, data: Data):
        assert data.classes
        settings = {name: config.decode[name] for name in SETTINGS} | {"num_devices": config.parallel.num_devices}
        self._predictor = Predictor([model], None, data.tokenizer, data.classes.names, **settings)

    @property
    def compilations(self) -> int:
        return self._predictor.compilations

    def write(self, params: Any, sources: Sequence[str], progress: Callable[[int], Any]) -> list[str]:
        self._predictor.params = [params]
        labels = self._predictor.predict(sources, progress=progress)
        self._predictor.params = None
        return labels

    def measure(self, outputs: Sequence[str], references: Sequence[str]) -> Scores:
        return Scores({"macro_f1": score_labels(outputs, references, self._predictor.classes).macro_f1}, {})


def make_loss(config: ConfigDict, model: nn.Module) -> LossFn:
    """The loss of a run's task."""
    if kind_of(model.config).classifies:
        return classification_loss(model, config.label_smoothing)
    return translation_loss(model, config.label_smoothing, config.loss_chunks, r_drop=config.r_drop)


def make_task(config: ConfigDict, model: nn.Module, data: Data) -> Task:
    """The task of a run's model. Its data have classes if, and only if, its kind of model classifies."""
    return Classification(config, model, data) if data.classes else Translation(config, model, data)
