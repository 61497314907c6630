"""Greedy search, sampling and beam search, for any model that can take one step (section 6.1).

A model is a function `step(tokens [B, K], parents [B, K], position, cache) -> (logits [B, K, V], cache)`. `tokens` are
the last tokens of the hypotheses, at `position` (0 for the begin symbol). The logits are those of the next token.
Hypothesis k continues hypothesis parents[:, k] of the step before; the step must reorder its cache accordingly. The
first axis of every array in a cache is the sentence axis, because finished sentences leave the batch.

No output contains padding or the begin symbol. Every hypothesis ends with the end symbol: the length limit forces the
end symbol at the latest. So every score is the score of a complete sentence. |Y| counts the end symbol.

Shapes: B batch, K hypotheses of a sentence, N best of them, L longest output, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_flax.decoding.settings import Sampling
from transformer_flax.special_tokens import BEGIN_ID, END_ID, PAD_ID

SMALLEST = 16  # a batch does not shrink below this many rows: with fewer rows, a step is hardly faster

Step = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class LengthPenalty:
    """The divisor of log P(Y|X) in the score of a hypothesis. It keeps short hypotheses from winning for being short.

    "gnmt": ((5 + |Y|) / 6)^alpha (Wu et al., 2016, equation 14), used in the paper; "length": |Y|^alpha; "none": 1.
    """

    kind: str
    alpha: float

    def __call__(self, length: Any) -> Any:
        """Returns the penalty of length |Y|; |Y| is at least 1."""
        if self.kind == "gnmt":
            return ((5 + length) / 6) ** self.alpha
        return (1.0 * length) ** self.alpha if self.kind == "length" else 1.0


class Bounds(NamedTuple):
    """Limits of the outputs of each sentence. All lengths include the end symbol."""

    shortest: jax.Array  # int32 [B]; `longest` wins over `shortest`
    longest: jax.Array  # int32 [B], from 1 to L, and larger than the length of the prefix
    prefix: jax.Array  # int32 [B, L], the first tokens of the output, then padding


class Hypotheses(NamedTuple):
    """Hypotheses of each sentence, best first. Unused places have a score of -inf."""

    tokens: jax.Array  # int32 [B, N, L], the end symbol included, then padding
    log_probs: jax.Array  # float32 [B, N], log P(Y|X)
    scores: jax.Array  # float32 [B, N], log P(Y|X) / length penalty of |Y|

    def best(self, n: int) -> "Hypotheses":
        """Returns the n best hypotheses, best first. Ties keep their order."""
        order = jax.lax.top_k(self.scores, n)[1]
        return jax.tree.map(lambda leaf: follow(leaf, order), self)


def follow(leaf: jax.Array, parents: jax.Array) -> jax.Array:
    """Gathers the entries of each hypothesis' parent: leaf [B, K, ...] and parents [B, K'] -> [B, K', ...]."""
    return jax.vmap(lambda x, i: x[i])(leaf, parents)


def ensemble(steps: Sequence[Step]) -> Step:
    """Combines several models into one by averaging their probabilities. Its cache is the tuple of their caches."""

    def step(tokens, parents, position, caches):
        results = [one(tokens, parents, position, cache) for one, cache in zip(steps, caches, strict=True)]
        logits, caches = zip(*results, strict=True)
        return combine(logits), caches

    return step


def combine(logits: Sequence[Any]) -> jax.Array:
    """Returns the logits of an ensemble [..., V]: the log of the mean probability, or a single model's own logits."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x.astype(jnp.float32)) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))


def extend_until_done(
    extend: Callable[[jax.Array, Any], Any], rows: Any, max_length: int, position: jax.Array | int = 0
) -> Any:
    """Extends the outputs of all sentences position by position until every sentence is done. Returns their `result`.

    Outputs have very different lengths. Once half of the sentences are done, the other sentences continue in a batch of
    half the size, and so on down to SMALLEST rows. Each batch size has its own loop. All loops are in one program, so
    the device never waits for the host.

    Args:
      extend: `(position, rows) -> rows`; must not change the `result` of a sentence that is done.
      rows: a tree with the fields `done`, bool [B], and `result`; the first axis of each leaf is the sentence axis.
    """
    size = rows.done.shape[0]
    smaller = size // 2 if size >= 2 * SMALLEST else 0

    def unfinished(carry):
        position, rows = carry
        return (position < max_length) & (jnp.sum(~rows.done) > smaller)

    def extend_all(carry):
        position, rows = carry
        return position + 1, extend(position, rows)

    position, rows = jax.lax.while_loop(unfinished, extend_all, (jnp.int32(position), rows))
    if not smaller:
        return rows.result
    left = jnp.argsort(rows.done)[:smaller]  # unfinished sentences come first
    results = extend_until_done(extend, jax.tree.map(lambda leaf: leaf[left], rows), max_length, position)
    return jax.tree.map(lambda all_rows, some: all_rows.at[left].set(some), rows.result, results)


def _next_log_probs(step: Step, tokens, parents, position, cache, bounds: Bounds):
    """Returns log P of each next token [B, K, V], -inf for tokens that the bounds exclude, and the cache."""
    logits, cache = step(tokens, parents, position, cache)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    ids = jnp.arange(log_probs.shape[-1])
    length = position + 1  # length of an output that ends at this position
    allowed = (ids != PAD_ID) & (ids != BEGIN_ID) & ((ids != END_ID) | (length >= bounds.shortest)[:, None])
    allowed = jnp.where((length >= bounds.longest)[:, None], ids == END_ID, allowed)
    forced = bounds.prefix[:, position][:, None]
    allowed = jnp.where(forced != PAD_ID, ids == forced, allowed)
    return jnp.where(allowed[:, None], log_probs, -jnp.inf), cache


def greedy_search(step: Step, cache: Any, bounds: Bounds, penalty: LengthPenalty) -> Hypotheses:
    """Takes the likeliest next token at every position. N = 1, and the cache holds one hypothesis a sentence."""
    keys = jax.random.split(jax.random.key(0), bounds.longest.shape)  # unused at temperature 0
    return sample(step, cache, bounds, penalty, keys[:, None], Sampling(temperature=0))


class _Samples(NamedTuple):
    last: jax.Array  # int32 [B, N]
    ended: jax.Array  # bool [B, N]
    result: tuple[jax.Array, jax.Array]  # tokens int32 [B, N, L] and log_probs float32 [B, N]
    keys: jax.Array  # [B, N]
    bounds: Bounds
    done: jax.Array  # bool [B]
    cache: Any


def sample(
    step: Step, cache: Any, bounds: Bounds, penalty: LengthPenalty, keys: jax.Array, sampling: Sampling
) -> Hypotheses:
    """Draws every next token from the model's distribution.

    `keys` [B, N] has one key for each sample; a sample depends on its own key alone. The scores use the model's own log
    P, whatever the temperature.
    """
    max_length = bounds.prefix.shape[1]

    def extend(position, samples: _Samples) -> _Samples:
        itself = jnp.broadcast_to(jnp.arange(keys.shape[1]), samples.last.shape)
        log_probs, cache = _next_log_probs(step, samples.last, itself, position, samples.cache, samples.bounds)
        drawn = _draw(log_probs, samples.keys, position, sampling)
        chosen = jnp.take_along_axis(log_probs, drawn[:, :, None], axis=-1)[:, :, 0]
        tokens, total = samples.result
        total = total + jnp.where(samples.ended, 0, chosen)
        tokens = tokens.at[:, :, position].set(jnp.where(samples.ended, PAD_ID, drawn))
        ended = samples.ended | (drawn == END_ID)
        return samples._replace(
            last=drawn, ended=ended, result=(tokens, total), done=jnp.all(ended, axis=1), cache=cache
        )

    first = _Samples(
        last=jnp.full(keys.shape, BEGIN_ID, jnp.int32),
        ended=jnp.zeros(keys.shape, bool),
        result=(jnp.full((*keys.shape, max_length), PAD_ID, jnp.int32), jnp.zeros(keys.shape, jnp.float32)),
        keys=keys,
        bounds=bounds,
        done=jnp.zeros(keys.shape[0], bool),
        cache=cache,
    )
    tokens, log_probs = extend_until_done(extend, first, max_length)
    scores = log_probs / penalty(jnp.sum(tokens != PAD_ID, axis=-1))
    return Hypotheses(tokens, log_probs, scores).best(keys.shape[1])


def _draw(log_probs, keys, position, sampling: Sampling):
    """Draws one token from each distribution [B, N, V] -> int32 [B, N].

    Uses the Gumbel-max trick: argmax(x + g) is a draw from softmax(x) where g is Gumbel noise. Here x is log P / T. The
    sum is multiplied by T, which does not change the argmax. So temperature 0 is greedy search.
    """
    logits = log_probs
    if sampling.temperature > 0:
        if sampling.top_k or sampling.top_p < 1:
            logits = _truncate(logits, sampling)
        keys = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, position)))(keys)
        noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype)))(keys)
        logits = logits + sampling.temperature * noise
    # The first of the largest, like argmax: on a CPU, XLA's argmax is many times slower than its max.
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), ids, ids[-1]), axis=-1)


def _truncate(log_probs, sampling: Sampling):
    """Sets all tokens to -inf but the `top_k` likeliest and, of these, the fewest that reach `top_p`. Ties are kept."""
    ordered = jnp.flip(jnp.sort(log_probs, axis=-1), axis=-1)
    if sampling.top_k:
        ordered = jnp.where(jnp.arange(ordered.shape[-1]) < sampling.top_k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered / sampling.temperature)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (before < sampling.top_p) & (ordered > -jnp.inf)
    kept = kept.at[..., 0].set(True)  # also if a tiny temperature or top_p rounds to 0
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(log_probs >= least, log_probs, -jnp.inf)


class _Beam(NamedTuple):
    last: jax.Array  # int32 [B, K]
    parents: jax.Array  # int32 [B, K]
    tokens: jax.Array  # int32 [B, K, L], unfinished hypotheses
    log_probs: jax.Array  # float32 [B, K], -inf in unused places
    result: Hypotheses  # the best finished hypotheses
    bounds: Bounds
    done: jax.Array  # bool [B]
    cache: Any


def beam_search(
    step: Step, cache: Any, bounds: Bounds, penalty: LengthPenalty, *, beam_size: int, nbest: int = 1
) -> Hypotheses:
    """Finds the N best of the outputs that a beam of K living hypotheses reaches, as the authors' code does.

    `beam_size` is K, and `nbest` is N, at most K.

    At each position, the search takes the 2K best of all continuations. Continuations with the end symbol are finished
    hypotheses. The K best of the other continuations stay in the beam. There are at least K of them among the 2K,
    because each hypothesis has only one continuation with the end symbol. So a finished hypothesis takes no place in
    the beam.

    A beam of 1 is not greedy search. Greedy search stops where the end symbol is the likeliest token. This search
    finishes that output too, but continues to look for a better output. With a beam of 1, `Translator` uses greedy
    search, as the authors' code does.

    A sentence is done when no living hypothesis can reach its N best any more:
      - log P of an output is a sum of numbers <= 0, so no continuation of a hypothesis has a larger log P.
      - The final score is log P / penalty(|Y|). As log P <= 0, the score is at most log P / largest, where `largest` is
        the largest penalty of the lengths ahead. Penalties are monotonic, so `largest` is the penalty of the next
        length or of the longest length.
      - Suppose that this bound of the best living hypothesis does not exceed the N-th best score. Then no continuation
        displaces one of the N best (of equal scores, the older stays), and the bound holds at all later positions.
    So stopping early changes no result. The search does not end as soon as K hypotheses are finished: beside one good
    hypothesis, the others of a beam are bad, and bad hypotheses end early.
    """
    batch, max_length = bounds.prefix.shape

    def extend(position, beam: _Beam) -> _Beam:
        next_log_probs, cache = _next_log_probs(step, beam.last, beam.parents, position, beam.cache, beam.bounds)
        rows, _, vocab_size = next_log_probs.shape
        candidates = beam.log_probs[:, :, None] + next_log_probs
        best, index = jax.lax.top_k(candidates.reshape(rows, -1), 2 * beam_size)  # [B, 2K]

        end_log_probs = candidates[:, :, END_ID]  # a strided slice, [:, END_ID::V], does not fit into a TPU's memory
        ends = end_log_probs >= jnp.min(best, axis=1, keepdims=True)  # among the 2K; best[:, -1:] sorts all on a CPU
        scores = jnp.where(ends, end_log_probs / penalty(position + 1), -jnp.inf)
        ended = Hypotheses(beam.tokens.at[:, :, position].set(END_ID), end_log_probs, scores)
        pool = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), beam.result, ended)
        finished = pool.best(nbest)

        log_probs, places = jax.lax.top_k(jnp.where(index % vocab_size == END_ID, -jnp.inf, best), beam_size)  # [B, K]
        index = follow(index, places)
        parents, token = index // vocab_size, (index % vocab_size).astype(jnp.int32)
        tokens = follow(beam.tokens, parents).at[:, :, position].set(token)
        largest = jnp.maximum(penalty(beam.bounds.longest), penalty(position + 2))  # of the lengths ahead
        hopeless = jnp.max(log_probs, axis=1) / largest <= finished.scores[:, -1]  # stays true, as shown above
        return beam._replace(
            last=token, parents=parents, tokens=tokens, log_probs=log_probs, result=finished, done=hopeless, cache=cache
        )

    def unused(places: int):
        return jnp.full((batch, places), -jnp.inf)

    def empty(places: int):
        return jnp.full((batch, places, max_length), PAD_ID, jnp.int32)

    hypothesis = jnp.broadcast_to(jnp.arange(beam_size, dtype=jnp.int32), (batch, beam_size))
    first = _Beam(
        last=jnp.full((batch, beam_size), BEGIN_ID, jnp.int32),
        parents=hypothesis,
        tokens=empty(beam_size),
        # All hypotheses begin alike, so only the first one counts: else K copies of it would fill the beam.
        log_probs=jnp.where(hypothesis == 0, 0.0, unused(beam_size)),
        result=Hypotheses(empty(nbest), unused(nbest), unused(nbest)),
        bounds=bounds,
        done=jnp.zeros(batch, bool),
        cache=cache,
    )
    return extend_until_done(extend, first, max_length)
