import numpy as np
import pytest

from tests.data.make import data_config
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.synthetic import HELD_OUT, SHORTEST_HELD_OUT, draw_lines
from transformer_flax.errors import UserError

SPLITS = ("train", "valid", "test")


def draw(split, num_pairs=2_000, **fields):
    return draw_lines(split, data_config(num_pairs=num_pairs, **{"longest_trained": 6, "longest_tested": 9, **fields}))


def load(split="valid", source="copy", **fields):
    fields = {"num_pairs": 50, "longest_trained": 6, "longest_tested": 9, **fields}
    return load_pairs(data_config(source=source, **fields), split)


def lengths(lines):
    return [len(line.split(" ")) for line in lines]


@pytest.mark.parametrize("seed", [0, 1])
def test_no_line_is_in_two_splits_and_held_out_ones_all_differ(seed):
    for tested in (6, 9):
        train, valid, test = (set(draw(split, 20_000, longest_tested=tested, seed=seed)) for split in SPLITS)
        assert len(valid) == len(test) == HELD_OUT
        assert not train & (valid | test)
        assert not valid & test


def test_longer_lines_of_test_leave_train_and_valid_as_they_are():
    for split in ("train", "valid"):
        assert draw(split, longest_tested=9) == draw(split, longest_tested=20)


def test_every_line_of_test_is_longer_than_any_that_was_trained_on():
    train, valid, test = (set(lengths(draw(split))) for split in SPLITS)
    assert train == set(range(1, 7))
    assert valid == set(range(SHORTEST_HELD_OUT, 7))
    assert test == {7, 8, 9}
    assert set(lengths(draw("test", longest_tested=6))) == valid


def test_lengths_and_letters_are_equally_likely():
    train = draw("train", 20_000)
    assert len(train) == 20_000
    np.testing.assert_allclose(np.bincount(lengths(train))[1:] / 20_000, 1 / 6, atol=0.012)  # 4 standard deviations
    letters = "".join(train).replace(" ", "")
    shares = np.bincount([ord(letter) - ord("a") for letter in letters]) / len(letters)
    np.testing.assert_allclose(shares, np.full(26, 1 / 26), atol=0.003)


@pytest.mark.parametrize("split", SPLITS)
def test_the_seed_rules_the_lines(split):
    assert draw(split) == draw(split) != draw(split, seed=1)


@pytest.mark.parametrize("split", SPLITS[1:])
def test_held_out_lines_do_not_depend_on_how_many_are_trained_on(split):
    assert draw(split, 10) == draw(split, 2_000)


def test_a_line_is_copied_or_reversed_symbol_by_symbol():
    copied, reversed_ = (load(source=source) for source in ("copy", "reverse"))
    assert len(copied) == len(reversed_) == HELD_OUT
    every = range(HELD_OUT)
    for line, same, backwards in zip(draw("valid", 50), copied.read(every), reversed_.read(every), strict=True):
        assert same == (line, line)
        assert backwards == (line, " ".join(reversed(line.split(" "))))


def test_the_fingerprint_changes_with_whatever_changes_a_pair():
    plain = load()
    assert load(cache_dir="elsewhere").fingerprint == plain.fingerprint
    others = [load(source="reverse"), load("test"), load(seed=1), load(longest_trained=7)]
    assert len({pairs.fingerprint for pairs in [plain, *others]}) == 5
    assert load("train", num_pairs=51).fingerprint != load("train").fingerprint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_pairs": 0}, r"config\.data\.num_pairs is 0; source 'copy'"),
        ({"longest_trained": 3}, "longest_trained is 3 and longest_tested 9; .* needs 4 <= longest_trained"),
        ({"longest_tested": 5}, "longest_trained is 6 and longest_tested 5"),
        ({"longest_tested": 10_001}, "longest_tested <= 10,000 symbols"),
    ],
)
def test_lengths_and_numbers_that_cannot_be_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        load(**fields)
