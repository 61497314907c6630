"""Translates text, with models, a tokenizer and a search."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.data.normalisation import PLAIN, Normaliser
from transformer_flax.data.text_files import one_line, require_as_many
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.inference import NARROWEST, Inference, LogProbs, fill, warn_of_cut
from transformer_flax.decoding.search import (
    Bounds,
    Hypotheses,
    LengthPenalty,
    Step,
    beam_search,
    ensemble,
    greedy_search,
    sample,
)
from transformer_flax.decoding.settings import Sampling, Settings
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import PAD_ID


def _ignore(done: int) -> None:
    """A progress callback that does nothing."""


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis for a line. An empty line has a single one, of no tokens and with log P 0."""

    text: str  # always a single line
    score: float  # log_prob / length penalty; hypotheses are ranked by it
    log_prob: float  # natural log P(Y|X), the end symbol included
    tokens: tuple[int, ...]  # the end symbol included


class Translator(Inference):
    """A translator and scorer of text: a trained model, or an ensemble of models that share a tokenizer.

    The result for a line does not depend on the other lines, their order or the batch size. Samples also depend on the
    line number.

    Args:
      models: Linen modules with the methods of a translation model (see `model.registry`).
      normalise: the normaliser of sources, and the normaliser of prefixes and given targets.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        params: Sequence[Any],
        tokenizer: Tokenizer,
        normalise: tuple[Normaliser, Normaliser] = (PLAIN, PLAIN),
        *,
        settings: Settings,
    ):
        super().__init__(params, tokenizer, settings)
        self.normalise = normalise
        self.longest_output = settings.max_input_length + settings.max_extra_length
        sampling = settings.sampling
        search = _Search(
            tuple(models),
            LengthPenalty(settings.length_penalty, settings.alpha),
            beam_size=settings.beam_size,
            nbest=settings.nbest,
            min_length=settings.min_length,
            max_extra_length=settings.max_extra_length,
            sampling=sampling and dataclasses.replace(sampling, seed=0),  # samples of all seeds share their programs
        )
        self._search = self._compile(search)
        self._score = self._compile(_Score(tuple(models)))

    def translate(
        self, lines: Iterable[str], *, prefixes: Iterable[str] | str = "", progress: Callable[[int], Any] = _ignore
    ) -> list[str]:
        """Returns the best translation of each line. An empty line gives an empty line. Arguments: see `search`."""
        return [best.text for best, *_ in self.search(lines, prefixes=prefixes, progress=progress)]

    def search(
        self, lines: Iterable[str], *, prefixes: Iterable[str] | str = "", progress: Callable[[int], Any] = _ignore
    ) -> Iterator[list[Translation]]:
        """Yields at most `nbest` translations of each line, best first. An empty line has one, which is empty.

        Args:
          lines: the sentences, read window by window.
          prefixes: the text that each output must begin with: one for all lines, or one for each line. Blanks at its
            end are removed, as a blank is a part of the word behind it. Empty lines ignore it.
          progress: called with the number of lines done.

        Raises:
          UserError: an input is too long and `refuse_long` is set, a prefix is too long for its output, or the numbers
            of prefixes and lines differ.
        """
        starts = itertools.repeat(prefixes) if isinstance(prefixes, str) else iter(prefixes)
        source, target = self.normalise
        read = 0
        for before, sources in self._windows(lines, lambda line: source(line) if line.strip() else ""):
            read = before + len(sources)
            begins = [target(prefix).rstrip(" ") for prefix in itertools.islice(starts, len(sources))]
            if len(begins) < len(sources):
                raise UserError(f"there are only {before + len(begins):,} prefixes: each line needs one")
            yield from self._search_window(sources, self.tokenizer.encode(begins), before, progress)
        if not isinstance(starts, itertools.repeat) and next(starts, None) is not None:
            raise UserError(f"there are more prefixes than the {read:,} lines: each line needs one")

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, progress: Callable[[int], Any] = _ignore
    ) -> list[list[float]]:
        """Returns log P of each token of each given target: what `log_probabilities` yields, as a list."""
        return list(self.log_probabilities(sources, targets, progress=progress))

    def log_probabilities(
        self, sources: Sequence[str], targets: Sequence[str], *, progress: Callable[[int], Any] = _ignore
    ) -> Iterator[list[float]]:
        """Yields log P of each token of each given target, the end symbol included, in one teacher-forced pass.

        Each target is a translation of its source. A target longer than the longest output is cut or refused, like an
        input. A cut target has no end symbol. `progress` is called with the number of lines done.

        Raises:
          UserError: the numbers of targets and sources differ, or a line is too long and `refuse_long` is set.
        """
        require_as_many("the source text", sources, "the target text", targets)
        (source, target), cut = self.normalise, 0
        for before, inputs in self._windows(sources, source):
            lines = [*map(target, targets[before : before + len(inputs)])]
            outputs, shortened = self.encode(lines, self.longest_output, lines_before=before, what="target line")
            for i in shortened:
                outputs[i].pop()
            cut += len(shortened)
            yield from self._score_window(list(zip(inputs, outputs, strict=True)), before, progress)
        warn_of_cut(cut, len(targets), self.longest_output - 1, what="target line")

    def _score_window(self, pairs, lines_before: int, progress) -> list[list[float]]:
        scores: list[list[float]] = [[] for _ in pairs]
        lengths = [max(map(len, pair)) for pair in pairs]
        # The logits [rows, width, V] need much memory, so wide batches have fewer rows than in `search`.
        batches = self._batches(lengths, progress, before=lines_before, longest=self.longest_output, roomy=NARROWEST)
        for chosen, rows, width in batches:
            source, target = (fill([pairs[i][side] for i in chosen], rows, width) for side in (0, 1))
            for i, log_probs in zip(chosen, np.asarray(self._score(self.params, source, target)), strict=False):
                scores[i] = log_probs[: len(pairs[i][1])].tolist()
        return scores

    def _search_window(self, sources, prefixes, lines_before: int, progress) -> list[list[Translation]]:
        for i, prefix in enumerate(prefixes):
            if len(prefix) >= self.longest_output:
                raise UserError(
                    f"the prefix of line {lines_before + i + 1:,} has {len(prefix):,} tokens; outputs have at most "
                    f"{self.longest_output:,}, the end symbol included"
                )
        found = [[Translation("", 0.0, 0.0, ())] for _ in sources]
        extra, sampling = self.settings.max_extra_length, self.settings.sampling
        # The width must hold the prefix too. Width 0 skips empty lines, which hold only the end symbol.
        widths = [
            max(len(source), len(prefix) + 1 - extra) if len(source) > 1 else 0
            for source, prefix in zip(sources, prefixes, strict=True)
        ]
        progress(lines_before + widths.count(0))
        for chosen, rows, width in self._batches(widths, progress, before=lines_before):
            source = fill([sources[i] for i in chosen], rows, width)
            prefix = fill([prefixes[i] for i in chosen], rows, width + extra)
            numbers = np.full((rows, 2), sampling.seed if sampling else 0, np.uint32)
            numbers[: len(chosen), 1] = [lines_before + i for i in chosen]
            hypotheses = jax.device_get(self._search(self.params, source, prefix, numbers))
            for row, i in enumerate(chosen):
                found[i] = self._decode(jax.tree.map(lambda leaf, row=row: leaf[row], hypotheses))
        return found

    def _decode(self, hypotheses: Hypotheses) -> list[Translation]:
        """Returns the hypotheses of one sentence as text, without unused places."""
        translations = []
        for tokens, log_prob, score in zip(*hypotheses, strict=True):
            if score > -np.inf:
                ids = tuple(tokens[tokens != PAD_ID].tolist())
                text = one_line(self.tokenizer.decode(ids))
                translations.append(Translation(text, float(score), float(log_prob), ids))
        if not translations:
            raise UserError("no output has a score: the model's parameters are not finite, or alpha is extreme")
        return translations


@dataclasses.dataclass(frozen=True)
class _Search:
    """A search for the outputs of sources [B, S] that begin with prefixes [B, L].

    `numbers` [B, 2] has the seed of samples and the line number, for each row.

    Searches compare by value: equal searches share their compiled programs.
    """

    models: tuple[nn.Module, ...]
    penalty: LengthPenalty
    beam_size: int
    nbest: int
    min_length: int
    max_extra_length: int
    sampling: Sampling | None

    def __call__(self, params: Sequence[Any], source: jax.Array, prefix: jax.Array, numbers: jax.Array) -> Hypotheses:
        max_length = prefix.shape[1]
        lengths = jnp.sum(source != PAD_ID, axis=1)
        wanted = jnp.maximum(lengths + self.max_extra_length, jnp.sum(prefix != PAD_ID, axis=1) + 1)
        bounds = Bounds(jnp.full_like(lengths, self.min_length), jnp.where(lengths > 0, wanted, 1), prefix)
        hypotheses = self.beam_size if self.sampling is None else self.nbest
        begun = [
            as_step(model, one_params, source, hypotheses, max_length)
            for model, one_params in zip(self.models, params, strict=True)
        ]
        step, caches = ensemble([step for step, _ in begun]), tuple(cache for _, cache in begun)
        if self.sampling is not None:
            # JAX's other generators draw a batch's numbers together, so a sample would depend on the other lines.
            def key(number, n):
                of_line = jax.random.fold_in(jax.random.key(number[0], impl="threefry2x32"), number[1])
                return jax.random.fold_in(of_line, n)

            keys = jax.vmap(jax.vmap(key, (None, 0)), (0, None))(numbers, jnp.arange(self.nbest))
            return sample(step, caches, bounds, self.penalty, keys, self.sampling)
        if self.beam_size == 1:
            return greedy_search(step, caches, bounds, self.penalty)
        return beam_search(step, caches, bounds, self.penalty, beam_size=self.beam_size, nbest=self.nbest)


class _Score(LogProbs):
    """log P [B, T] of each token of targets [B, T], teacher-forced."""

    def __call__(self, params: Sequence[Any], *sides: jax.Array) -> jax.Array:
        _, target = sides
        log_probs = super().__call__(params, *sides)
        return jnp.take_along_axis(log_probs, target[:, :, None], axis=-1)[:, :, 0]


def as_step(model: nn.Module, params: Any, source: jax.Array, hypotheses: int, max_length: int) -> tuple[Step, Any]:
    """Adapts a model to the search: encodes source [B, S], and returns the step function and the initial cache."""
    _, first = model.apply(
        {"params": params}, source, hypotheses, max_length, method="init_cache", mutable=["memory", "cache"]
    )

    def step(tokens, parents, position, state):
        logits, updated = model.apply(
            {"params": params, **state}, tokens, parents, position, method="decode_step", mutable=["cache"]
        )
        return logits, {**state, **updated}

    return step, first
