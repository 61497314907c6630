"""The tasks that a model can learn. Each task has a loss, makes outputs from texts, and scores the outputs."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from transformer_flax.data.normalisation import normalisers
from transformer_flax.decoding.predictor import SETTINGS, Predictor
from transformer_flax.decoding.scoring import score, score_labels
from transformer_flax.decoding.translator import Translator
from transformer_flax.model.registry import kind_of
from transformer_flax.training.loss import LossFn, classification_loss, translation_loss
from transformer_flax.training.setup import Data


class Task(abc.ABC):
    """The interface of a task to the training loop."""

    outputs: str  # the name of the outputs and of their folder
    command: str  # the command that makes such outputs
    score: str  # the validation score that decides which checkpoint is best
    reads_target: bool  # the model reads the target (teacher forcing), so it may ignore the source
    compilations = 0  # the number of programs compiled for `write`

    def make_outputs(self, params: Any, sources: Sequence[str], progress: Callable[[int], Any]) -> list[str]:
        """Translates or classifies each text, with parameters on the device."""
        decoder, decode = self._decoder(params)
        outputs = decode(sources, progress=progress)
        self.compilations += decoder.compilations
        return outputs

    @abc.abstractmethod
    def _decoder(self, params: Any) -> tuple[Translator | Predictor, Callable[..., list[str]]]:
        """Returns the translator or predictor, and the method that makes outputs from texts."""

    @abc.abstractmethod
    def measure(self, outputs: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
        """Returns scores of outputs against references, and the signatures of scores that have several definitions."""


class TranslationTask(Task):
    """Translation of sentences into another language."""

    outputs, command, score, reads_target = "translations", "translate", "bleu", True

    def __init__(self, config: ConfigDict, model: nn.Module, data: Data):
        self._config, self._model, self._tokenizer = config, model, data.tokenizer
        _, self._text = normalisers(config.data)

    def _decoder(self, params: Any) -> tuple[Translator, Callable[..., list[str]]]:
        # Without normalisers: the pairs of `data` are normalised already.
        devices = self._config.parallel.num_devices
        translator = Translator([self._model], [params], self._tokenizer, num_devices=devices, **self._config.decode)
        return translator, translator.translate

    def measure(self, outputs: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
        found = score(outputs, references, self._text)
        return {"bleu": found.bleu, "exact_match": found.exact_match}, {"BLEU": found.signature}


class ClassificationTask(Task):
    """Classification of texts."""

    outputs, command, score, reads_target = "labels", "classify", "accuracy", False

    def __init__(self, config: ConfigDict, model: nn.Module, data: Data):
        assert data.classes
        self._model, self._tokenizer, self._classes = model, data.tokenizer, data.classes.names
        self._settings = {name: config.decode[name] for name in SETTINGS} | {"num_devices": config.parallel.num_devices}

    def _decoder(self, params: Any) -> tuple[Predictor, Callable[..., list[str]]]:
        predictor = Predictor([self._model], [params], self._tokenizer, self._classes, **self._settings)
        return predictor, predictor.predict

    def measure(self, outputs: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
        return {"macro_f1": score_labels(outputs, references, self._classes).macro_f1}, {}


def make_loss(config: ConfigDict, model: nn.Module) -> LossFn:
    """Returns the loss function of a run's task."""
    if kind_of(model.config).classifies:
        return classification_loss(model, config.label_smoothing)
    return translation_loss(model, config.label_smoothing, config.loss_chunks, r_drop=config.r_drop)


def make_task(config: ConfigDict, model: nn.Module, data: Data) -> Task:
    """Returns the task of a run. The data have classes if, and only if, the kind of model classifies."""
    return ClassificationTask(config, model, data) if data.classes else TranslationTask(config, model, data)
