"""Search against enumeration, on toy models whose next token depends on the whole prefix; penalties; ensembles."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.compiled import (
    BATCH,
    FEW,
    FULL,
    GNMT,
    LENGTH,
    LONG_RULES,
    NONE,
    PENALTIES,
    RULES,
    SENTENCES,
    TOYS,
    assert_equal,
    assert_same,
    beam,
    bounds_of,
    compiled_beam,
    draw,
    greedy,
    ranked,
    score,
    words,
)
from tests.decoding.toy import (
    STATES,
    VOCAB_SIZE,
    WORDS,
    A,
    B,
    C,
    Rule,
    Toy,
    begin,
    best_log_probs,
    everything,
    hashed,
    plain_beam,
    plain_greedy,
    steady,
    step,
    written,
)
from transformer_flax.decoding.search import (
    Bounds,
    Hypotheses,
    LengthPenalty,
    beam_search,
    combine,
    ensemble,
    follow,
)
from transformer_flax.decoding.settings import Sampling
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import BEGIN_ID, END_ID, PAD_ID

# Parts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(temperature=-0.5), "temperature is -0.5; it must be a number from 0"),
        (lambda: Sampling(temperature=math.nan), "temperature is nan; it must be a number from 0"),
        (lambda: Sampling(temperature=math.inf), "temperature is inf; it must be a number from 0"),
        (lambda: Sampling(top_k=-1), "top_k is -1; it must be a whole number from 1, or 0 for all tokens"),
        (lambda: Sampling(top_p=0.0), "top_p is 0.0; it must be a number above 0 and at most 1"),
        (lambda: Sampling(top_p=1.5), "top_p is 1.5; it must be a number above 0 and at most 1"),
        (lambda: Sampling(top_p=math.nan), "top_p is nan; it must be a number above 0 and at most 1"),
        (lambda: Sampling(temperature=cast(Any, "1")), "temperature is '1'; it must be a number"),
        (lambda: Sampling(top_k=cast(Any, 2.5)), "top_k is 2.5; it must be a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(UserError) as refusal:
        make()
    assert str(refusal.value).startswith(message)


def test_settings_of_samples_may_be_numbers_of_numpy():
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(7))
    assert sampling == Sampling(temperature=0.5, top_k=3, seed=7)
    assert {type(value) for value in vars(sampling).values()} == {int, float}


def test_of_equal_hypotheses_the_first_is_the_better():
    tokens = np.arange(8).reshape(1, 4, 2)
    pool = Hypotheses(tokens, np.array([[-4.0, -3.0, -2.0, -1.0]]), np.array([[-2.0, -1.0, -1.0, -3.0]]))
    best = pool.best(3)
    assert best.tokens[0].tolist() == [[2, 3], [4, 5], [0, 1]]
    assert best.log_probs[0].tolist() == [-3.0, -2.0, -4.0]
    assert best.scores[0].tolist() == [-1.0, -1.0, -2.0]


def test_hypotheses_follow_their_parents():
    leaf = np.arange(2 * 3 * 2).reshape(2, 3, 2)
    followed = follow(leaf, np.array([[2, 0, 0, 1], [1, 1, 2, 0]]))
    assert followed.shape == (2, 4, 2)
    assert followed[0].tolist() == [[4, 5], [0, 1], [0, 1], [2, 3]]
    assert followed[1].tolist() == [[8, 9], [8, 9], [10, 11], [6, 7]]


# Beam search


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("toy", TOYS, ids=["sharp", "flat"])
def test_a_beam_that_holds_every_prefix_finds_the_best_of_all_sequences_in_order(toy, penalty):
    found = beam(toy, SENTENCES, RULES, penalty, beam_size=FULL, nbest=12)
    for sentence, rule in enumerate(RULES):
        assert_same(found, sentence, ranked(everything([toy], sentence, rule), penalty))


@pytest.mark.parametrize("nbest", [1, 3])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_a_narrow_beam_finds_what_it_finds_without_stopping_early(penalty, nbest):
    for toy in TOYS:
        found = beam(toy, SENTENCES, LONG_RULES, penalty, nbest=nbest)
        for sentence, rule in enumerate(LONG_RULES):
            assert_same(found, sentence, ranked(plain_beam([toy], sentence, rule, 3), penalty))


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_more_hypotheses_have_the_same_best(penalty):
    for toy in TOYS:
        for rules in (RULES, LONG_RULES):
            one, several = (beam(toy, SENTENCES, rules, penalty, nbest=n) for n in (1, 3))
            assert_equal(one, jax.tree.map(lambda leaf: leaf[:, :1], several))


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_greedy_search_takes_the_likeliest_token_and_a_beam_of_one_finds_that_output_or_a_better_one(penalty):
    for toy in TOYS:
        for rules in (RULES, LONG_RULES):
            found = greedy(toy, SENTENCES, rules, penalty)
            one = beam(toy, SENTENCES, rules, penalty, beam_size=1)
            assert np.all(one.scores >= found.scores - 1e-5)
            for sentence, rule in enumerate(rules):
                assert_same(found, sentence, ranked([plain_greedy([toy], sentence, rule)], penalty))
                assert_same(one, sentence, ranked(plain_beam([toy], sentence, rule, 1), penalty))


@pytest.mark.parametrize(("beam_size", "most"), [(2, 0.03), (4, 0.002)])
def test_a_narrow_beam_seldom_misses_the_best_of_all_sequences(beam_size, most):
    # If a hypothesis that ends took the place of one that lives on, it would miss 0.34 and 0.009.
    toy, sentences, longest = hashed(seed=21, scale=1.0), np.arange(60 * BATCH).reshape(60, BATCH), 6
    found = [beam(toy, part, [Rule(longest)] * BATCH, NONE, beam_size=beam_size).scores[:, 0] for part in sentences]
    misses = np.concatenate(found) < best_log_probs(toy, sentences.ravel(), longest) - 1e-4
    assert misses.mean() <= most


def test_no_beam_beats_enumeration_and_a_full_one_reaches_it():
    toy = TOYS[1]
    best = ranked(everything([toy], 0, Rule(5)), GNMT)[0][0]
    scores = [beam(toy, [0], [Rule(5)], beam_size=k, nbest=n).scores[0, 0] for k, n in [(1, 1), (3, 1), (FULL, 12)]]
    assert max(scores) <= best + 1e-5
    assert scores[-1] == pytest.approx(best, abs=1e-5)


def test_the_end_symbol_counts_in_the_length():
    # log 0.4 / 2 = -0.46 beats log 0.2 / 3 = -0.54; without the end symbol, log 0.4 / 1 = -0.92 would lose to
    # log 0.2 / 2 = -0.80.
    toy = written({(): {A: 0.8, B: 0.2}, (A,): {END_ID: 0.5, C: 0.5}, (A, C): {END_ID: 0.5, A: 0.5}})
    found = beam(toy, [0], [Rule(3)], ("length", 1.0), nbest=3)
    expected = [(0.4, (A, END_ID)), (0.2, (A, C, END_ID)), (0.2, (B, END_ID))]
    assert_same(found, 0, [(math.log(p) / len(tokens), math.log(p), tokens) for p, tokens in expected])


def test_the_second_best_is_sure_before_the_search_stops():
    # After two tokens 0.42 and 0.2 have ended and 0.28 lives: it cannot be the best any more, but the second.
    toy = written(
        {(): {A: 0.7, B: 0.2, END_ID: 0.1}, (A,): {END_ID: 0.6, C: 0.4}, (A, C): {END_ID: 0.9, A: 0.1}},
    )
    found = beam(toy, [0], [Rule(8)], NONE, nbest=3)
    expected = [(0.42, (A, END_ID)), (0.252, (A, C, END_ID)), (0.2, (B, END_ID))]
    assert_same(found, 0, [(math.log(p), math.log(p), tokens) for p, tokens in expected])


def test_the_search_goes_on_while_the_kindest_penalty_ahead_gives_hope():
    # Where length is favoured, that is the last: log 0.8 = -0.223 has ended, and what lives with log 0.2 = -1.609 comes
    # to -0.201 at 8 tokens, but to -0.230 at 7.
    certain = {(A,) * length: {A: 1.0} for length in range(1, 7)}
    toy = written({(): {END_ID: 0.8, A: 0.2}} | certain)
    assert words(beam(toy, [0], [Rule(8)], ("length", 1.0)).tokens[0, 0]) == (*(A,) * 7, END_ID)
    # Where shortness is, that is the next: log 0.36 = -1.02 has ended, and what lives with log 0.64 = -0.45 comes to
    # -0.89 at 2 tokens, but to -1.34 at 3.
    toy = written({(): {END_ID: 0.36, A: 0.64}})
    assert words(beam(toy, [0], [Rule(8)], ("length", -1.0)).tokens[0, 0]) == (A, END_ID)


def test_a_hypothesis_ends_where_the_end_symbol_is_among_twice_as_many_continuations_as_live():
    # The end symbol comes third at first. Two continuations do not try it, four do.
    toy = written(
        {(): {A: 0.35, B: 0.3, END_ID: 0.2, C: 0.15}}
        | {(word,): {A: 0.3, B: 0.25, C: 0.25, END_ID: 0.2} for word in WORDS}
    )
    assert words(beam(toy, [0], [Rule(8)], NONE, beam_size=1).tokens[0, 0]) == (A, A, END_ID)
    assert words(beam(toy, [0], [Rule(8)], NONE, beam_size=2).tokens[0, 0]) == (END_ID,)


def test_a_hypothesis_that_ends_takes_no_place_of_those_that_live_on():
    # log 0.6 / 1 = -0.51 ends at once; log 0.4 / 2 = -0.46 lives on beside it.
    toy = written({(): {END_ID: 0.6, A: 0.4}})
    assert words(beam(toy, [0], [Rule(8)], ("length", 1.0), beam_size=1).tokens[0, 0]) == (A, END_ID)
    assert words(greedy(toy, [0], [Rule(8)], ("length", 1.0)).tokens[0, 0]) == (END_ID,)


def test_bad_hypotheses_that_end_early_do_not_end_the_search():
    # A sure model: from each word to the next, e^8 times as likely as anything else. The rest of a beam is then bad
    # luck, of which much ends at once; nothing of it may be taken for the answer.
    answer = (A, B, C, A, B, C, A, END_ID)
    logits = np.zeros((STATES, VOCAB_SIZE), np.float32)
    logits[np.arange(1, 9), answer] = 8.0
    counting = np.broadcast_to(np.minimum(np.arange(1, STATES + 1), STATES - 1)[:, None], logits.shape)
    sure = Toy(counting.astype(np.int32), logits)
    assert words(beam(sure, [0], [Rule(8)]).tokens[0, 0]) == answer
    assert words(beam(sure, [0], [Rule(8)], nbest=3).tokens[0, 0]) == answer


def test_where_nothing_ends_the_limit_of_each_sentence_ends_it():
    toy = hashed(seed=2)
    toy.logits[:, END_ID] = -50.0  # a model that gives the end symbol next to nothing
    limits = [3, 6, 1, 8]
    for found in (beam(toy, range(4), [Rule(x) for x in limits]), greedy(toy, range(4), [Rule(x) for x in limits])):
        for sentence, limit in enumerate(limits):
            assert found.tokens[sentence, 0, limit - 1] == END_ID
            assert END_ID not in found.tokens[sentence, 0, : limit - 1]
            assert len(words(found.tokens[sentence, 0])) == limit
            assert -60 * limit < found.log_probs[sentence, 0] < -40


def test_where_fewer_hypotheses_exist_than_are_asked_for_places_stay_unused():
    toy = hashed(seed=5)
    found = beam(toy, range(3), [Rule(1), Rule(4), Rule(2)], beam_size=FULL, nbest=12)
    assert np.isfinite(found.scores).sum(axis=1).tolist() == [1, 12, 4]
    assert np.isfinite(found.log_probs).sum(axis=1).tolist() == [1, 12, 4]
    assert np.all(found.scores[~np.isfinite(found.scores)] == -np.inf)
    assert not found.tokens[~np.isfinite(found.scores)].any()


def test_padding_and_the_begin_symbol_are_never_put_out():
    toy = hashed(seed=6)
    toy.logits[:, [PAD_ID, BEGIN_ID]] += 9.0
    for found in (
        beam(toy, SENTENCES, LONG_RULES, nbest=3),
        greedy(toy, SENTENCES, LONG_RULES),
        draw(toy, SENTENCES, LONG_RULES, FEW, Sampling()),
    ):
        for row, log_prob in zip(found.tokens.reshape(-1, LENGTH), found.log_probs.ravel(), strict=True):
            if log_prob > -np.inf:
                assert set(words(row)) <= {END_ID, *WORDS}
                assert words(row)[-1] == END_ID
                assert not row[len(words(row)) :].any()


def test_a_sentence_is_searched_alike_alone_and_in_any_batch():
    # Some are done long before others: their results must not change while the others go on.
    toy, order = TOYS[0], np.random.default_rng(0).permutation(BATCH)
    together = beam(toy, SENTENCES, LONG_RULES, nbest=3)
    shuffled = beam(toy, order, [LONG_RULES[i] for i in order], nbest=3)
    assert_equal(shuffled, jax.tree.map(lambda leaf: leaf[order], together))
    alone = [beam(toy, [i], [rule], nbest=3, batch=1) for i, rule in enumerate(LONG_RULES)]
    assert_equal(jax.tree.map(lambda *leaves: np.concatenate(leaves), *alone), together)


def test_no_penalty_is_a_plain_number_and_serves_as_well():
    # Above, it stands in an array with the others.
    found = jax.jit(
        lambda: beam_search(
            step,
            begin(TOYS[0], jnp.arange(BATCH), 3),
            Bounds(**bounds_of(LONG_RULES)),
            LengthPenalty("none", 1.0),
            beam_size=3,
        )
    )()
    assert_equal(found, beam(TOYS[0], SENTENCES, LONG_RULES, NONE))


def test_the_best_continuations_are_chosen_without_sorting_all_of_them():
    # XLA's CPU compiler sees a choice of the best only in certain uses of `top_k`, and sorts in others.
    settings = {"step": step, "beam_size": 3, "nbest": 1}
    lowered = compiled_beam.lower([TOYS[0]], jnp.arange(BATCH), bounds_of(RULES), 0, 0.6, **settings)
    program = lowered.compile().as_text()
    assert program.count('custom_call_target="TopK"') == 3
    assert " sort(" not in program


STEPS: list[int] = []


def counted_step(tokens, parents, position, cache):
    jax.debug.callback(lambda p: STEPS.append(int(p)), position)
    return step(tokens, parents, position, cache)


@pytest.mark.parametrize(
    ("end", "alpha", "longest", "nbest", "steps"),
    [
        (0.99, 1.0, 8, 1, 1),
        # log 0.8 = -0.22 has ended. What lives after n words can reach n log 0.2 / 8 = -0.20 n,
        (0.8, 1.0, 8, 1, 2),
        # and where a sentence has less room, n log 0.2 / 4 = -0.40 n.
        (0.8, 1.0, 4, 1, 1),
        # The third best is (2 log 0.2 + log 0.8) / 3 = -1.15, which -0.20 n passes with n = 6.
        (0.8, 1.0, 8, 3, 6),
        # Where a sentence has room for fewer outputs than are asked for, nothing lives on after the last of them.
        (0.8, 1.0, 2, 3, 2),
        # Where shortness is favoured, the next place has the largest penalty: 2 log 0.6 = -1.02 is below
        # log 0.4 = -0.92.
        (0.4, -1.0, 8, 1, 1),
    ],
)
def test_the_search_stops_when_no_living_hypothesis_can_come_among_the_best(end, alpha, longest, nbest, steps):
    toy = steady({END_ID: end, A: 1 - end})
    STEPS.clear()
    beam(toy, [0, 1], [Rule(longest)] * 2, ("length", alpha), nbest=nbest, step=counted_step)
    jax.effects_barrier()
    assert sorted(STEPS) == list(range(steps))


def test_greedy_search_stops_when_all_have_ended():
    STEPS.clear()
    found = greedy(steady({END_ID: 0.9, A: 0.1}), [0, 1, 2], [Rule(8), Rule(8, shortest=3), Rule(8)], step=counted_step)
    jax.effects_barrier()
    assert sorted(STEPS) == [0, 1, 2]
    assert [words(row[0]) for row in found.tokens] == [(END_ID,), (A, A, END_ID), (END_ID,)]


def test_of_equal_tokens_greedy_search_takes_the_first():
    toy = written({(): {B: 0.5, C: 0.5}})
    assert words(greedy(toy, [0], [Rule(5)]).tokens[0, 0]) == (B, END_ID)
    assert words(beam(toy, [0], [Rule(5)], beam_size=1).tokens[0, 0]) == (B, END_ID)


def low_precision_step(tokens, parents, position, cache):
    logits, cache = step(tokens, parents, position, cache)
    return logits.astype(jnp.bfloat16), cache


def test_logits_of_low_precision_are_normalised_in_high():
    toy = TOYS[0]._replace(logits=TOYS[0].logits.astype(jnp.bfloat16).astype(np.float32))
    found = greedy(toy, SENTENCES, LONG_RULES, step=low_precision_step)
    assert_equal(found, greedy(toy, SENTENCES, LONG_RULES))


# Prefixes; the rules above have them too


@pytest.mark.parametrize("output", [(END_ID,), (A, END_ID), (C, C, A, B, A, A, B, END_ID)])
def test_a_prefix_with_the_end_symbol_is_forced_decoding(output):
    toy, rule = TOYS[0], Rule(LENGTH, shortest=3, prefix=output)
    # All others of the batch are free, and go on or are done as they like.
    rules = [rule, *[Rule(LENGTH)] * (BATCH - 1)]
    [(log_prob, tokens)] = everything([toy], 0, rule)
    assert tokens == output
    expected = [(score(log_prob, output, GNMT), log_prob, output)]
    assert_same(beam(toy, SENTENCES, rules, nbest=3), 0, expected)
    assert_same(greedy(toy, SENTENCES, rules), 0, expected)
    assert_same(draw(toy, SENTENCES, rules, FEW, Sampling()), 0, expected * 3)


@pytest.mark.parametrize(
    ("kind", "alpha", "length", "expected"),
    [
        ("gnmt", 0.6, 1, 1),  # a single token is the unit
        ("gnmt", 1.0, 7, 2),
        ("gnmt", 0.5, 19, 2),
        ("gnmt", -1.0, 7, 0.5),
        ("gnmt", 0.0, 50, 1),
        ("length", 0.6, 1, 1),
        ("length", 1.0, 7, 7),
        ("length", 0.5, 16, 4),
        ("length", -1.0, 8, 0.125),
        ("length", 0.0, 50, 1),
        ("length", 2, 7, 49),
        ("length", -1, 8, 0.125),  # an integer has no negative powers in JAX,
        ("length", 6, 100, 1e12),  # and large ones overflow
        ("none", 2.0, 7, 1),
    ],
)
def test_length_penalties(kind, alpha, length, expected):
    penalty = LengthPenalty(kind, alpha)
    assert penalty(length) == pytest.approx(expected)
    np.testing.assert_allclose(penalty(jnp.array([length])), expected, rtol=1e-6)


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
