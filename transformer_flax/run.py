"""A trained run as one object, for notebooks and scripts."""

import dataclasses
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
from ml_collections import ConfigDict

from transformer_flax.analysis.attention import Attention, attend
from transformer_flax.data.pairs import MADE, load_pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.bleu import FullScores, full_scores
from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError
from transformer_flax.model.kinds import Config, find_kind, init_params, make_model
from transformer_flax.special_tokens import END_ID
from transformer_flax.training.averaging import choose, load_params, mean, require_vocabulary
from transformer_flax.training.loss import perplexity
from transformer_flax.training.prepare import model_config
from transformer_flax.training.workdir import Workdir

TYPES: dict[Any, str] = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Report(FullScores):
    """How good a run is on a text."""

    perplexity: float  # of the references, per word-piece, unsmoothed
    sentences_per_second: float  # translated, compilation included
    compilations: int
    parameters: str  # which checkpoints were used
    decode: dict[str, Any]  # settings of the search
    translations: list[str]


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
    partners: tuple["Run", ...] = ()  # whose probabilities are averaged with this one's
    _translators: dict = dataclasses.field(default_factory=dict, init=False)  # so `dataclasses.replace` gives others

    def __repr__(self) -> str:
        return f"<Run {self.config.name}: {self.parameters}>"

    def translate(self, lines: Iterable[str], **settings) -> list[str]:
        """The best translation of each line, in order; settings are those of `translator`."""
        if isinstance(lines, str):
            raise UserError(f"translate takes a list of lines, not a string: [{lines[:40]!r}]")
        return self.translator(**settings).translate(lines)

    def score(self, sources: Sequence[str], targets: Sequence[str], **settings) -> list[list[float]]:
        """log P of each token of given targets, the end symbol included."""
        return self.translator(**settings).score(sources, targets)

    def translator(self, **settings) -> Translator:
        """The run's translator, with `config.decode` as it is but for the settings given.

        The same settings give the same object, with the programs that it has compiled.

        Args:
          settings: arguments of `Translator`, such as beam_size=8, nbest=8 or sampling=Sampling(temperature=0.7).
        """
        settings = {**self.config.decode, **settings}
        key = tuple(sorted(settings.items()))
        if key not in self._translators:
            members = (self, *self.partners)
            self._translators[key] = Translator(
                [run.model for run in members],
                [run.params for run in members],
                self.tokenizer,
                **settings,
            )
        return self._translators[key]

    def evaluate(
        self,
        sources: Sequence[str],
        references: Sequence[str],
        *,
        progress: Callable[[int], Any] = lambda done: None,
        **settings,
    ) -> Report:
        """Translates a text and compares it with its reference; `split` gives those of the run's own data."""
        if len(sources) != len(references):
            raise UserError(
                f"there are {len(sources):,} sources and {len(references):,} references: each needs the other"
            )
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

    def attentions(
        self, sources: Sequence[str], targets: Sequence[str] | None = None, **settings
    ) -> Iterator[Attention]:
        """`attention` of each of several lines, in order.

        Raises:
          UserError: a line is too long, not every line has a target, or the run is an ensemble.
        """
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
          UserError: another has not the same tokenizer.
        """
        for other in others:
            if other.tokenizer.to_json() != self.tokenizer.to_json():
                raise UserError(
                    f"{self.config.name} (vocabulary {self.tokenizer.vocab_size:,}) and {other.config.name} "
                    f"(vocabulary {other.tokenizer.vocab_size:,}) have different tokenizers, so they cannot be an "
                    "ensemble; train them on the same data with the same config.data"
                )
        partners = (*self.partners, *(member for other in others for member in (other, *other.partners)))
        parameters = "; ".join([self.parameters, *(other.parameters for other in others)])
        return dataclasses.replace(self, partners=partners, parameters=parameters)


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
    config, tokenizer, sizes = load_described(place)
    choice = choose(place.checkpoints, config, average=average, steps=steps)
    for step in choice.steps:
        require_vocabulary(place.checkpoints, step, tokenizer.vocab_size)
    model = make_model(sizes)
    like = jax.eval_shape(lambda: init_params(model.config, jax.random.key(0)))
    params = mean(load_params(place.checkpoints, step, like, kind=choice.kind) for step in choice.steps)
    params = jax.device_put(params)  # once: arrays of the host would travel with every batch
    return Run(config, tokenizer, model, params, str(choice), place.load_fingerprints())


def load_described(place: Workdir) -> tuple[ConfigDict, Tokenizer, Config]:
    """What a run is, checked: its config, its tokenizer and its model, without parameters.

    Raises:
      UserError: there is no run, or one that cannot be read.
    """
    config, tokenizer = place.load_config(), place.load_tokenizer()
    _require_fields(config, place)
    return config, tokenizer, model_config(config, tokenizer.vocab_size)


def _require_fields(config: ConfigDict, place: Workdir) -> None:
    """Refuses the config of another version or of another type, rather than to guess what it would have said."""
    arguments = inspect.signature(Translator).parameters.values()
    needed: dict[str, dict[str, Any]] = {
        "": {"name": str, "ema_decay": float},
        "eval": {"final_average": int},
        "checkpoint": {"every": int},
        "data": dict.fromkeys(("source", "name", "path", "source_language", "target_language", "cache_dir"), str),
        "decode": {a.name: a.annotation for a in arguments if a.kind is a.KEYWORD_ONLY and a.default is a.empty},
        "model": {"kind": str},
    }
    data = config.get("data", {})
    if isinstance(data, (ConfigDict, dict)) and data.get("source") in [*MADE]:  # a list can be asked for anything
        needed["data"] |= dict.fromkeys(("seed", "num_pairs", "longest_trained", "longest_tested"), int)
    model = config.get("model", {})
    kind = model.get("kind", "") if isinstance(model, (ConfigDict, dict)) else ""
    if isinstance(kind, str) and kind:
        try:
            fields = dataclasses.fields(find_kind(kind).config)
        except UserError as error:
            raise UserError(f"{place.config_file}: {error}") from error
        needed["model"] |= {field.name: field.type for field in fields}
        del needed["model"]["vocab_size"]  # which the tokenizer knows
    for section, fields in needed.items():
        there: Any = config.get(section, {}) if section else config
        where = ".".join(filter(None, ("config", section)))
        if not isinstance(there, (ConfigDict, dict)):
            raise UserError(f"{place.config_file}: {where} is {there!r}; it must be an object of fields")
        for field, wanted in fields.items():
            if field not in there:
                raise UserError(
                    f"{place.config_file} lacks {where}.{field}, as a run of another version of this package; add it "
                    "there (configs/base.py says what it means)"
                )
            value = there[field]
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise UserError(f"{place.config_file}: {where}.{field} is {value!r}; it must be {TYPES[wanted]}")
        if section in ("decode", "model") and (unknown := sorted(there.keys() - fields.keys())):
            raise UserError(
                f"{place.config_file} has {where}.{unknown[0]}, which this version of the package does not know, and "
                "what it does to the model neither; use the version that made the run"
            )
    for name in ("eval.final_average", "checkpoint.every"):
        section, field = name.split(".")
        if config[section][field] < 1:
            raise UserError(f"{place.config_file}: config.{name} is {config[section][field]}; it must be at least 1")
