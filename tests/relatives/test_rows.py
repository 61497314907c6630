import dataclasses

import numpy as np
import pytest

from configs import vectors
from tests.relatives.planted import encode, planted_text, tokenise
from transformer_flax.relatives.word_vectors import ROW, Text, VectorConfig, count_words
from transformer_flax.special_tokens import END_ID

CONFIG = VectorConfig(**{**vectors.get_config().vectors, "rows_per_batch": 2, "subsample": 0.0})


@pytest.fixture(scope="module")
def sides():
    return [tokenise(planted_text(seed=seed))[1] for seed in (0, 1)]


def text(given, seed=0, **changes):
    return Text(given, count_words(given, 300), dataclasses.replace(CONFIG, **changes), seed)


def sentences_of(epoch) -> dict[int, list[int]]:
    """The words of each sentence of an epoch, in their order as far as rows do not cut it."""
    found: dict[int, list[int]] = {}
    for rows in epoch:
        for word, sentence in zip(rows.words.ravel().tolist(), rows.sentences.ravel().tolist(), strict=True):
            found.setdefault(sentence, []).append(word)
    return found


def test_an_epoch_has_every_sentence_once_without_its_end(sides):
    found = sentences_of(text(sides).epoch(0))
    assert set(found.pop(-1)) == {0}
    assert len(found) == 1_200
    for i, words in found.items():
        side = sides[i // 600]
        assert sorted(words) == sorted(side[i % 600][:-1].tolist())
        assert END_ID not in words


def test_rows_are_of_the_shapes_and_bounds_that_are_asked_for(sides):
    batches = list(text(sides, window=3).epoch(0))
    assert len(batches) == -(-1_200 * 6 // (2 * ROW))
    reach = np.stack([rows.reach for rows in batches])
    assert set(reach.ravel()) == {1, 2, 3}
    assert {rows.words.shape for rows in batches} == {(2, ROW)}
    assert {rows.noise.shape for rows in batches} == {(2, CONFIG.shared_negatives)}
    done = [rows.done for rows in batches]
    assert done == sorted(done)
    assert 0 == done[0] < done[-1] < 1


def test_languages_are_mixed_from_the_first_batches_on(sides):
    batches = list(text(sides).epoch(0))
    first = np.concatenate([rows.sentences for rows in batches[: len(batches) // 4]])
    assert {*first[first >= 0] // 600} == {0, 1}


def test_an_epoch_is_a_function_of_seed_and_number(sides):
    def first(seed, epoch):
        return next(text(sides, seed).epoch(epoch))

    same, again = first(0, 0), first(0, 0)
    for field in ("words", "sentences", "reach", "noise"):
        np.testing.assert_array_equal(getattr(same, field), getattr(again, field))
    assert not np.array_equal(same.words, first(1, 0).words)
    assert not np.array_equal(same.words, first(0, 1).words)


def test_noise_is_drawn_by_frequency_to_a_power(sides):
    counts = count_words(sides, 300)
    rows = [rows for epoch in range(20) for rows in text(sides, shared_negatives=64).epoch(epoch)]
    drawn = np.bincount(np.concatenate([r.noise.ravel() for r in rows]), minlength=300)
    wanted = counts**0.75 / np.sum(counts**0.75)
    np.testing.assert_allclose(drawn / drawn.sum(), wanted, atol=0.003)
    assert not drawn[counts == 0].any()


def test_frequent_words_are_left_out_as_often_as_the_paper_says(sides):
    counts = count_words(sides, 300)
    found = sentences_of(rows for epoch in range(20) for rows in text(sides, subsample=0.02).epoch(epoch))
    found.pop(-1)
    kept = np.bincount([word for words in found.values() for word in words], minlength=300) / 20
    wanted = np.minimum(1, np.sqrt(0.02 / (counts[counts > 0] / counts.sum())))
    np.testing.assert_allclose(kept[counts > 0] / counts[counts > 0], wanted, atol=0.04)


def test_pairs_are_merged_into_one_sentence_by_how_far_along_words_stand():
    tokenizer, _ = tokenise(["a b", "c", "p q r s"])
    source, target = (encode(tokenizer, side) for side in (["a b", "c"], ["p q r s", ""]))
    merged = text([source, target], sides="interleaved")
    words, sentences = merged._take(np.array([1, 0]))
    spelt = "".join(tokenizer.decode([word]) for word in words if word != END_ID)
    # One has a at 0, b at 1/3; the other p at 0, q at 1/5, r at 2/5, s at 3/5.
    assert spelt == "capqbrs"
    assert sentences[words != END_ID].tolist() == [1] + 6 * [0]
    found = sentences_of(merged.epoch(0))
    assert {number: len(line) for number, line in found.items() if number >= 0} == {0: 6, 1: 1}
