"""Measures parameters on a split: loss and perplexity of the references, and scores of the model's own outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from transformer_flax.console import Progress
from transformer_flax.data.batches import Batches, BucketedBatches, round_up
from transformer_flax.data.corpus import Corpus
from transformer_flax.data.sources import Pairs
from transformer_flax.training.metrics import Meter
from transformer_flax.training.multihost import from_first, share
from transformer_flax.training.sharding import Parallel
from transformer_flax.training.tasks import Task

GAIN_SENTENCES = 300  # that the source gain is measured on: the first of a split


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores and outputs of some parameters on a split."""

    scalars: dict[str, float]  # loss, perplexity, accuracy, source_gain; and the task's, such as bleu and exact_match
    signatures: dict[str, str]  # of scores that can be made in several ways
    sources: list[str]
    references: list[str]
    outputs: list[str]  # translations, or labels


class Evaluator:
    """Measures parameters on a split, of which every sentence counts.

    The source gain says whether a translator uses its source: log-perplexity of the first 300 targets given another
    sentence's source, less that given their own, in nats a token. A language model of the target has a gain of 0.

    Args:
      name: of the split.
      pairs, corpus: the split.
      config: of the run.
      eval_step: compiled, `(params, batch) -> (sums, counts)`.
      parallel: places batches for it.
      task: of the run.
      progress: for bars, and for what was cut.
    """

    def __init__(
        self,
        name: str,
        pairs: Pairs,
        corpus: Corpus,
        config: ConfigDict,
        *,
        eval_step: Callable,
        parallel: Parallel,
        task: Task,
        progress: Progress,
    ):
        self._name, self._eval_step, self._parallel = name, eval_step, parallel
        self._task, self._progress = task, progress
        limit, multiple = config.decode.max_input_length, config.data.length_multiple_of

        def batches(corpus: Corpus, num_buckets: int) -> Batches:
            return BucketedBatches(
                corpus,
                np.arange(len(corpus)),
                max_length=limit,
                tokens_per_batch=max(
                    config.data.tokens_per_batch, round_up(limit, multiple) * config.data.rows_multiple_of
                ),
                length_multiple_of=multiple,
                num_buckets=num_buckets,
                rows_multiple_of=config.data.rows_multiple_of,
                data_seed=0,
                seed=0,
                share=share(),
            )

        self._batches = batches(corpus, config.data.num_buckets)
        self._gain_batches = None
        if task.reads_target:
            first = np.arange(min(GAIN_SENTENCES, len(corpus)))
            target = corpus.target.take(first)
            # In one bucket both have the same shape, that of the longest of all.
            self._gain_batches = [
                batches(Corpus(corpus.source.take(order), target), 1) for order in (first, np.roll(first, 1))
            ]
        too_long = int((np.maximum(corpus.source.lengths, corpus.target.lengths) > limit).sum())
        if too_long:
            progress.say(f"{too_long:,} {name} pairs are measured up to their first {limit} tokens")
        self._pairs = pairs

    def __call__(self, params: Any, *, check: Callable[..., None], max_sentences: int = 0) -> Evaluation:
        """Evaluates parameters.

        Args:
          params: as `Parallel.unreplicate` gives them, or on the host.
          check: called after every batch, with `alone=True` where of several processes only the first has the batch;
            what it raises ends the evaluation.
          max_sentences: number of first sentences to translate or classify; 0: all.
        """
        placed = self._parallel.place(params)  # once for all batches, as averages come from the host
        means = self._measure(placed, self._batches, "loss", check).means()
        if self._gain_batches:
            own, others = (self._measure(placed, batches, "source gain", check) for batches in self._gain_batches)
            means["source_gain"] = others.log_perplexity - own.log_perplexity
        examples = self._pairs.read(range(min(max_sentences or len(self._pairs), len(self._pairs))))
        sources, references = ([example[side] for example in examples] for side in (0, 1))
        params = self._parallel.local(placed)
        with self._progress.bar(f"{self._name} {self._task.outputs}") as update:

            def progress(done: int) -> None:
                update(done, len(sources))
                check(alone=True)

            outputs = from_first(lambda: self._task.write(params, sources, progress), lambda: check(alone=True))
        scores, signatures = self._task.measure(outputs, references)
        return Evaluation({**means, **scores}, signatures, sources, references, outputs)

    def _measure(self, params: Any, batches: Batches, what: str, check: Callable[..., None]) -> Meter:
        """The sums over all tokens of some batches, for parameters on the devices."""
        meter = Meter()
        with self._progress.bar(f"{self._name} {what}") as update:
            for k in range(batches.batches_per_epoch):
                sums, counts = self._eval_step(params, self._parallel.shard(batches[k]))
                meter.add(*self._parallel.unreplicate((sums, counts)))
                update(k + 1, batches.batches_per_epoch)
                check(alone=False)
        return meter
