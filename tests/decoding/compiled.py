"""The searches of the package on toys, and what is compared of them with the plain ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.decoding.toy import A, B, C, Rule, Toy, begin, hashed, step
from transformer_flax.decoding.search import (
    Bounds,
    Hypotheses,
    LengthPenalty,
    beam_search,
    ensemble,
    greedy_search,
    sample,
)
from transformer_flax.decoding.settings import LENGTH_PENALTIES
from transformer_flax.special_tokens import END_ID, PAD_ID

# Most of the time goes into compilation, so all searches have the same shapes, filled up with copies of the last row.
BATCH, LENGTH = 16, 8
FULL = 3**3 * 4  # a beam that holds all continuations of all prefixes of 3 words, so of all that `RULES` allows
GNMT = ("gnmt", 0.6)
NONE = ("none", 5.0)
ALPHAS = {"gnmt": [0.0, 0.6, 2.0, -0.5], "length": [0.5, 1.0, -1.0], "none": [5.0]}  # where it must not matter
PENALTIES = [(kind, alpha) for kind, alphas in ALPHAS.items() for alpha in alphas]
RULES = [
    Rule(5),
    Rule(2),
    Rule(3),
    Rule(1),
    Rule(5, shortest=3),
    Rule(4, shortest=4),
    Rule(3, shortest=9),  # the longest length wins
    Rule(5, prefix=(B,)),
    Rule(5, prefix=(A, C)),
    Rule(4, prefix=(C, C, A)),  # leaves room for the end symbol alone
    Rule(5, shortest=4, prefix=(B, A)),
    Rule(3, shortest=7, prefix=(A,)),
    Rule(5, prefix=(B, END_ID)),  # forced decoding
    Rule(3, prefix=(C, A, END_ID)),
    Rule(2, shortest=2, prefix=(END_ID,)),  # the prefix wins
    Rule(4, shortest=0),
]
SENTENCES = range(BATCH)
FEW = np.arange(BATCH * 3).reshape(BATCH, 3)  # seeds of three samples of each
LONG_RULES = [rule._replace(longest=rule.longest + 3) for rule in RULES]
TOYS = [hashed(seed=3), hashed(seed=8, scale=0.5)]


def bounds_of(rules, max_length=LENGTH) -> dict:
    prefix = np.full((len(rules), max_length), PAD_ID)
    for row, rule in zip(prefix, rules, strict=True):
        row[: len(rule.prefix)] = rule.prefix
    return {
        "longest": np.array([rule.longest for rule in rules]),
        "shortest": np.array([rule.shortest for rule in rules]),
        "prefix": prefix,
    }


def model(toys, sentences, hypotheses, step):
    if len(toys) == 1:
        return step, begin(toys[0], sentences, hypotheses)
    return ensemble([step] * len(toys)), tuple(begin(toy, sentences, hypotheses) for toy in toys)


def any_penalty(kind, alpha):
    """The length penalty of a kind and alpha known only at run time, so that one program serves them all."""
    return lambda length: jnp.select(
        [kind == i for i in range(len(LENGTH_PENALTIES))],
        [LengthPenalty(name, alpha)(length) for name in LENGTH_PENALTIES],
    )


@functools.partial(jax.jit, static_argnames=("step", "beam_size", "nbest"))
def compiled_beam(toys, sentences, bounds, kind, alpha, step, beam_size, nbest):
    bounds = Bounds(**bounds)
    step, cache = model(toys, sentences, beam_size, step)
    return beam_search(step, cache, bounds, any_penalty(kind, alpha), beam_size=beam_size, nbest=nbest)


@functools.partial(jax.jit, static_argnames="step")
def compiled_greedy(toys, sentences, bounds, kind, alpha, step):
    bounds = Bounds(**bounds)
    step, cache = model(toys, sentences, 1, step)
    return greedy_search(step, cache, bounds, any_penalty(kind, alpha))


@functools.partial(jax.jit, static_argnames="sampling")
def compiled_sample(toy, sentences, bounds, seeds, sampling):
    bounds = Bounds(**bounds)
    keys = jax.vmap(jax.vmap(jax.random.key))(seeds)
    return sample(step, begin(toy, sentences, keys.shape[1]), bounds, LengthPenalty(*GNMT), keys, sampling)


def run(compiled, toys, sentences, rules, penalty, batch, **settings) -> Hypotheses:
    def fill(values):
        return [*values, *[values[-1]] * (batch - len(values))]

    toys = [toys] if isinstance(toys, Toy) else toys
    kind, alpha = penalty
    found = compiled(
        toys, np.array(fill(sentences)), bounds_of(fill(rules)), LENGTH_PENALTIES.index(kind), float(alpha), **settings
    )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(sentences)], found)


def beam(toys, sentences, rules, penalty=GNMT, *, beam_size=3, nbest=1, step=step, batch=BATCH) -> Hypotheses:
    return run(compiled_beam, toys, sentences, rules, penalty, batch, step=step, beam_size=beam_size, nbest=nbest)


def greedy(toys, sentences, rules, penalty=GNMT, *, step=step) -> Hypotheses:
    return run(compiled_greedy, toys, sentences, rules, penalty, BATCH, step=step)


def draw(toy, sentences, rules, seeds, sampling, max_length=LENGTH) -> Hypotheses:
    """Samples with one key for each seed [B, N]."""
    return jax.device_get(compiled_sample(toy, np.array(sentences), bounds_of(rules, max_length), seeds, sampling))


def words(row) -> tuple[int, ...]:
    """The tokens before the padding."""
    return tuple(int(token) for token in row[: np.count_nonzero(row)])


def score(log_prob: float, tokens, penalty) -> float:
    kind, alpha = penalty
    length = len(tokens)
    return log_prob / {"gnmt": ((5 + length) / 6) ** alpha, "length": length**alpha, "none": 1}[kind]


def ranked(hypotheses, penalty):
    """(score, log P, tokens), best first."""
    return sorted(((score(x, tokens, penalty), x, tokens) for x, tokens in hypotheses), key=lambda row: -row[0])


def assert_same(found: Hypotheses, sentence: int, expected) -> None:
    """The rows of a sentence are the first of these, in order, and unused where there are no more."""
    places = found.scores.shape[1]
    expected = [*expected[:places], *[(-np.inf, -np.inf, ())] * (places - len(expected))]
    scores, log_probs, tokens = zip(*expected, strict=True)
    assert [words(row) for row in found.tokens[sentence]] == list(tokens)
    np.testing.assert_allclose(found.log_probs[sentence], log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.scores[sentence], scores, rtol=1e-5, atol=1e-5)


def assert_equal(one: Hypotheses, other: Hypotheses) -> None:
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(one.scores, other.scores, rtol=1e-6, atol=1e-6)
