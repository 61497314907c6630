"""Models so small that all they can say can be enumerated, and the same searches in plain Python.

The plain half works in float64 on whole prefixes, one sentence at a time, and shares no code with the package.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.decoding.search import follow
from transformer_flax.decoding.settings import Sampling
from transformer_flax.special_tokens import BEGIN_ID, END_ID, NUM_SPECIAL

STATES = 1009  # a prime, so that the hash loses nothing
WORDS = A, B, C = tuple(range(NUM_SPECIAL, NUM_SPECIAL + 3))
VOCAB_SIZE = NUM_SPECIAL + len(WORDS)
Tokens = tuple[int, ...]


class Toy(NamedTuple):
    """An automaton: every token changes the state, which gives the logits of the next. A sentence is its first state.

    All toys are of one shape, and their tables travel in the cache, so that one compiled search serves them all.
    """

    transitions: np.ndarray  # int32 [STATES, V]
    logits: np.ndarray  # float32 [STATES, V]


def hashed(seed: int, scale: float = 2.0) -> Toy:
    """The state is a hash of all tokens so far, and the logits are random: as in a real model, a cache that follows the
    wrong hypothesis gives wrong logits."""
    states, tokens = np.arange(STATES)[:, None], np.arange(VOCAB_SIZE)
    logits = scale * np.random.default_rng(seed).normal(size=(STATES, VOCAB_SIZE))
    return Toy(((states * 31 + tokens * 17 + 7) % STATES).astype(np.int32), logits.astype(np.float32))


def written(probabilities: dict[Tokens, dict[int, float]]) -> Toy:
    """Sentence 0 has these probabilities of a next token after these prefixes, and surely ends after all others."""
    states = {prefix: 1 + i for i, prefix in enumerate(probabilities)}
    transitions = np.full((STATES, VOCAB_SIZE), STATES - 1, np.int32)
    transitions[0, BEGIN_ID] = states[()]
    logits = np.full((STATES, VOCAB_SIZE), -np.inf, np.float32)
    logits[:, END_ID] = 0.0
    for prefix, following in probabilities.items():
        assert math.isclose(sum(following.values()), 1.0), f"after {prefix} the probabilities are not those of a model"
        logits[states[prefix]] = [math.log(following[i]) if i in following else -np.inf for i in range(VOCAB_SIZE)]
        if prefix:
            transitions[states[prefix[:-1]], prefix[-1]] = states[prefix]
    return Toy(transitions, logits)


def steady(following: dict[int, float]) -> Toy:
    """The same probabilities of a next token after every prefix."""
    toy = written({(): following})
    return Toy(np.zeros_like(toy.transitions), np.broadcast_to(toy.logits[1], toy.logits.shape))


def begin(toy: Toy, sentences, hypotheses: int):
    count = len(sentences)
    toys = jax.tree.map(lambda table: jnp.broadcast_to(table, (count, *table.shape)), toy)
    return toys, jnp.broadcast_to(sentences[:, None], (count, hypotheses)), jnp.zeros((count, 1, 1), jnp.int32)


def step(tokens, parents, position, cache):
    toys, states, steps = cache
    sentence = jnp.arange(len(states))[:, None]
    states = toys.transitions[sentence, follow(states, parents), tokens]
    # A real model gives its token an embedding of the position, so a wrong position must spoil a toy's logits too.
    return jnp.where(position == steps, toys.logits[sentence, states], jnp.nan), (toys, states, steps + 1)


class Rule(NamedTuple):
    """A rule holds the `Bounds` of one sentence."""

    longest: int
    shortest: int = 1
    prefix: Tokens = ()


def following(toys: Sequence[Toy], sentence: int, tokens: Tokens) -> np.ndarray:
    """log P of each next token [V], by the mean probability of the toys."""
    probabilities = []
    for toy in toys:
        state = sentence
        for token in (BEGIN_ID, *tokens):
            state = toy.transitions[state, token]
        weights = np.exp(toy.logits[state].astype(np.float64))
        probabilities.append(weights / weights.sum())
    with np.errstate(divide="ignore"):
        return np.log(np.mean(probabilities, axis=0))


def choices(toys: Sequence[Toy], sentence: int, tokens: Tokens, rule: Rule) -> dict[int, float]:
    """log P of each next token that the rule allows and that has a probability at all."""
    length = len(tokens) + 1
    if length <= len(rule.prefix):
        allowed: Sequence[int] = [rule.prefix[length - 1]]
    elif length == rule.longest:
        allowed = [END_ID]
    else:
        allowed = WORDS if length < rule.shortest else (END_ID, *WORDS)
    log_probs = following(toys, sentence, tokens)
    return {token: float(log_probs[token]) for token in allowed if log_probs[token] > -np.inf}


def everything(
    toys: Sequence[Toy], sentence: int, rule: Rule, tokens: Tokens = (), log_prob: float = 0.0
) -> Iterator[tuple[float, Tokens]]:
    """(log P, tokens) of all outputs that the rule allows."""
    if tokens and tokens[-1] == END_ID:
        yield log_prob, tokens
        return
    for token, more in choices(toys, sentence, tokens, rule).items():
        yield from everything(toys, sentence, rule, (*tokens, token), log_prob + more)


def best_log_probs(toy: Toy, sentences: Sequence[int], longest: int) -> np.ndarray:
    """log P of the likeliest of all outputs of at most so many tokens, for each sentence."""
    states = toy.transitions[list(sentences), BEGIN_ID][:, None]
    log_probs, best = np.zeros(states.shape), []
    for _ in range(longest):
        following = np.exp(toy.logits[states].astype(np.float64))
        candidates = log_probs[:, :, None] + np.log(following / following.sum(axis=-1, keepdims=True))
        best.append(candidates[:, :, END_ID].max(axis=1))
        log_probs = candidates[:, :, WORDS].reshape(len(states), -1)
        states = toy.transitions[states][:, :, WORDS].reshape(len(states), -1)
    return np.max(best, axis=0)


def plain_greedy(toys: Sequence[Toy], sentence: int, rule: Rule) -> tuple[float, Tokens]:
    log_prob, tokens = 0.0, ()
    while tokens[-1:] != (END_ID,):
        following = choices(toys, sentence, tokens, rule)
        token = max(following, key=following.get)
        log_prob, tokens = log_prob + following[token], (*tokens, token)
    return log_prob, tokens


def plain_beam(toys: Sequence[Toy], sentence: int, rule: Rule, beam_size: int) -> list[tuple[float, Tokens]]:
    """All that a beam comes upon when nothing stops it but the longest length."""
    alive, ended = [(0.0, ())], []
    while alive:
        candidates = [
            (log_prob + more, (*tokens, token))
            for log_prob, tokens in alive
            for token, more in choices(toys, sentence, tokens, rule).items()
        ]
        best = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * beam_size]
        ended += [hypothesis for hypothesis in best if hypothesis[1][-1] == END_ID]
        alive = [hypothesis for hypothesis in best if hypothesis[1][-1] != END_ID][:beam_size]
    return ended


def drawn(
    toy: Toy, sentence: int, rule: Rule, sampling: Sampling, tokens: Tokens = (), probability: float = 1.0
) -> dict[Tokens, float]:
    """The probability with which each output is drawn."""
    if tokens and tokens[-1] == END_ID:
        return {tokens: probability}
    weights = {t: math.exp(x / sampling.temperature) for t, x in choices([toy], sentence, tokens, rule).items()}
    likeliest = sorted(weights, key=weights.get, reverse=True)[: sampling.top_k or None]
    total = sum(weights[t] for t in likeliest)
    kept: dict[int, float] = {}
    for token in likeliest:
        if sum(kept.values()) < sampling.top_p * total:
            kept[token] = weights[token]
    outputs = {}
    for token, weight in kept.items():
        share = probability * weight / sum(kept.values())
        outputs |= drawn(toy, sentence, rule, sampling, (*tokens, token), share)
    return outputs
