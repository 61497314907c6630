from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.compiled import BATCH, LONG_RULES, assert_equal, beam, draw
from tests.decoding.toy import hashed
from transformer_flax.decoding.search import SMALLEST, Hypotheses, extend_until_done
from transformer_flax.decoding.settings import Sampling


class Counting(NamedTuple):
    """Sentences that are done at a position each, which count the steps that they are in the batch for."""

    end: jax.Array
    result: jax.Array
    done: jax.Array


@jax.jit
def steps_in_the_batch(ends):
    def extend(position, rows):
        return rows._replace(result=rows.result + 1, done=position + 1 >= rows.end)

    return extend_until_done(extend, Counting(ends, jnp.zeros_like(ends), jnp.zeros(ends.shape, bool)), 1000)


def test_half_of_the_sentences_leave_as_soon_as_they_are_done():
    ends = np.random.default_rng(0).permutation(np.arange(1, 4 * SMALLEST + 1))
    sizes = 2 * SMALLEST, 3 * SMALLEST, 4 * SMALLEST  # when a half is done, and then a half of the other one
    expected = [min(size for size in sizes if end <= size) for end in ends]
    np.testing.assert_array_equal(steps_in_the_batch(ends), expected)


@pytest.mark.parametrize("size", [1, SMALLEST, 2 * SMALLEST - 1])
def test_few_stay_together(size):
    assert set(np.asarray(steps_in_the_batch(np.arange(1, size + 1))).tolist()) == {size}


def test_sentences_that_are_all_done_at_once_end_the_loop():
    np.testing.assert_array_equal(steps_in_the_batch(np.full(4 * SMALLEST, 7)), 7)


MANY = 4 * BATCH
LONG_BATCH = LONG_RULES * 4


def in_parts(find, *arguments):
    """Searches BATCH sentences at a time. In so small a batch, no sentence leaves before the others."""
    parts = [find(*(argument[i : i + BATCH] for argument in arguments)) for i in range(0, MANY, BATCH)]
    return Hypotheses(*(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))


def test_a_beam_finds_the_same_in_a_batch_that_shrinks():
    toy, sentences = hashed(seed=5), list(range(MANY))
    assert BATCH < 2 * SMALLEST <= MANY
    together = beam(toy, sentences, LONG_BATCH, nbest=3, batch=MANY)
    lengths = np.count_nonzero(together.tokens, axis=2)[:, 0]
    assert lengths.min() == 1  # some leave early
    assert lengths.max() == LONG_BATCH[0].longest
    assert_equal(together, in_parts(lambda *part: beam(toy, *part, nbest=3), sentences, LONG_BATCH))


def test_samples_are_the_same_in_a_batch_that_shrinks():
    toy, sentences, seeds = hashed(seed=5), list(range(MANY)), np.arange(MANY * 2).reshape(MANY, 2)
    sampling = Sampling(seed=1)
    together = draw(toy, sentences, LONG_BATCH, seeds, sampling)
    assert_equal(together, in_parts(lambda *part: draw(toy, *part, sampling), sentences, LONG_BATCH, seeds))
