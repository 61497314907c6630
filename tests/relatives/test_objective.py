"""The objective in matrix products is the one of the paper, word by word."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_flax.relatives.word_vectors import Rows, Tables, gradient, touch, update, windows

V, D = 11, 4
WORDS = np.array([[3, 4, 5, 3, 6, 0, 0], [7, 7, 8, 9, 10, 4, 0]], np.int32)
SENTENCES = np.array([[0, 0, 0, 1, 1, -1, -1], [2, 2, 2, 2, 5, 5, -1]], np.int32)
REACH = np.array([[2, 1, 2, 3, 1, 3, 1], [1, 2, 3, 1, 1, 2, 1]], np.int32)
NOISE = np.array([[3, 10, 3], [5, 6, 7]], np.int32)
NEGATIVES = 5
ROWS = Rows(WORDS, SENTENCES, REACH, NOISE, 0.0)


def context_places(r: int, t: int) -> list[int]:
    near = [c for c in range(WORDS.shape[1]) if c != t and abs(c - t) <= REACH[r, t]]
    return [c for c in near if SENTENCES[r, c] == SENTENCES[r, t] >= 0]


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def written_skipgram(own, context):
    total = 0.0
    for r, t in np.ndindex(WORDS.shape):
        for c in context_places(r, t):
            w, o = own[WORDS[r, t]], context[WORDS[r, c]]
            noise = sum(log_sigmoid(-context[n] @ w) for n in NOISE[r])
            total -= log_sigmoid(o @ w) + NEGATIVES / NOISE.shape[1] * noise
    return total


def written_cbow(own, context):
    total = 0.0
    for r, t in np.ndindex(WORDS.shape):
        if places := context_places(r, t):
            h = sum(own[WORDS[r, c]] for c in places) / len(places)
            noise = sum(log_sigmoid(-context[n] @ h) for n in NOISE[r])
            total -= log_sigmoid(context[WORDS[r, t]] @ h) + NEGATIVES / NOISE.shape[1] * noise
    return total


@pytest.mark.parametrize(("kind", "written"), [("skipgram", written_skipgram), ("cbow", written_cbow)])
def test_loss_and_gradient_are_those_of_the_objective_as_it_is_written(kind, written):
    own, context = np.random.default_rng(0).normal(size=(2, V, D)).astype(np.float32)
    batch = touch(ROWS, V)
    loss, words, found = gradient(jnp.concatenate([own, context]), batch, kind, NEGATIVES)
    tables = np.float64([own, context])
    np.testing.assert_allclose(loss, written(*tables), rtol=1e-5)
    assert words == 11  # all but the padding
    whole = np.zeros((2 * V, D), np.float32)
    there = batch.places < 2 * V
    whole[batch.places[there]] = found[there]
    expected = np.zeros_like(tables)
    for place in np.ndindex(tables.shape):  # by central differences
        by = np.zeros_like(tables)
        by[place] = 1e-5
        expected[place] = (written(*(tables + by)) - written(*(tables - by))) / 2e-5
    np.testing.assert_allclose(whole, expected.reshape(2 * V, D), rtol=1e-4, atol=1e-5)
    assert not np.any(np.asarray(found)[~there])


def test_a_window_reaches_as_far_as_it_is_told_and_not_into_another_sentence():
    window = np.asarray(windows(SENTENCES, REACH))
    for r, t in np.ndindex(WORDS.shape):
        assert np.flatnonzero(window[r, t]).tolist() == context_places(r, t)


def test_an_update_is_of_adagrad_and_of_the_words_of_the_batch_alone():
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(2 * V, D)).astype(np.float32)
    squares = rng.random(2 * V).astype(np.float32)
    batch = touch(ROWS, V)
    grads = np.asarray(gradient(jnp.asarray(vectors), batch, "skipgram", NEGATIVES)[2])
    tables = Tables(jnp.asarray(vectors), jnp.asarray(squares))
    after, loss, _ = update(tables, batch, np.float32(0.1), kind="skipgram", negatives=NEGATIVES)
    assert loss > 0
    there = batch.places < 2 * V
    places, grads = batch.places[there], grads[there]
    squares[places] += np.mean(grads**2, axis=1)
    vectors[places] -= 0.1 * grads / np.sqrt(squares[places])[:, None]
    np.testing.assert_allclose(after.vectors, vectors, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after.squares, squares, rtol=1e-5)
    assert sorted({*WORDS.ravel(), *(WORDS.ravel() + V), *(NOISE.ravel() + V)}) == places.tolist()
