"""Greedy and beam search, for any model that can take one step (section 6.1).

A model is a function `step(tokens [B, K], position, cache) -> (logits [B, K, V], cache)`: given the last token of each
hypothesis, which stands at `position` (0 for the begin symbol), the logits of the next one. The leaves of its cache are
[B, K, ...] and follow their hypotheses. Padding and the begin symbol are never put out. Every hypothesis is closed by
the end symbol, at the latest where its limit forces it, so every score is that of a complete sentence; the end symbol
counts in |Y|.

Letters of shapes: B batch, K beam, L longest output, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_flax.special_tokens import BEGIN_ID, END_ID, PAD_ID

Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class Hypotheses(NamedTuple):
    """Best first; unused places have a score of -inf."""

    tokens: jax.Array  # int32 [B, K, L], the end symbol included, then padding
    scores: jax.Array  # float32 [B, K], log P(Y|X) / length_penalty(|Y|)


def length_penalty(length: jax.Array | float, alpha: float) -> jax.Array | float:
    """((5 + |Y|) / 6)^alpha (Wu et al., 2016, equation 14)."""
    return ((5 + length) / 6) ** alpha


def _next_log_probs(step: Step, tokens, position, cache, limits):
    """log P of each next token [B, K, V]; -inf for what no sentence holds, and at its limit [B] for all but the end."""
    logits, cache = step(tokens, position, cache)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    ids = jnp.arange(log_probs.shape[-1])
    at_limit = (position + 1 >= limits)[:, None, None]
    allowed = jnp.where(at_limit, ids == END_ID, (ids != PAD_ID) & (ids != BEGIN_ID))
    return jnp.where(allowed, log_probs, -jnp.inf), cache


def greedy_search(step: Step, cache: Any, limits: jax.Array, *, max_length: int, alpha: float) -> Hypotheses:
    """The likeliest next token, again and again.

    Args:
      step: the model; sees K = 1.
      cache: its state before the first step.
      limits: int32 [B], the longest output of each sentence, from 1 to max_length.
      max_length: L.
      alpha: of the length penalty in the score.

    Returns:
      Hypotheses with K = 1.
    """
    batch = limits.shape[0]

    def unfinished(carry):
        position, _, _, _, done, _ = carry
        return (position < max_length) & ~jnp.all(done)

    def extend(carry):
        position, last, tokens, scores, done, cache = carry
        log_probs, cache = _next_log_probs(step, last, position, cache, limits)
        best = jnp.argmax(log_probs[:, 0], axis=-1).astype(jnp.int32)
        scores = scores + jnp.where(done, 0, jnp.max(log_probs[:, 0], axis=-1))
        tokens = tokens.at[:, 0, position].set(jnp.where(done, PAD_ID, best))
        return position + 1, best[:, None], tokens, scores, done | (best == END_ID), cache

    first = (
        jnp.int32(0),
        jnp.full((batch, 1), BEGIN_ID, jnp.int32),
        jnp.full((batch, 1, max_length), PAD_ID, jnp.int32),
        jnp.zeros(batch, jnp.float32),
        jnp.zeros(batch, bool),
        cache,
    )
    _, _, tokens, scores, _, _ = jax.lax.while_loop(unfinished, extend, first)
    lengths = jnp.sum(tokens != PAD_ID, axis=-1)
    return Hypotheses(tokens, scores[:, None] / length_penalty(lengths, alpha))


class _Beam(NamedTuple):
    position: jax.Array  # int32 []
    last: jax.Array  # int32 [B, K]
    tokens: jax.Array  # int32 [B, K, L], unfinished hypotheses
    log_probs: jax.Array  # float32 [B, K], -inf in unused places
    finished: Hypotheses
    done: jax.Array  # bool [B]
    cache: Any


def beam_search(
    step: Step, cache: Any, limits: jax.Array, *, beam_size: int, max_length: int, alpha: float
) -> Hypotheses:
    """Beam search with the paper's length penalty.

    At each position, of all continuations of the unfinished hypotheses the K best are kept; those among them that end
    the sentence are finished, the others live on. A sentence is done when none lives, or when none that lives can still
    beat the best finished one, even if all its further tokens were certain (log P only falls, so log P over the largest
    penalty ahead bounds its final score). It is not done for having K finished ones: beside one good hypothesis, the
    others of a beam are bad ones, which end early. With K = 1 this is greedy search.

    Args:
      step: the model.
      cache: its state before the first step, leaves [B, K, ...].
      limits: int32 [B], the longest output of each sentence, from 1 to max_length.
      beam_size: K.
      max_length: L.
      alpha: of the length penalty; 0 compares log-probabilities.
    """
    batch = limits.shape[0]

    def unfinished(beam: _Beam):
        return (beam.position < max_length) & ~jnp.all(beam.done)

    def extend(beam: _Beam) -> _Beam:
        next_log_probs, cache = _next_log_probs(step, beam.last, beam.position, beam.cache, limits)
        vocab_size = next_log_probs.shape[-1]
        candidates = beam.log_probs[:, :, None] + next_log_probs
        log_probs, index = jax.lax.top_k(candidates.reshape(batch, -1), beam_size)  # [B, K]
        parent, token = index // vocab_size, (index % vocab_size).astype(jnp.int32)
        tokens = _follow(beam.tokens, parent).at[:, :, beam.position].set(token)
        ends = token == END_ID

        # Done sentences change no more: their result must not depend on how long the others take.
        scores = log_probs / length_penalty(beam.position + 1, alpha)
        scores = jnp.where(ends & ~beam.done[:, None], scores, -jnp.inf)
        pool = Hypotheses(
            jnp.concatenate([beam.finished.tokens, tokens], axis=1),
            jnp.concatenate([beam.finished.scores, scores], axis=1),
        )
        best_scores, best = jax.lax.top_k(pool.scores, beam_size)
        finished = Hypotheses(_follow(pool.tokens, best), best_scores)

        log_probs = jnp.where(ends, -jnp.inf, log_probs)
        # Of the penalties still ahead, the one that is kindest to a negative log P: the largest.
        kindest = jnp.maximum(length_penalty(limits, alpha), length_penalty(beam.position + 2, alpha))
        hopeless = jnp.max(log_probs, axis=1) / kindest <= finished.scores[:, 0]
        return _Beam(
            position=beam.position + 1,
            last=token,
            tokens=tokens,
            log_probs=log_probs,
            finished=finished,
            done=beam.done | hopeless,
            cache=jax.tree.map(lambda leaf: _follow(leaf, parent), cache),
        )

    empty = jnp.full((batch, beam_size, max_length), PAD_ID, jnp.int32)
    first = _Beam(
        position=jnp.int32(0),
        last=jnp.full((batch, beam_size), BEGIN_ID, jnp.int32),
        tokens=empty,
        # All hypotheses begin alike: only the first counts, lest K copies of it fill the beam.
        log_probs=jnp.where(jnp.arange(beam_size) == 0, 0.0, jnp.full((batch, beam_size), -jnp.inf)),
        finished=Hypotheses(empty, jnp.full((batch, beam_size), -jnp.inf)),
        done=jnp.zeros(batch, bool),
        cache=cache,
    )
    return jax.lax.while_loop(unfinished, extend, first).finished


def _follow(leaf: jax.Array, hypotheses: jax.Array) -> jax.Array:
    """leaf [B, K, ...] and indices [B, K'] -> [B, K', ...]."""
    return jax.vmap(lambda x, i: x[i])(leaf, hypotheses)
