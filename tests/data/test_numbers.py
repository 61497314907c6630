import numpy as np
import pytest

from tests.data.make import data_config
from transformer_flax.data import synthetic
from transformer_flax.data.synthetic import ALWAYS_TRAINED, HELD_OUT, number_pairs, split_numbers
from transformer_flax.errors import UserError

SPLITS = ("train", "valid", "test")


def numbers_config(**fields):
    return data_config(**{"source": "numbers", "num_pairs": 2_000, **fields})


def draw(split, num_pairs, seed=0, **fields):
    return split_numbers(split, numbers_config(num_pairs=num_pairs, seed=seed, **fields))


def digit_shares(numbers: np.ndarray) -> np.ndarray:
    """The share of numbers of 1, 2 .. 6 digits."""
    return np.bincount([len(str(n)) for n in numbers.tolist()], minlength=7)[1:] / len(numbers)


@pytest.mark.parametrize("seed", [0, 1])
def test_all_small_numbers_are_trained_on(seed):
    assert set(range(ALWAYS_TRAINED)) <= set(draw("train", ALWAYS_TRAINED, seed).tolist())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_number_is_in_two_splits(seed):
    train, valid, test = (set(draw(split, 20_000, seed).tolist()) for split in SPLITS)
    assert len(valid) == len(test) == HELD_OUT
    assert not train & valid
    assert not train & test
    assert not valid & test


@pytest.mark.parametrize("num_pairs", [1_000, 1_001, 100_000])
def test_train_has_the_number_of_pairs_asked_for(num_pairs):
    numbers = draw("train", num_pairs, seed=0)
    assert len(numbers) == num_pairs
    assert numbers.min() == 0
    assert numbers.max() < 10**6


@pytest.mark.parametrize("split", SPLITS[1:])
def test_held_out_numbers_do_not_depend_on_how_many_are_trained_on(split):
    np.testing.assert_array_equal(draw(split, 1_000, 0), draw(split, 5_000, 0))


def test_every_number_of_digits_is_equally_likely_in_train():
    draws = draw("train", 20_000, seed=0)[ALWAYS_TRAINED:]
    # 4 digits lose one in fourteen to the other splits; the standard deviation of a share is 0.003.
    np.testing.assert_allclose(digit_shares(draws), 1 / 6, atol=0.025)
    assert set(range(10)) <= set(draws.tolist())


@pytest.mark.parametrize("split", SPLITS[1:])
def test_every_number_of_digits_from_four_up_is_equally_likely_when_held_out(split):
    shares = digit_shares(draw(split, 2_000, seed=0))
    np.testing.assert_allclose(shares, [0, 0, 0, 1 / 3, 1 / 3, 1 / 3], atol=0.08)


@pytest.mark.parametrize("split", SPLITS)
def test_the_seed_rules_the_numbers(split):
    first, again, other = (draw(split, 2_000, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(np.unique(first), np.unique(other))


def test_all_of_test_may_be_longer_than_what_is_trained_on():
    digits = {
        split: {len(str(n)) for n in draw(split, 5_000, 0, longest_trained=4, longest_tested=7).tolist()}
        for split in SPLITS
    }
    assert digits == {"train": {1, 2, 3, 4}, "valid": {4}, "test": {5, 6, 7}}
    test = draw("test", 5_000, 0, longest_trained=4, longest_tested=7)
    assert len(set(test.tolist())) == HELD_OUT
    config = numbers_config(longest_trained=4, longest_tested=18)
    numbers = split_numbers("test", config)
    assert max(numbers) >= 10**17
    assert "Billiarden" in number_pairs(config, "test").read([int(np.argmax(numbers))])[0][1]


@pytest.mark.parametrize(("trained", "tested"), [(3, 6), (6, 5), (6, 19)])
def test_numbers_of_too_few_or_too_many_digits_are_refused(trained, tested):
    with pytest.raises(UserError, match=rf"longest_trained is {trained} and longest_tested {tested}; .* 18 digits"):
        number_pairs(numbers_config(longest_trained=trained, longest_tested=tested), "train")


@pytest.mark.parametrize(
    ("number", "language", "words"),
    [
        (0, "en", "zero"),
        (21, "en", "twenty-one"),
        (21, "de", "einundzwanzig"),
        (21, "fr", "vingt et un"),
        (999, "de", "neunhundertneunundneunzig"),
    ],
)
def test_numbers_are_spelt_in_their_language(number, language, words):
    as_source = number_pairs(numbers_config(source_language=language), "train")
    as_target = number_pairs(numbers_config(target_language=language), "train")
    [(source, _)], [(_, target)] = as_source.read([number]), as_target.read([number])
    assert source == target == words


@pytest.mark.parametrize("split", SPLITS)
def test_both_sides_spell_the_same_number(split):
    pairs = number_pairs(numbers_config(target_language="en"), split)
    assert len(pairs) == (2_000 if split == "train" else HELD_OUT)
    assert all(source == target for source, target in pairs.read(range(0, len(pairs), 50)))


@pytest.mark.parametrize("num_pairs", [-1, 0])
def test_a_number_of_pairs_out_of_range_is_refused(num_pairs):
    with pytest.raises(UserError, match=rf"config\.data\.num_pairs is {num_pairs}\b.*it must be at least 1"):
        number_pairs(numbers_config(num_pairs=num_pairs), "train")


@pytest.mark.parametrize("side", ["source_language", "target_language"])
def test_an_unknown_language_is_refused_before_any_pair_is_read(side):
    with pytest.raises(UserError, match="'xx'"):
        number_pairs(numbers_config(**{side: "xx"}), "train")


def test_a_language_that_cannot_spell_the_largest_number_is_refused_before_any_pair_is_read():
    with pytest.raises(UserError, match=r"num2words cannot spell \d{3},\d{3} in 'am'.*or lower longest_tested"):
        number_pairs(numbers_config(source_language="am", longest_trained=6, longest_tested=6), "train")


def test_equal_pairs_have_equal_fingerprints():
    assert number_pairs(numbers_config(), "train").fingerprint == number_pairs(numbers_config(), "train").fingerprint


@pytest.mark.parametrize(
    ("fields", "split"),
    [
        ({"seed": 1}, "valid"),
        ({}, "test"),
        ({"target_language": "fr"}, "valid"),
        ({"source_language": "fr"}, "valid"),
        ({"source_language": "de", "target_language": "en"}, "valid"),
    ],
)
def test_the_fingerprint_changes_with_seed_split_and_languages(fields, split):
    plain = number_pairs(numbers_config(), "valid")
    assert number_pairs(numbers_config(**fields), split).fingerprint != plain.fingerprint


def test_the_fingerprint_changes_with_the_version_of_the_speller(monkeypatch):
    plain = number_pairs(numbers_config(), "valid")
    monkeypatch.setattr(synthetic.importlib.metadata, "version", lambda name: f"another {name}")
    assert number_pairs(numbers_config(), "valid").fingerprint != plain.fingerprint


def test_the_fingerprint_of_train_changes_with_the_number_of_pairs():
    some, more = (number_pairs(numbers_config(num_pairs=n), "train").fingerprint for n in (2_000, 2_001))
    assert some != more
