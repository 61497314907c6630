"""A trained run as one object, for notebooks and scripts."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.analysis.attention import Attention, attend, count_heads
from transformer_flax.data.classes import Classes
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.predictor import SETTINGS, Predictor
from transformer_flax.decoding.scoring import ClassScores, FullScores, full_scores, score_labels
from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError
from transformer_flax.model.registry import init_params, make_model
from transformer_flax.special_tokens import END_ID
from transformer_flax.training.averaging import UnreadableError, choose, load_params, mean, require_vocabulary
from transformer_flax.training.loss import perplexity
from transformer_flax.training.run_directory import Workdir
from transformer_flax.training.setup import load_setup


@dataclasses.dataclass(frozen=True)
class Report(FullScores):
    """How good a run's translations of a text are."""

    perplexity: float  # of the references, per word-piece, unsmoothed
    sentences_per_second: float  # translated, compilation included
    compilations: int
    parameters: str  # which checkpoints were used
    decode: dict[str, Any]  # settings of the search
    translations: list[str]


@dataclasses.dataclass(frozen=True, eq=False)
class ClassReport(ClassScores):
    """How well a run tells the classes of a text apart."""

    perplexity: float  # of the right classes
    lines_per_second: float  # classified, compilation included
    compilations: int
    parameters: str  # which checkpoints were used
    labels: list[str]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A trained model and all that belongs to it; `restore` makes it from a working directory.

    `dataclasses.replace(run, params=...)` is the run with other parameters.
    """

    config: ConfigDict
    tokenizer: Tokenizer
    model: nn.Module
    params: Any
    parameters: str  # which checkpoints `params` are from
    fingerprints: dict[str, str]  # of the splits that it was trained on and measured with
    classes: Classes | None = None  # that it tells apart; None for one that translates
    partners: tuple["Run", ...] = ()  # whose probabilities are averaged with this one's
    _made: dict = dataclasses.field(default_factory=dict, init=False)  # so `dataclasses.replace` gives others

    def __repr__(self) -> str:
        return f"<Run {self.config.name}: {self.parameters}>"

    def translate(self, lines: Iterable[str], **settings) -> list[str]:
        """The best translation of each line, in order; settings are those of `translator`."""
        _require_lines("translate", lines)
        return self.translator(**settings).translate(lines)

    def classify(self, lines: Iterable[str], **settings) -> list[str]:
        """The likeliest class of each line, in order; settings are those of `labeller`."""
        _require_lines("classify", lines)
        return self.labeller(**settings).predict(lines)

    def probabilities(self, lines: Iterable[str], **settings) -> np.ndarray:
        """The probability of each class, in the order of `run.classes.names`: float32 [lines, C]."""
        _require_lines("probabilities", lines)
        labeller = self.labeller(**settings)
        found = list(labeller.log_probabilities(lines))
        return np.exp(np.array(found, np.float32).reshape(-1, len(labeller.classes)))

    def score(self, sources: Sequence[str], targets: Sequence[str], **settings) -> list[list[float]]:
        """log P of each token of given targets, the end symbol included."""
        return self.translator(**settings).score(sources, targets)

    def translator(self, **settings) -> Translator:
        """The run's translator, with `config.decode` as it is but for the settings given.

        The same settings give the same object, with the programs that it has compiled.

        Args:
          settings: arguments of `Translator`, such as beam_size=8, nbest=8 or sampling=Sampling(temperature=0.7).

        Raises:
          UserError: the run classifies.
        """
        self._require_translator()
        return self._make(Translator, self.tokenizer, **{**self.config.decode, **settings})

    def labeller(self, **settings) -> Predictor:
        """What classifies for the run, with `config.decode` as it is but for the settings given.

        Args:
          settings: arguments of `Predictor`, such as batch_size=256.

        Raises:
          UserError: the run translates, or a setting is one of a search.
        """
        if self.classes is None:
            raise UserError(f"{self.config.name} translates and knows no classes: use translate in place of classify")
        if idle := sorted((settings.keys() & self.config.decode.keys()) - {*SETTINGS}):
            raise UserError(f"{idle[0]} is a setting of a search, and {self.config.name} classifies; leave it out")
        own = {name: self.config.decode[name] for name in SETTINGS}
        return self._make(Predictor, self.tokenizer, self.classes.names, **{**own, **settings})

    def _make(self, what: type, *arguments, **settings) -> Any:
        """A Translator or Predictor of the run and its partners; the same one for the same settings."""
        key = tuple(sorted(settings.items()))
        if key not in self._made:
            members = (self, *self.partners)
            models, params = [run.model for run in members], [run.params for run in members]
            self._made[key] = what(models, params, *arguments, **settings)
        return self._made[key]

    def _require_translator(self) -> None:
        if self.classes is not None:
            raise UserError(
                f"{self.config.name} tells classes apart ({self.classes}) and does not translate: use classify instead"
            )

    def evaluate(
        self,
        sources: Sequence[str],
        references: Sequence[str],
        *,
        progress: Callable[[int], Any] = lambda done: None,
        **settings,
    ) -> Report | ClassReport:
        """Translates or classifies a text and compares it with references; `split` gives those of the run's data."""
        if len(sources) != len(references):
            raise UserError(
                f"there are {len(sources):,} sources and {len(references):,} references: each needs the other"
            )
        evaluate = self._evaluate_translations if self.classes is None else self._evaluate_labels
        return evaluate(sources, references, progress, settings)

    def _evaluate_translations(self, sources, references, progress, settings) -> Report:
        translator = self.translator(**settings)
        started = time.perf_counter()
        translations = translator.translate(sources, progress=progress)
        seconds = time.perf_counter() - started
        scores = full_scores(translations, references, self.config.data.target_language)
        log_probs = [log_prob for line in translator.score(sources, references) for log_prob in line]
        return Report(
            **vars(scores),
            perplexity=perplexity(-sum(log_probs), len(log_probs)),
            sentences_per_second=len(translations) / seconds,
            compilations=translator.compilations,
            parameters=self.parameters,
            decode={**self.config.decode, **settings},
            translations=translations,
        )

    def _evaluate_labels(self, sources, references, progress, settings) -> ClassReport:
        labeller = self.labeller(**settings)
        started = time.perf_counter()
        found = list(labeller.log_probabilities(sources, progress=progress))
        seconds = time.perf_counter() - started
        labels = [labeller.classes[np.argmax(log_probs)] for log_probs in found]
        scores = score_labels(labels, references, labeller.classes)
        right = [log_probs[labeller.classes.index(name)] for log_probs, name in zip(found, references, strict=True)]
        return ClassReport(
            **vars(scores),
            perplexity=perplexity(-np.sum(right, dtype=np.float64), len(right)),
            lines_per_second=len(labels) / seconds,
            compilations=labeller.compilations,
            parameters=self.parameters,
            labels=labels,
        )

    def split(self, name: str) -> tuple[list[str], list[str]]:
        """The sources and references of a split of the data that the run was made with.

        Raises:
          UserError: there is no such split any more, or its text has changed.
        """
        pairs = load_pairs(self.config.data, name)
        if self.fingerprints.get(name, pairs.fingerprint) != pairs.fingerprint:
            raise UserError(f"the {name} split of {self.config.name} has changed since the run was made")
        examples = [pairs[i] for i in range(len(pairs))]
        return [source for source, _ in examples], [target for _, target in examples]

    def attention(self, source: str, target: str | None = None, **settings) -> Attention:
        """What the model attends to while it reads a sentence and writes its translation, teacher-forced.

        Args:
          source: a sentence.
          target: the translation that it is made to write; its own for None.
          settings: of its search, as of `translator`.

        Raises:
          UserError: as `attentions`.
        """
        if not isinstance(source, str):
            raise UserError(f"attention takes one line, not {source!r}; attentions takes several")
        [attention] = self.attentions([source], None if target is None else [target], **settings)
        return attention

    def count_heads(self) -> dict[str, tuple[int, int]]:
        """How many layers and heads there are of each kind of attention: "encoder", "decoder" and "cross".

        Raises:
          UserError: the run classifies, or the model has no attention.
        """
        self._require_translator()
        return count_heads(self.model.config)

    def attentions(
        self, sources: Sequence[str], targets: Sequence[str] | None = None, **settings
    ) -> Iterator[Attention]:
        """`attention` of each of several lines, in order.

        Raises:
          UserError: a line is too long, not every line has a target, the model has no attention, or the run classifies
            or is an ensemble.
        """
        self.count_heads()
        if self.partners:
            raise UserError("an ensemble has no attention of its own: ask one of its members")
        decode = {**self.config.decode, **settings}
        longest = decode["max_input_length"]
        inputs = [[*ids, END_ID] for ids in self.tokenizer.encode(sources)]
        _require_short("line", inputs, longest, "max_input_length")
        if targets is None:
            found = self.translator(**settings).search(sources)
            outputs = [[token for token in best.tokens if token != END_ID] for best, *_ in found]
        else:
            outputs = self.tokenizer.encode(targets)
        if len(inputs) != len(outputs):
            raise UserError(f"there are {len(inputs):,} sources and {len(outputs):,} targets: each needs the other")
        outputs = [[*ids, END_ID] for ids in outputs]
        _require_short("target line", outputs, longest + decode["max_extra_length"], "max_extra_length")
        pairs = list(zip(inputs, outputs, strict=True))
        return attend(self.model.config, self.params, self.tokenizer, pairs)

    def ensemble(self, *others: "Run") -> "Run":
        """This run and others as one model, whose next-token probabilities are the mean of theirs.

        Raises:
          UserError: another has not the same tokenizer, or not the same classes.
        """
        for other in others:
            if getattr(other.classes, "names", None) != getattr(self.classes, "names", None):
                raise UserError(
                    f"{self.config.name} ({self.classes or 'translating'}) and {other.config.name} "
                    f"({other.classes or 'translating'}) have different classes, so they cannot be an ensemble"
                )
            if other.tokenizer.to_json() != self.tokenizer.to_json():
                raise UserError(
                    f"{self.config.name} (vocabulary {self.tokenizer.vocab_size:,}) and {other.config.name} "
                    f"(vocabulary {other.tokenizer.vocab_size:,}) have different tokenizers, so they cannot be an "
                    "ensemble; train them on the same data with the same config.data"
                )
        partners = (*self.partners, *(member for other in others for member in (other, *other.partners)))
        parameters = "; ".join([self.parameters, *(other.parameters for other in others)])
        return dataclasses.replace(self, partners=partners, parameters=parameters)


def _require_lines(what: str, lines: Iterable[str]) -> None:
    if isinstance(lines, str):
        raise UserError(f"{what} takes a list of lines, not a string: [{lines[:40]!r}]")


def _require_short(what: str, lines: Sequence[Sequence[int]], longest: int, setting: str) -> None:
    """Raises:
    UserError: a line has more tokens than are taken.
    """
    for number, ids in enumerate(lines, 1):
        if len(ids) > longest:
            raise UserError(
                f"{what} {number:,} has {len(ids):,} tokens and at most {longest:,} are taken; split it, or raise "
                f"{setting}"
            )


def restore(
    workdir: str | os.PathLike, *, average: int | str | None = None, steps: int | Sequence[int] | None = None
) -> Run:
    """The run in a working directory, finished or still training.

    Args:
      workdir: runs/<name>; nothing in it is executed or unpickled.
      average: how many to average, the newest and the last ones at the interval before it, or "ema" for the moving
        average that the run has kept; None for what its config evaluates with at the end.
      steps: average the checkpoints of these steps instead, or take that of one.

    Raises:
      UserError: there is no run, no such checkpoint, or one that cannot be read.
    """
    place = Workdir(workdir)
    config, tokenizer, sizes = load_setup(place)
    classes = place.load_classes()
    if (told := len(classes) if classes else 0) != getattr(sizes, "num_classes", 0):
        raise UserError(
            f"{place.config_file} names {told:,} classes, and its model has {getattr(sizes, 'num_classes', 0):,}; put "
            "the original there"
        )
    choice = choose(place.checkpoints, config, average=average, steps=steps)
    model = make_model(sizes)
    like = jax.eval_shape(lambda: init_params(model.config, jax.random.key(0)))
    try:
        params = mean(
            load_params(place.checkpoints, step, like, seed=config.seed, kind=choice.kind) for step in choice.steps
        )
    except UnreadableError:
        for step in choice.steps:
            require_vocabulary(place.checkpoints, step, tokenizer.vocab_size)
        raise
    params = jax.device_put(params)  # once: arrays of the host would travel with every batch
    return Run(config, tokenizer, model, params, str(choice), place.load_fingerprints(), classes)
