"""A trained run as one object, for notebooks, scripts and servers."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from transformer_flax.analysis.attention import Attention, attend, count_heads
from transformer_flax.data.classes import Classes
from transformer_flax.data.normalisation import NORMALISATION, Normaliser, normalisers
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.text_files import require_as_many
from transformer_flax.decoding import ctranslate2
from transformer_flax.decoding.inference import on_devices
from transformer_flax.decoding.predictor import Predictor
from transformer_flax.decoding.scoring import ClassScores, FullScores, full_scores, score_labels
from transformer_flax.decoding.settings import READING, SETTINGS, Settings
from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError, did_you_mean
from transformer_flax.files import require_free, whole_folder, write_whole
from transformer_flax.special_tokens import END_ID
from transformer_flax.training.loss import perplexity
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.trained_model import TrainedModel, load_model, parse_name, save_params

ALIKE = ("source_language", "target_language", *NORMALISATION)  # of the members of an ensemble
MOST_MADE = 64  # translators that a run keeps


@dataclasses.dataclass(frozen=True)
class Report(FullScores):
    """The scores of a run's translations of a text."""

    perplexity: float  # of the references, per piece, unsmoothed
    sentences_per_second: float  # translated, compilation included
    compilations: int
    params_from: str  # which checkpoints were used
    decode: dict[str, Any]  # settings of the search
    translations: list[str] = dataclasses.field(repr=False)  # long in a notebook


@dataclasses.dataclass(frozen=True, eq=False)
class ClassReport(ClassScores):
    """The scores of a run's labels of a text."""

    perplexity: float  # of the correct classes
    lines_per_second: float  # classified, compilation included
    compilations: int
    params_from: str  # which checkpoints were used
    labels: list[str] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Run(TrainedModel):
    """A trained model with its config and tokenizer; `restore` loads it from a working directory.

    `dataclasses.replace(run, params=..., params_from="tuned by hand")` returns the run with other parameters.
    """

    partners: tuple["Run", ...] = ()  # other members of an ensemble
    # What is made once and kept; not shared with `dataclasses.replace`.
    _made: dict[tuple, Translator | Predictor] = dataclasses.field(default_factory=dict, init=False)  # by settings
    _placed: dict[int, list[Any]] = dataclasses.field(default_factory=dict, init=False)  # params by number of devices

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.params_from}>"

    @property
    def name(self) -> str:
        """The run's `config.name`; of an ensemble, the names of all members: "base + base"."""
        return " + ".join(member.config.name for member in (self, *self.partners))

    @property
    def normalise(self) -> tuple[Normaliser, Normaliser]:
        """The normalisers of sources and targets. All methods apply them to the given text."""
        return normalisers(self.config.data)

    def translate(self, lines: Iterable[str], *, prefixes: Iterable[str] | str = "", **settings) -> list[str]:
        """Returns the best translation of each line, in order; settings are those of `translator`.

        Each begins with its prefix; a string is the prefix of all. An empty line gives an empty line nevertheless.

        Raises:
          UserError: as `translator`; or `nbest` asks for more than the best.
        """
        if settings.get("nbest", 1) != 1:
            raise UserError("translate returns the best translation of each line; for more, translator(nbest=N).search")
        return self.translator(**settings).translate(_texts("translate", lines), prefixes=prefixes)

    def classify(self, lines: Iterable[str], **settings) -> list[str]:
        """Returns the likeliest class of each line, in order; settings are those of `predictor`."""
        return self.predictor(**settings).predict(_texts("classify", lines))

    def probabilities(self, lines: Iterable[str], **settings) -> np.ndarray:
        """Returns the probability of each class, in the order of `run.classes.names`: float32 [lines, C]."""
        predictor = self.predictor(**settings)
        found = list(predictor.log_probabilities(_texts("probabilities", lines)))
        return np.exp(np.array(found, np.float32).reshape(-1, len(predictor.classes)))

    def score(self, sources: Sequence[str], targets: Sequence[str], **settings) -> list[list[float]]:
        """Returns log P of each token of given targets, the end symbol included."""
        return self.translator(**settings).score(_texts("score", sources), _texts("score", targets))

    def translator(self, **settings) -> Translator:
        """Returns the run's translator. The same settings give the same object, with its compiled programs.

        Args:
          settings: those of `decoding.settings.Settings`; they override `config.decode`. Examples:
            beam_size=8, nbest=8, sampling=Sampling(temperature=0.7).

        Raises:
          UserError: the run classifies, or a setting is unknown.
        """
        self._require_translator()
        return self._make(Translator, self.tokenizer, self.normalise, settings=self._settings(SETTINGS, settings))

    def predictor(self, **settings) -> Predictor:
        """Returns the run's classifier. The same settings give the same object, with its compiled programs.

        Args:
          settings: those of `decoding.settings.READING`; they override `config.decode`. As in batch_size=256.

        Raises:
          UserError: the run translates, or a setting is unknown.
        """
        if self.classes is None:
            raise UserError(f"{self.config.name} translates and has no classes: use translate instead of classify")
        settings = self._settings(READING, settings)
        return self._make(Predictor, self.tokenizer, self.classes.names, self.normalise[0], settings=settings)

    def _make(self, what: type, *arguments, settings: Settings) -> Any:
        """Returns a Translator or Predictor of the run and its partners. The same settings give the same object."""
        made = self._made.get((what, settings))
        if made is None:
            members, num_devices = (self, *self.partners), settings.num_devices
            if num_devices not in self._placed:
                placed = on_devices([run.params for run in members], num_devices)
                self._placed.setdefault(num_devices, placed)  # of several threads, one wins
            made = what([run.model for run in members], self._placed[num_devices], *arguments, settings=settings)
            made = self._made.setdefault((what, settings), made)
            for old in [*self._made][:-MOST_MADE]:
                self._made.pop(old, None)  # a server may sample with a new seed for each request
        return made

    def _settings(self, known: Sequence[str], given: dict[str, Any]) -> Settings:
        """Returns checked settings, with those of `config.decode` as defaults; `known` may be given."""
        for name in given.keys() - {*known}:
            typo = "" if name in self.config.decode else did_you_mean(name, known)
            hint = typo or f"its settings are {', '.join(known)}"
            raise UserError(f"{name!r} is not a setting of {self.config.name}; {hint}")
        settings = Settings(**{**self.config.decode, **given})
        bounds = [name for name in ("max_input_length", "max_extra_length") if name in known]
        longest = sum(getattr(settings, name) for name in bounds)
        for run in (self, *self.partners):
            if (most := run.model.config.most_positions) < longest:
                raise UserError(
                    f"{' + '.join(bounds)} is {longest}; {run.name} has learned only {most} positions: lower it"
                )
        return settings

    def _require_translator(self) -> None:
        if self.classes is not None:
            raise UserError(f"{self.config.name} classifies ({self.classes}) and does not translate: use classify")

    def evaluate(
        self,
        sources: Sequence[str],
        references: Sequence[str],
        *,
        progress: Callable[[int], Any] = lambda done: None,
        **settings,
    ) -> Report | ClassReport:
        """Translates or classifies a text and scores the result; `split` returns sources and references.

        Raises:
          UserError: there are no lines, or not as many references as sources; or a reference is no class of the run.
        """
        sources, references = _texts("evaluate", sources), _texts("evaluate", references)
        require_as_many("the source text", sources, "the reference text", references)
        if not sources:
            raise UserError("there are no lines to evaluate; give at least one")
        evaluate = self._evaluate_translations if self.classes is None else self._evaluate_labels
        return evaluate(sources, references, progress, settings)

    def _evaluate_translations(self, sources, references, progress, settings) -> Report:
        translator = self.translator(**settings)
        compiled, started = translator.compilations, time.perf_counter()
        translations = translator.translate(sources, progress=progress)
        seconds, compilations = time.perf_counter() - started, translator.compilations - compiled
        _, text = self.normalise
        scores = full_scores(translations, [*map(text, references)], text)
        log_probs = [log_prob for line in translator.score(sources, references) for log_prob in line]
        return Report(
            **vars(scores),
            perplexity=perplexity(-sum(log_probs), len(log_probs)),
            sentences_per_second=len(translations) / seconds,
            compilations=compilations,
            params_from=self.params_from,
            decode={**self.config.decode, **settings},
            translations=translations,
        )

    def _evaluate_labels(self, sources, references, progress, settings) -> ClassReport:
        predictor = self.predictor(**settings)
        references = [*map(self.normalise[1], references)]
        Classes(predictor.classes).encode_flat(references)  # refuses an unknown class before the work
        compiled, started = predictor.compilations, time.perf_counter()
        found = list(predictor.log_probabilities(sources, progress=progress))
        seconds, compilations = time.perf_counter() - started, predictor.compilations - compiled
        labels = [predictor.classes[np.argmax(log_probs)] for log_probs in found]
        scores = score_labels(labels, references, predictor.classes)
        right = [log_probs[predictor.classes.index(name)] for log_probs, name in zip(found, references, strict=True)]
        return ClassReport(
            **vars(scores),
            perplexity=perplexity(-np.sum(right, dtype=np.float64), len(right)),
            lines_per_second=len(labels) / seconds,
            compilations=compilations,
            params_from=self.params_from,
            labels=labels,
        )

    def split(self, name: str) -> tuple[list[str], list[str]]:
        """Returns the sources and references of a split of the run's data, not normalised.

        Raises:
          UserError: there is no such split, or its text has changed since training.
        """
        pairs = load_pairs(self.config.data, name)
        known = name if name in self.fingerprints else "valid"  # a run with eval.test=False has not read its test split
        found = pairs if known == name else load_pairs(self.config.data, known)
        if self.fingerprints.get(known, found.fingerprint) != found.fingerprint:
            raise UserError(f"the {known} split of {self.config.name} has changed since the run was made")
        if pairs.raw is not None:
            pairs = pairs.raw
        examples = pairs.read(range(len(pairs)))
        return [source for source, _ in examples], [target for _, target in examples]

    def attention(self, source: str, target: str | None = None, **settings) -> Attention:
        """Returns the attention weights of a sentence and its translation, teacher-forced.

        Args:
          source: a sentence.
          target: a translation of the sentence. None: the model's own translation.
          settings: as for `translator`.

        Raises:
          UserError: as `attentions` does.
        """
        if not isinstance(source, str):
            raise UserError(f"attention takes one line, not {source!r}; attentions takes several")
        [attention] = self.attentions([source], None if target is None else [target], **settings)
        return attention

    def count_heads(self) -> dict[str, tuple[int, int]]:
        """Returns (layers, heads) of each kind of attention: "encoder", "decoder" and "cross".

        Raises:
          UserError: the run classifies, or the model has no attention.
        """
        self._require_translator()
        return count_heads(self.model)

    def attentions(
        self, sources: Sequence[str], targets: Sequence[str] | None = None, **settings
    ) -> Iterator[Attention]:
        """Yields the attention weights of each line, in order; see `attention`. No line is cut.

        Raises:
          UserError: a line is too long, there are not as many targets as sources, a setting is unknown, the model has
            no attention, or the run classifies or is an ensemble.
        """
        self.count_heads()
        if self.partners:
            raise UserError("an ensemble has no attention of its own: use one of its members")
        sources = _texts("attentions", sources)
        translator = self.translator(**settings | {"refuse_long": True})
        read, write = self.normalise
        inputs, _ = translator.encode([*map(read, sources)], translator.settings.max_input_length)
        if targets is None:
            outputs = [[*best.tokens] or [END_ID] for best, *_ in translator.search(sources)]  # an empty line has none
        else:
            targets = _texts("attentions", targets)
            require_as_many("the source text", sources, "the target text", targets)
            outputs, _ = translator.encode([*map(write, targets)], translator.longest_output, what="target line")
        pairs = list(zip(inputs, outputs, strict=True))
        return attend(self.model, self.params, self.tokenizer, pairs)

    def export(self, output: str | os.PathLike[str], format: str = "safetensors") -> None:
        """Writes the model into a new folder, without its checkpoints and metrics.

        Args:
          output: the folder, which must not exist yet.
          format: "safetensors", for `restore` and programs that read such files; or "ctranslate2".

        Raises:
          UserError: the folder exists, the run is an ensemble, or CTranslate2 cannot run such a model.
        """
        if self.partners:
            raise UserError("an ensemble cannot be exported: export its members")
        if format not in ("safetensors", "ctranslate2"):
            raise UserError(f"format is {format!r}; it must be safetensors or ctranslate2")
        output = pathlib.Path(output)
        require_free(output)
        with whole_folder(output) as folder:
            place = RunDirectory(folder)
            if format == "ctranslate2":
                ctranslate2.save(self.model.config, jax.device_get(self.params), self.tokenizer.vocabulary(), folder)
                write_whole(place.tokenizer_file, self.tokenizer.to_json())
            else:
                place.claim(self.config, self.fingerprints, self.tokenizer, self.classes)
                save_params(place.params_file, self.params, self.params_from)

    def ensemble(self, *others: "Run") -> "Run":
        """Returns this run and others as one model. Its token or class probabilities are the mean over the runs.

        This run's `config.decode` applies.

        Raises:
          UserError: one is not a run, or they have different tokenizers, classes, languages or normalisation of the
            text.
        """
        for number, other in enumerate(others, 2 + len(self.partners)):
            if not isinstance(other, Run):
                raise UserError(f"{other!r} is not a Run; an ensemble is restore(...).ensemble(restore(...), ...)")
            for what, ours, theirs in (
                ("classes", self.classes and self.classes.names, other.classes and other.classes.names),
                ("tokenizers", self.tokenizer.comparable(), other.tokenizer.comparable()),
                *((f"config.data.{name}", self.config.data[name], other.config.data[name]) for name in ALIKE),
            ):
                if ours != theirs:
                    raise UserError(
                        f"run 1, {self.config.name}, and run {number}, {other.config.name}, have different {what}, so "
                        "they cannot be an ensemble; train them on the same data with the same config.data"
                    )
        partners = (*self.partners, *(member for other in others for member in (other, *other.partners)))
        params_from = "; ".join([self.params_from, *(other.params_from for other in others)])
        return dataclasses.replace(self, partners=partners, params_from=params_from)


def _texts(method: str, lines: Iterable[str]) -> list[str]:
    """Returns the lines as a list, and checks that they are strings.

    Raises:
      UserError: `lines` is not a list of strings.
    """
    if isinstance(lines, str):
        raise UserError(f"{method} takes a list of lines, not a string: [{lines[:40]!r}]")
    lines = list(lines)
    for number, line in enumerate(lines, 1):
        if not isinstance(line, str):
            raise UserError(
                f"{method} takes a list of strings; line {number:,} is {line!r} of type {type(line).__name__}"
            )
    return lines


def restore(
    workdir: str | os.PathLike[str], *, average: int | str | None = None, steps: int | Sequence[int] | None = None
) -> Run:
    """Restores a run, finished or still training, or an exported model. Nothing in the folder is executed or unpickled.

    On a CPU, the model computes in float32, whatever type it was trained in.

    Args:
      workdir: runs/<name>, or a folder that `Run.export` wrote. "runs/<name>@STEP,..." also names `steps`.
      average: the number of checkpoints to average: the newest checkpoint, and the last ones before it at the
        checkpoint interval. "ema": the run's moving average. None: what the run's final evaluation uses.
      steps: the step or steps of the checkpoints to use instead; several checkpoints are averaged. If the run keeps a
        moving average, its moving averages are used, unless `average` is 1.

    Raises:
      UserError: the run or a checkpoint does not exist or cannot be read.
    """
    directory, steps = parse_name(os.fspath(workdir)) if steps is None else (workdir, steps)
    saved = load_model(directory, average=average, steps=steps)
    params = jax.device_put(saved.params)  # once: arrays on the host would be copied with every batch
    return Run(**vars(saved) | {"params": params})
