"""Samples against the probabilities with which each output is drawn, on toy models."""

import collections
import itertools

import jax
import numpy as np
import pytest
import scipy.stats

from tests.decoding.compiled import (
    BATCH,
    FEW,
    GNMT,
    LENGTH,
    LONG_RULES,
    RULES,
    SENTENCES,
    TOYS,
    assert_equal,
    draw,
    greedy,
    score,
    words,
)
from tests.decoding.toy import A, B, C, Rule, drawn, everything, hashed, written
from transformer_flax.decoding.search import Hypotheses
from transformer_flax.decoding.settings import Sampling
from transformer_flax.special_tokens import END_ID

SAMPLES = 4096
MANY = np.arange(2 * SAMPLES).reshape(2, SAMPLES)  # seeds
DRAWN, DRAWN_RULES = hashed(seed=9, scale=1.0), [Rule(3), Rule(4, shortest=3, prefix=(B,))]
# What is left of the first tokens A 0.5, B 0.3, C 0.15 and the end symbol 0.05.
KEPT = {
    Sampling(): {A, B, C, END_ID},
    Sampling(temperature=1.7): {A, B, C, END_ID},
    Sampling(temperature=0.5, top_k=3): {A, B, C},
    # The roots are 0.38, 0.29, 0.21 and 0.12 of their sum. A and B make 0.67, so C comes too, with which it is 0.88;
    # of the probabilities themselves, A and B make 0.8.
    Sampling(temperature=2.0, top_p=0.7): {A, B, C},
    # Of the two likeliest, A has 0.625; of all, it has 0.5.
    Sampling(top_k=2, top_p=0.6): {A},
}


@pytest.fixture(params=KEPT, ids=lambda s: f"temperature={s.temperature}-top_k={s.top_k}-top_p={s.top_p}")
def sampling(request) -> Sampling:
    return request.param


def assert_fits(counts: collections.Counter, probabilities: dict) -> None:
    """Pearson's test; what is expected less than 5 times is taken together."""
    assert set(counts) <= set(probabilities)
    often = [x for x, p in probabilities.items() if p * SAMPLES >= 5]
    rare = sum(p for p in probabilities.values() if p * SAMPLES < 5)
    observed = [counts[x] for x in often]
    expected = [probabilities[x] * SAMPLES for x in often]
    if rare > 0:
        observed, expected = [*observed, SAMPLES - sum(observed)], [*expected, rare * SAMPLES]
    if len(observed) > 1:
        assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def test_samples_are_as_frequent_as_they_are_likely(sampling):
    found = draw(DRAWN, [0, 1], DRAWN_RULES, MANY, sampling)
    for sentence, rule in enumerate(DRAWN_RULES):
        outputs = [words(row) for row in found.tokens[sentence]]
        probabilities = drawn(DRAWN, sentence, rule, sampling)
        assert sum(probabilities.values()) == pytest.approx(1)
        assert_fits(collections.Counter(outputs), probabilities)
        for place in range(rule.longest):
            shares = collections.Counter()
            for tokens, probability in probabilities.items():
                shares[tokens[place : place + 1]] += probability
            assert_fits(collections.Counter(tokens[place : place + 1] for tokens in outputs), shares)


def test_scores_of_samples_are_those_of_the_model_and_in_order(sampling):
    found = draw(DRAWN, [0, 1], DRAWN_RULES, MANY, sampling)
    for sentence, rule in enumerate(DRAWN_RULES):
        log_probs = {tokens: log_prob for log_prob, tokens in everything([DRAWN], sentence, rule)}
        outputs = [words(row) for row in found.tokens[sentence]]
        np.testing.assert_allclose(found.log_probs[sentence], [log_probs[tokens] for tokens in outputs], atol=1e-5)
        scores = [score(log_probs[tokens], tokens, GNMT) for tokens in outputs]
        np.testing.assert_allclose(found.scores[sentence], scores, atol=1e-5)
        assert np.all(np.diff(found.scores[sentence]) <= 0)


def test_only_the_likeliest_tokens_are_drawn(sampling):
    toy = written({(): {A: 0.5, B: 0.3, C: 0.15, END_ID: 0.05}})
    found = draw(toy, [0, 0], [Rule(2)] * 2, MANY, sampling)
    assert set(found.tokens[:, :, 0].ravel()) == KEPT[sampling]


def test_tokens_as_likely_as_the_last_of_the_likeliest_are_drawn_too():
    # Of equals, a lower number is no reason.
    toy = written({(): {A: 0.4, B: 0.2, C: 0.2, END_ID: 0.2}})
    found = draw(toy, [0, 0], [Rule(2)] * 2, MANY, Sampling(temperature=0.5, top_k=3))
    assert set(found.tokens[:, :, 0].ravel()) == {A, B, C, END_ID}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(temperature=1.5, top_p=1e-6),
        Sampling(temperature=1e-39, top_k=3),  # 0 in float32, as the next
        Sampling(top_p=1e-46),
    ],
    ids=str,
)
def test_samples_of_the_likeliest_token_alone_are_greedy_search(sampling):
    for toy, rules in itertools.product(TOYS, (RULES, LONG_RULES)):
        samples = draw(toy, SENTENCES, rules, FEW, sampling)
        found = greedy(toy, SENTENCES, rules)
        assert_equal(samples, jax.tree.map(lambda leaf: np.repeat(leaf, 3, axis=1), found))


def test_samples_are_the_same_where_jax_prefers_float64():
    here = draw(DRAWN, SENTENCES, LONG_RULES, FEW, Sampling())
    with jax.enable_x64():
        assert_equal(draw(DRAWN, np.int32(SENTENCES), LONG_RULES, FEW, Sampling()), here)


def test_a_sample_depends_on_its_own_key_alone():
    together = draw(DRAWN, SENTENCES, LONG_RULES, FEW, Sampling())
    for sentence in range(0, BATCH, 3):
        # Alone, and with room for more tokens than it may have.
        sentences, rules = [sentence], [LONG_RULES[sentence]]
        alone = [draw(DRAWN, sentences, rules, seed[None, None], Sampling(), LENGTH + 3) for seed in FEW[sentence]]
        alone.sort(key=lambda one: -one.scores[0, 0])
        alone = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1)[0], *alone)
        here = Hypotheses(*(leaf[sentence] for leaf in together))
        assert_equal(alone._replace(tokens=alone.tokens[:, :LENGTH]), here)


def test_the_same_keys_give_the_same_samples_and_others_others():
    rules = [Rule(8)] * BATCH
    first = draw(DRAWN, [0] * BATCH, rules, FEW, Sampling())
    again = draw(DRAWN, [0] * BATCH, rules, FEW, Sampling())
    jax.tree.map(np.testing.assert_array_equal, first, again)
    # All rows are samples of one sentence.
    assert len({words(row) for row in first.tokens.reshape(-1, LENGTH)}) > BATCH
