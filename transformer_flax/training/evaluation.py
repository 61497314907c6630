"""How good parameters are on a split: loss and perplexity of the references, and scores of what is really put out."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from transformer_flax.data.batches import BucketedBatches
from transformer_flax.data.corpus import Corpus
from transformer_flax.data.pairs import Pairs
from transformer_flax.training.distributed import from_first, share
from transformer_flax.training.metrics import Meter
from transformer_flax.training.parallel import Parallel
from transformer_flax.training.progress import Progress
from transformer_flax.training.tasks import Task


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Of some parameters on a split."""

    scalars: dict[str, float]  # loss, perplexity, accuracy, and the scores of the task, such as bleu and exact_match
    signatures: dict[str, str]  # of scores that can be made in several ways
    sources: list[str]
    references: list[str]
    outputs: list[str]  # translations, or labels


class Evaluator:
    """Measures parameters on a split, of which every sentence counts.

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
        limit = config.decode.max_input_length
        self._batches = BucketedBatches(
            corpus,
            np.arange(len(corpus)),
            max_length=limit,
            tokens_per_batch=max(config.data.tokens_per_batch, limit * config.data.rows_multiple_of),
            num_buckets=config.data.num_buckets,
            rows_multiple_of=config.data.rows_multiple_of,
            data_seed=0,
            seed=0,
            share=share(),
        )
        too_long = int((np.maximum(corpus.source.lengths, corpus.target.lengths) > limit).sum())
        if too_long:
            progress.say(f"{too_long:,} {name} pairs are measured up to their first {limit} tokens")
        self._pairs = pairs

    def __call__(self, params: Any, *, max_sentences: int = 0, check: Callable[[], None] = lambda: None) -> Evaluation:
        """Evaluates parameters.

        Args:
          params: as `Parallel.unreplicate` gives them, or on the host.
          max_sentences: for how many of the first sentences something is put out; 0: all.
          check: called after every batch; what it raises ends the evaluation.
        """
        meter = Meter()
        placed = self._parallel.place(params)  # once for all batches, as averages come from the host
        with self._progress.bar(f"{self._name} loss") as update:
            for k in range(self._batches.batches_per_epoch):
                sums, counts = self._eval_step(placed, self._parallel.shard(self._batches[k]))
                meter.add(*self._parallel.unreplicate((sums, counts)))
                update(k + 1, self._batches.batches_per_epoch)
                check()
        examples = [self._pairs[i] for i in range(min(max_sentences or len(self._pairs), len(self._pairs)))]
        sources, references = ([example[side] for example in examples] for side in (0, 1))
        params = self._parallel.local(placed)
        with self._progress.bar(f"{self._name} {self._task.outputs}") as update:

            def progress(done: int) -> None:
                update(done, len(sources))
                check()

            outputs = from_first(lambda: self._task.write(params, sources, progress))
        scores = self._task.measure(outputs, references)
        return Evaluation({**meter.means(), **scores.scalars}, scores.signatures, sources, references, outputs)
