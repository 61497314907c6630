"""Ensembles against the mean probability of their members, on toy models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.compiled import FULL, GNMT, LONG_RULES, RULES, SENTENCES, TOYS, assert_same, beam, greedy, ranked
from tests.decoding.toy import VOCAB_SIZE, A, begin, everything, hashed, plain_beam, plain_greedy, step
from transformer_flax.decoding.search import combine, ensemble


def test_the_probabilities_of_an_ensemble_are_averaged():
    one, other = np.log(np.array([[0.5, 0.5], [0.2, 0.8]], np.float32))
    mean = jax.jit(lambda one, other: jnp.exp(combine([one, other, other])))
    np.testing.assert_allclose(mean(one, other), [0.3, 0.7], rtol=1e-5)
    # Logits say no more than their differences.
    np.testing.assert_allclose(mean(one + 30, other - 5), [0.3, 0.7], rtol=1e-5)


def test_an_ensemble_of_low_precision_is_averaged_in_high():
    logits = jax.ShapeDtypeStruct((2, VOCAB_SIZE), jnp.bfloat16)
    assert jax.eval_shape(lambda x: combine([x, x]), logits).dtype == jnp.float32


def test_an_ensemble_of_one_is_the_model_itself():
    cache = begin(TOYS[0], np.arange(2), 3)
    tokens, parents = np.full((2, 3), A), np.array([[0, 1, 2], [2, 2, 0]])
    logits, _ = step(tokens, parents, 0, cache)
    same, caches = ensemble([step])(tokens, parents, 0, (cache,))
    np.testing.assert_array_equal(logits, same)
    assert len(caches) == 1


@pytest.mark.parametrize("toy", TOYS, ids=["sharp", "flat"])
def test_an_ensemble_of_a_model_with_itself_is_that_model(toy):
    one, two = (beam([toy] * n, SENTENCES, LONG_RULES, nbest=3) for n in (1, 2))
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.log_probs, two.log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one.scores, two.scores, rtol=1e-5, atol=1e-5)


def test_an_ensemble_finds_the_best_by_log_mean_probability():
    # Each toy's own cache must follow the hypotheses, or its logits are those of another prefix.
    toys = [hashed(seed=11), hashed(seed=12)]
    full = beam(toys, SENTENCES, RULES, beam_size=FULL, nbest=12)
    narrow = beam(toys, SENTENCES, LONG_RULES, nbest=3)
    likeliest = greedy(toys, SENTENCES, LONG_RULES)
    for sentence in SENTENCES:
        short, long = RULES[sentence], LONG_RULES[sentence]
        assert_same(full, sentence, ranked(everything(toys, sentence, short), GNMT))
        assert_same(narrow, sentence, ranked(plain_beam(toys, sentence, long, 3), GNMT))
        assert_same(likeliest, sentence, ranked([plain_greedy(toys, sentence, long)], GNMT))
