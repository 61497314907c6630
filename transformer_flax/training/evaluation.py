"""Measures parameters on a split: loss and perplexity of the references, and scores of the model's own outputs.

A `Task` makes the outputs and scores them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import numpy as np

from transformer_flax.console import Progress
from transformer_flax.data.batches import Batches, BucketedBatches, round_up
from transformer_flax.data.corpus import Corpus
from transformer_flax.data.normalisation import normalisers
from transformer_flax.decoding.predictor import Predictor
from transformer_flax.decoding.scoring import score, score_labels
from transformer_flax.decoding.settings import Settings
from transformer_flax.decoding.translator import Translator
from transformer_flax.training.metrics import Meter
from transformer_flax.training.multihost import from_first, share
from transformer_flax.training.setup import PreparedRun
from transformer_flax.training.sharding import Parallel

GAIN_SENTENCES = 300  # the source gain is measured on this many first sentences of a split


class Task:
    """Makes outputs from texts, and scores them: translations or, of a run with classes, labels.

    A run has classes if, and only if, its kind of model classifies. `make_loss` returns the loss of either.
    """

    def __init__(self, run: PreparedRun, model: nn.Module):
        self._config, self._model, self._tokenizer, self._classes = run.config, model, run.tokenizer, run.classes
        # The name of the outputs and of their folder; the command that makes such; the validation score that decides
        # which checkpoint is best.
        labels, translations = ("labels", "classify", "accuracy"), ("translations", "translate", "bleu")
        self.outputs, self.command, self.score = labels if run.classes else translations
        self.compilations = 0  # the number of programs compiled for `make_outputs`

    def make_outputs(self, params: Any, sources: Sequence[str], progress: Callable[[int], Any]) -> list[str]:
        """Translates or classifies each text, with parameters on the device."""
        decoder = self.decoder(params)
        decode = decoder.predict if isinstance(decoder, Predictor) else decoder.translate
        outputs = decode(sources, progress=progress)
        self.compilations += decoder.compilations
        return outputs

    def decoder(self, params: Any) -> Translator | Predictor:
        """Returns the translator or classifier of texts, without normalisers: those of the data are applied already."""
        settings = Settings(**self._config.decode, num_devices=self._config.parallel.num_devices)
        given = [self._model], [params], self._tokenizer
        if self._classes:
            return Predictor(*given, self._classes.names, settings=settings)
        return Translator(*given, settings=settings)

    def measure(self, outputs: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
        """Returns scores of outputs against references, and the signatures of scores that have several definitions."""
        if self._classes:
            return {"macro_f1": score_labels(outputs, references, self._classes.names).macro_f1}, {}
        _, text = normalisers(self._config.data)
        found = score(outputs, references, text)
        return {"bleu": found.bleu, "exact_match": found.exact_match}, {"BLEU": found.signature}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores and outputs of a model's parameters on a split."""

    scalars: dict[str, float]  # loss, perplexity, accuracy, source_gain; task scores, such as bleu and exact_match
    signatures: dict[str, str]  # how a score was computed, for scores with several definitions
    sources: list[str] = dataclasses.field(repr=False)  # texts are long in a notebook
    references: list[str] = dataclasses.field(repr=False)
    outputs: list[str] = dataclasses.field(repr=False)  # translations, or labels


def shift_of(sources: Sequence[bytes]) -> int:
    """Returns the smallest shift of sentences at which the fewest meet an equal one; 0 for a single sentence.

    A set with several references for each source may have equal sources side by side.
    """

    def equal(shift: int) -> int:
        return sum(source == other for source, other in zip(sources, [*sources[-shift:], *sources], strict=False))

    return min(range(1, len(sources)), key=equal, default=0)


class Evaluator:
    """An evaluator of parameters on a split.

    The loss is measured on every pair of the split, up to its first config.decode.max_input_length tokens.

    The source gain shows whether a translator uses its source. It is the log-perplexity of the first 300 targets given
    another sentence's source, minus the log-perplexity given their own source, in nats per token. A language model of
    the target has a source gain of 0.
    """

    def __init__(
        self,
        name: str,
        run: PreparedRun,
        eval_step: Callable,
        parallel: Parallel,
        task: Task,
        progress: Progress,
    ):
        self._name, self._eval_step, self._parallel = name, eval_step, parallel
        self._pairs, self._task, self._progress = run.pairs[name], task, progress
        corpus, config = run.corpora[name], run.config
        limit, multiple = config.decode.max_input_length, config.data.length_multiple_of
        lengths = np.maximum(corpus.source.lengths, corpus.target.lengths)
        # A batch takes as much memory as a micro-batch of training; one of the longest pairs may take more.
        tokens_per_batch = config.data.tokens_per_batch // config.accumulation_steps
        rows_multiple_of = config.data.rows_multiple_of // config.accumulation_steps
        longest = round_up(min(limit, int(lengths.max())), multiple)

        def batches(corpus: Corpus, num_buckets: int) -> Batches:
            return BucketedBatches(
                corpus,
                np.arange(len(corpus)),
                max_length=limit,
                tokens_per_batch=max(tokens_per_batch, longest * rows_multiple_of),
                length_multiple_of=multiple,
                num_buckets=num_buckets,
                rows_multiple_of=rows_multiple_of,
                data_seed=0,
                seed=0,
                share=share(),
            )

        self._batches = batches(corpus, config.data.num_buckets)
        self._gain_batches = None
        if run.classes is None:  # a translator reads the target too (teacher forcing), so it may ignore the source
            first = np.arange(min(GAIN_SENTENCES, len(corpus)))
            others = np.roll(first, shift_of([corpus.source[i].tobytes() for i in range(len(first))]))
            target = corpus.target.take(first)
            # With one bucket, both orders have the same batch shape: that of the longest sentence.
            self._gain_batches = [batches(Corpus(corpus.source.take(order), target), 1) for order in (first, others)]
        too_long = int((lengths > limit).sum())
        if too_long:
            progress.say(f"{too_long:,} {name} pairs are measured up to their first {limit} tokens")

    def __call__(self, params: Any, *, check: Callable[..., None], max_sentences: int = 0) -> Evaluation:
        """Evaluates parameters, on the devices or on the host.

        `check` is called after every batch. `alone=True` means that, of several processes, only the first has the
        batch. An exception that `check` raises ends the evaluation. Only the first `max_sentences` (0: all) are
        translated or classified.
        """
        placed = self._parallel.place(params)  # once for all batches, because averages are on the host
        means = self._measure(placed, self._batches, "loss", check).means()
        if self._gain_batches:
            own, others = (self._measure(placed, batches, "source gain", check) for batches in self._gain_batches)
            means["source_gain"] = others.log_perplexity - own.log_perplexity
        examples = self._pairs.read(range(len(self._pairs))[: max_sentences or None])
        sources, references = ([example[side] for example in examples] for side in (0, 1))
        params = self._parallel.local(placed)
        with self._progress.bar(f"{self._name} {self._task.outputs}") as update:

            def progress(done: int) -> None:
                update(done, len(sources))
                check(alone=True)

            outputs = from_first(lambda: self._task.make_outputs(params, sources, progress), lambda: check(alone=True))
        scores, signatures = self._task.measure(outputs, references)
        return Evaluation({**means, **scores}, signatures, sources, references, outputs)

    def _measure(self, params: Any, batches: Batches, what: str, check: Callable[..., None]) -> Meter:
        """Returns the sums over all tokens of the batches, for parameters on the devices."""
        meter = Meter()
        with self._progress.bar(f"{self._name} {what}") as update:
            for k in range(batches.batches_per_epoch):
                sums, counts = self._eval_step(params, self._parallel.shard(batches[k]))
                meter.add(sums, counts)
                update(k + 1, batches.batches_per_epoch)
                check(alone=False)
        return meter
