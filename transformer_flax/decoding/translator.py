"""Text in, text out: parameters, a tokenizer and a search."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.inputs import NARROWEST, batches, encode, fill, warn_of_cut
from transformer_flax.decoding.search import (
    Bounds,
    Hypotheses,
    LengthPenalty,
    Sampling,
    Step,
    beam_search,
    ensemble,
    greedy_search,
    log_mean_probability,
    sample,
)
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import PAD_ID


def _ignore(done: int) -> None:
    """Progress that nobody watches."""


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis for a line."""

    text: str  # a single line, whatever the model put out
    score: float  # log_prob over the length penalty: what hypotheses are ranked by
    log_prob: float  # log P(Y|X), natural, the end symbol included
    tokens: tuple[int, ...]  # the end symbol included


class Translator:
    """Translates and scores text with one trained model, or with several that share a tokenizer, as an ensemble.

    What a line becomes does not depend on the others, on their order or on the size of the batches (but a sample's
    randomness is that of its line's number).

    Args:
      models: Linen modules with the methods of a model that translates (`model.registry`).
      params: those of each model; may be replaced at any time, compiled programs stay. None until they are there.
      tokenizer: of both languages.
      beam_size: K; 1 is greedy search.
      length_penalty, alpha: of the score, see `LengthPenalty`.
      min_length: shortest output in tokens, the end symbol included.
      max_extra_length: an output has at most as many tokens as its input and so many more.
      max_input_length: longer inputs (in tokens, the end symbol included) are cut, and counted in a warning.
      batch_size: sentences at a time; fewer where they are long.
      window: lines that are read, sorted by length and translated before the first of them is put out.
      nbest: hypotheses given for each line, at most `beam_size`; with `sampling`, the number of samples.
      sampling: draw at random in place of a beam.
      refuse_long: refuse inputs longer than `max_input_length`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        params: Sequence[Any] | None,
        tokenizer: Tokenizer,
        *,
        beam_size: int,
        length_penalty: str,
        alpha: float,
        min_length: int,
        max_extra_length: int,
        max_input_length: int,
        batch_size: int,
        window: int,
        nbest: int = 1,
        sampling: Sampling | None = None,
        refuse_long: bool = False,
    ):
        for name, value, least in (
            ("beam_size", beam_size, 1),
            ("min_length", min_length, 0),
            ("max_extra_length", max_extra_length, 0),
            ("max_input_length", max_input_length, 2),
            ("batch_size", batch_size, 1),
            ("window", window, 1),
            ("nbest", nbest, 1),
        ):
            if value < least:
                raise UserError(f"{name} is {value}; it must be at least {least}")
        if not math.isfinite(alpha):
            raise UserError(f"alpha is {alpha}; it must be finite")
        if sampling is None and nbest > beam_size:
            raise UserError(
                f"nbest is {nbest} and beam_size {beam_size}: a beam holds no more hypotheses than its size"
            )
        self.models, self.params, self.tokenizer = list(models), params, tokenizer
        self.compilations = 0
        self._beam_size, self._nbest, self._sampling = beam_size, nbest, sampling
        self._penalty = LengthPenalty(length_penalty, alpha)
        self._min_length, self._max_extra_length = min_length, max_extra_length
        self._max_input_length, self._refuse_long = max_input_length, refuse_long
        self._batch_size, self._window = batch_size, window
        self._search = jax.jit(self._search_batch)
        self._score = jax.jit(self._score_batch)

    def translate(
        self, lines: Iterable[str], *, prefixes: Iterable[str] | str = "", progress: Callable[[int], Any] = _ignore
    ) -> list[str]:
        """The best translation of each line, in order; of an empty line, an empty one. Arguments as of `search`."""
        return [best.text for best, *_ in self.search(lines, prefixes=prefixes, progress=progress)]

    def search(
        self, lines: Iterable[str], *, prefixes: Iterable[str] | str = "", progress: Callable[[int], Any] = _ignore
    ) -> Iterator[list[Translation]]:
        """The `nbest` translations of each line, best first, window by window.

        Args:
          lines: sentences; read no further than the window that is being translated.
          prefixes: what each output must begin with, one for all or one for each; empty for nothing.
          progress: called with the number of lines done so far.

        Raises:
          UserError: an input is too long and `refuse_long` is set, or a prefix has no room in its output.
        """
        if isinstance(prefixes, str):
            prefixes = itertools.repeat(prefixes)
        inputs, starts = iter(lines), iter(prefixes)
        read = cut = 0
        try:
            while window := list(itertools.islice(inputs, self._window)):
                begins = list(itertools.islice(starts, len(window)))
                before, read = read, read + len(window)
                if len(begins) < len(window):
                    raise UserError(f"there are only {before + len(begins):,} prefixes: each line needs one")
                sources, shortened = self._encode(
                    [line if line.strip() else "" for line in window], lines_before=before
                )
                cut += len(shortened)
                yield from self._search_window(sources, self.tokenizer.encode(begins), before, progress)
        finally:
            warn_of_cut(cut, read, self._max_input_length)
        if not isinstance(starts, itertools.repeat) and next(starts, None) is not None:
            raise UserError(f"there are more prefixes than the {read:,} lines: each line needs one")

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, progress: Callable[[int], Any] = _ignore
    ) -> list[list[float]]:
        """log P of each token of given targets, the end symbol included, in one teacher-forced pass.

        Args:
          sources: sentences.
          targets: as many, a translation of each. One longer than any output may be is cut or refused, as inputs are;
            what is left of it has no end symbol.
          progress: called with the number of lines done so far.
        """
        if len(sources) != len(targets):
            raise UserError(f"there are {len(sources):,} sources and {len(targets):,} targets: each needs the other")
        longest = self._max_input_length + self._max_extra_length  # of an output
        inputs, cut_inputs = self._encode(sources)
        outputs, cut_outputs = self._encode(targets, limit=longest)
        for i in cut_outputs:
            outputs[i].pop()
        warn_of_cut(len({*cut_inputs, *cut_outputs}), len(sources), self._max_input_length)
        pairs = list(zip(inputs, outputs, strict=True))
        scores: list[list[float]] = [[] for _ in pairs]
        done = 0
        # Logits [rows, width, V] are what fills the memory here, so there are as few rows as tokens allow.
        lengths = [max(map(len, pair)) for pair in pairs]
        for chosen, rows, width in batches(lengths, longest, self._batch_size, roomy=NARROWEST):
            source, target = (fill([pairs[i][side] for i in chosen], rows, width) for side in (0, 1))
            for i, log_probs in zip(chosen, np.asarray(self._score(self.params, source, target)), strict=False):
                scores[i] = log_probs[: len(pairs[i][1])].tolist()
            done += len(chosen)
            progress(done)
        return scores

    def _encode(
        self, lines: Sequence[str], *, limit: int | None = None, lines_before: int = 0
    ) -> tuple[list[list[int]], list[int]]:
        limit = limit or self._max_input_length
        return encode(self.tokenizer, lines, limit, refuse_long=self._refuse_long, lines_before=lines_before)

    def _search_window(self, sources, prefixes, lines_before: int, progress) -> list[list[Translation]]:
        roomiest = self._max_input_length + self._max_extra_length
        for i, prefix in enumerate(prefixes):
            if len(prefix) >= roomiest:
                raise UserError(
                    f"the prefix of line {lines_before + i + 1:,} has {len(prefix):,} tokens; outputs have at most "
                    f"{roomiest:,}, the end symbol included"
                )
        found = [[Translation("", 0.0, 0.0, ())] for _ in sources]
        # Wide enough for the prefix too. An empty line (its end symbol alone) is none for the model.
        widths = [
            max(len(source), len(prefix) + 1 - self._max_extra_length) if len(source) > 1 else 0
            for source, prefix in zip(sources, prefixes, strict=True)
        ]
        done = lines_before + widths.count(0)
        progress(done)
        for chosen, rows, width in batches(widths, self._max_input_length, self._batch_size):
            source = fill([sources[i] for i in chosen], rows, width)
            prefix = fill([prefixes[i] for i in chosen], rows, width + self._max_extra_length)
            numbers = np.zeros(rows, np.uint32)
            numbers[: len(chosen)] = [lines_before + i for i in chosen]
            hypotheses = jax.device_get(self._search(self.params, source, prefix, numbers))
            for row, i in enumerate(chosen):
                found[i] = self._decode(jax.tree.map(lambda leaf, row=row: leaf[row], hypotheses))
            done += len(chosen)
            progress(done)
        return found

    def _decode(self, hypotheses: Hypotheses) -> list[Translation]:
        """Of one sentence; places that no hypothesis came to are left out."""
        translations = []
        for tokens, log_prob, score in zip(*hypotheses, strict=True):
            if score > -np.inf:
                ids = tuple(tokens[tokens != PAD_ID].tolist())
                text = " ".join(self.tokenizer.decode(ids).splitlines())
                translations.append(Translation(text, float(score), float(log_prob), ids))
        if not translations:
            raise UserError("the model gives no token a probability: its parameters are not finite")
        return translations

    def _search_batch(self, params, source, prefix, numbers) -> Hypotheses:
        self.compilations += 1  # runs while tracing only, which is once for every shape
        max_length = prefix.shape[1]
        lengths = jnp.sum(source != PAD_ID, axis=1)
        wanted = jnp.maximum(lengths + self._max_extra_length, jnp.sum(prefix != PAD_ID, axis=1) + 1)
        bounds = Bounds.of(jnp.where(lengths > 0, wanted, 1), max_length, shortest=self._min_length, prefix=prefix)
        hypotheses = self._beam_size if self._sampling is None else self._nbest
        steps, caches = zip(
            *(
                as_step(model, one_params, source, hypotheses, max_length)
                for model, one_params in zip(self.models, params, strict=True)
            ),
            strict=True,
        )
        step = ensemble(steps)
        if self._sampling is not None:
            fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
            keys = jax.vmap(fold_in, in_axes=(0, None))(
                fold_in(jax.random.key(self._sampling.seed), numbers), jnp.arange(self._nbest)
            )
            return sample(step, caches, bounds, self._penalty, keys, self._sampling)
        if self._beam_size == 1:
            return greedy_search(step, caches, bounds, self._penalty)
        return beam_search(step, caches, bounds, self._penalty, beam_size=self._beam_size, nbest=self._nbest)

    def _score_batch(self, params, source, target) -> jax.Array:
        self.compilations += 1
        logits: list[Any] = [
            model.apply({"params": one_params}, source, target)
            for model, one_params in zip(self.models, params, strict=True)
        ]
        log_probs = jax.nn.log_softmax(logits[0] if len(logits) == 1 else log_mean_probability(logits))
        return jnp.take_along_axis(log_probs, target[:, :, None], axis=-1)[:, :, 0]


def as_step(model: nn.Module, params: Any, source: jax.Array, hypotheses: int, max_length: int) -> tuple[Step, Any]:
    """A model as the search sees it, for source [B, S]: its step, and its cache before the first."""
    _, first = model.apply(
        {"params": params}, source, hypotheses, max_length, method="init_cache", mutable=["memory", "cache"]
    )

    def step(tokens, parents, position, state):
        logits, updated = model.apply(
            {"params": params, **state}, tokens, parents, position, method="decode_step", mutable=["cache"]
        )
        return logits, {**state, **updated}

    return step, first
