"""Search against enumeration, on toy models whose next token depends on the whole prefix."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_flax.decoding.search import beam_search, greedy_search, length_penalty
from transformer_flax.special_tokens import BEGIN_ID, END_ID, NUM_SPECIAL, PAD_ID

BUCKETS = 97


class Toy:
    """Logits are a random function of a hash of all tokens so far, which is the cache: as in a real model, a cache that
    follows the wrong hypothesis gives wrong logits."""

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 2.0):
        self.table = scale * np.random.default_rng(seed).normal(size=(BUCKETS, vocab_size)).astype(np.float32)
        self.vocab_size = vocab_size

    def begin(self, batch: int, beam_size: int):
        return {"hash": jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, beam_size))}

    @staticmethod
    def hash(before, token):
        return (before * 31 + token * 17 + 7) % BUCKETS

    def step(self, tokens, position, cache):
        now = self.hash(cache["hash"], tokens)
        return jnp.asarray(self.table)[now], {"hash": now}

    def log_prob(self, sentence: int, tokens) -> float:
        """log P of a whole sequence, computed apart from the search."""
        total, state = 0.0, sentence
        for before, token in zip((BEGIN_ID, *tokens), tokens, strict=False):
            state = self.hash(state, before)
            logits = self.table[state].astype(np.float64)
            total += logits[token] - np.log(np.exp(logits).sum())
        return total

    def best(self, sentence: int, limit: int, alpha: float):
        """All sequences that end within the limit, best first, as (score, tokens)."""
        words = range(NUM_SPECIAL, self.vocab_size)
        scored = []
        for length in range(limit):
            for prefix in itertools.product(words, repeat=length):
                tokens = (*prefix, END_ID)
                scored.append((self.log_prob(sentence, tokens) / ((5 + len(tokens)) / 6) ** alpha, tokens))
        return sorted(scored, reverse=True)


def search(toy, limits, beam_size, alpha, max_length=None):
    limits = jnp.asarray(limits, jnp.int32)
    max_length = max_length or int(limits.max())

    @jax.jit
    def run(limits):
        return beam_search(
            toy.step, toy.begin(len(limits), beam_size), limits, beam_size=beam_size, max_length=max_length, alpha=alpha
        )

    return jax.device_get(run(limits))


def words(row):
    return tuple(int(t) for t in row if t != PAD_ID)


def test_length_penalty_is_the_papers():
    assert length_penalty(1, 0.6) == 1
    assert length_penalty(7, 1.0) == 2
    assert length_penalty(19, 0.5) == 2


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0, -0.5])
def test_a_beam_that_holds_every_prefix_finds_the_best_of_all_sequences(alpha):
    toy, limits = Toy(vocab_size=NUM_SPECIAL + 3, seed=3), [4, 2, 3]
    found = search(toy, limits, beam_size=3**4, alpha=alpha)
    for sentence, limit in enumerate(limits):
        score, tokens = toy.best(sentence, limit, alpha)[0]
        assert found.scores[sentence, 0] == pytest.approx(score, abs=1e-5)
        assert words(found.tokens[sentence, 0]) == tokens


def test_all_hypotheses_of_a_full_beam_have_their_true_scores_in_order():
    toy = Toy(vocab_size=NUM_SPECIAL + 2, seed=1)
    found = search(toy, [4], beam_size=2**4, alpha=0.6)
    expected = toy.best(0, 4, 0.6)
    # The bound may stop the search once the best is known, so the first is sure and every other is a true score.
    by_tokens = {tokens: score for score, tokens in expected}
    for row, score in zip(found.tokens[0], found.scores[0], strict=True):
        if score > -np.inf:
            assert by_tokens[words(row)] == pytest.approx(score, abs=1e-5)
    assert np.all(np.diff(found.scores[0][found.scores[0] > -np.inf]) <= 0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("alpha", [0.0, 0.6, 3.0])
def test_beam_of_one_is_greedy_search(seed, alpha):
    toy, limits = Toy(vocab_size=7, seed=seed), jnp.array([1, 5, 12, 12], jnp.int32)
    greedy = greedy_search(toy.step, toy.begin(4, 1), limits, max_length=12, alpha=alpha)
    beam = search(toy, limits, beam_size=1, alpha=alpha)
    np.testing.assert_array_equal(beam.tokens, greedy.tokens)
    np.testing.assert_allclose(beam.scores, greedy.scores, atol=1e-5)


def test_scores_are_log_probabilities_over_the_penalty_of_all_tokens_with_the_end():
    toy = Toy(vocab_size=9, seed=5)
    found = search(toy, [10, 10], beam_size=4, alpha=0.6)
    for sentence in range(2):
        tokens = words(found.tokens[sentence, 0])
        expected = toy.log_prob(sentence, tokens) / ((5 + len(tokens)) / 6) ** 0.6
        assert found.scores[sentence, 0] == pytest.approx(expected, abs=1e-5)


def test_no_beam_beats_enumeration_and_a_full_one_reaches_it():
    toy = Toy(vocab_size=NUM_SPECIAL + 3, seed=8, scale=0.5)
    best = toy.best(0, 5, 0.6)[0][0]
    scores = [search(toy, [5], beam_size=k, alpha=0.6).scores[0, 0] for k in (1, 4, 3**5)]
    assert scores[-1] == pytest.approx(best, abs=1e-5)
    assert max(scores) <= best + 1e-5


def test_bad_hypotheses_that_end_early_do_not_end_the_search():
    # A sure model: from each word to the next, e^8 times as likely as anything else. The rest of a beam is then bad
    # luck, of which much ends at once; nothing of it may be taken for the answer.
    class Sure(Toy):
        def step(self, tokens, position, cache):
            following = jnp.where(position < 8, NUM_SPECIAL + position, END_ID)
            return 8.0 * jnp.broadcast_to(jnp.arange(12) == following, (*tokens.shape, 12)), cache

    found = search(Sure(vocab_size=12), [20], beam_size=4, alpha=0.6)
    assert words(found.tokens[0, 0]) == (*range(NUM_SPECIAL, NUM_SPECIAL + 8), END_ID)


class Never(Toy):
    """A model that gives the end symbol next to nothing."""

    def __init__(self):
        super().__init__(vocab_size=5)
        self.table[:, END_ID] = -50.0


def test_where_nothing_ends_the_limit_of_each_sentence_ends_it():
    found = search(Never(), [3, 6, 1], beam_size=3, alpha=0.6)
    for sentence, limit in enumerate([3, 6, 1]):
        assert found.tokens[sentence, 0, limit - 1] == END_ID
        assert END_ID not in found.tokens[sentence, 0, : limit - 1]
        assert np.isfinite(found.scores[sentence, 0])


def test_a_beam_wider_than_the_vocabulary_works():
    toy = Toy(vocab_size=NUM_SPECIAL + 1, seed=2)
    assert search(toy, [3], beam_size=20, alpha=0.6).scores[0, 0] == pytest.approx(toy.best(0, 3, 0.6)[0][0], abs=1e-5)


def test_a_sentence_is_searched_alike_in_any_batch():
    toy = Toy(vocab_size=11, seed=4)
    together = search(toy, [4, 9, 20], beam_size=4, alpha=0.6)
    for sentence, limit in enumerate([4, 9, 20]):
        # Sentences are told apart by their place in the batch; the ones before it get a limit of 1.
        alone = search(toy, [1] * sentence + [limit], beam_size=4, alpha=0.6, max_length=20)
        np.testing.assert_array_equal(alone.tokens[sentence], together.tokens[sentence])
        np.testing.assert_allclose(alone.scores[sentence], together.scores[sentence], atol=1e-6)


def test_the_search_stops_when_no_living_hypothesis_can_win():
    steps = []

    class Counted(Toy):
        def step(self, tokens, position, cache):
            jax.debug.callback(lambda p: steps.append(int(p)), position)
            return super().step(tokens, position, cache)

    toy = Counted(vocab_size=6)
    toy.table[:, END_ID] = 20.0  # the end is all but certain at once
    search(toy, [50, 50], beam_size=4, alpha=0.6)
    jax.effects_barrier()
    assert 1 <= len(steps) <= 2
