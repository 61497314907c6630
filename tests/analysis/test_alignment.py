import dataclasses

import numpy as np
import pytest

from transformer_flax.analysis.alignment import Gold, align, error_rate, read_gold, to_pharaoh, word_weights
from transformer_flax.analysis.attention import Attention, Sentence
from transformer_flax.errors import UserError

# Source "a bc", of pieces a | b | ·c | <end>; target "xy z", of pieces x | ·y | z | <end>.
SOURCE = Sentence("a bc", ("a", "b", "·c", "<end>"), ("a", "bc"), ((0,), (1,), (1,), ()))
TARGET = Sentence("xy z", ("x", "·y", "z", "<end>"), ("xy", "z"), ((0,), (0,), (1,), ()))
CROSS = np.array(
    [
        [[0.1, 0.3, 0.4, 0.2], [0.5, 0.1, 0.2, 0.2], [0.6, 0.1, 0.1, 0.2], [0.0, 0.0, 0.0, 1.0]],  # layer 0
        [[0.9, 0.0, 0.0, 0.1], [0.9, 0.0, 0.0, 0.1], [0.0, 0.0, 0.9, 0.1], [0.0, 0.4, 0.4, 0.2]],  # layer 1
    ]
)[:, None]
ATTENTION = Attention(SOURCE, TARGET, np.zeros((2, 1, 4, 4)), np.zeros((2, 1, 4, 4)), CROSS)


def test_pieces_that_are_attended_to_are_added_and_those_that_attend_averaged():
    # xy: x gives a 0.1 and bc 0.3 + 0.4, ·y gives a 0.5 and bc 0.1 + 0.2; the rest goes to the end symbol.
    np.testing.assert_allclose(word_weights(ATTENTION, layers=[0]), [[0.3, 0.5], [0.6, 0.2]])
    np.testing.assert_allclose(word_weights(ATTENTION, layers=None), [[0.6, 0.25], [0.3, 0.55]])  # of both layers


def test_a_word_attends_as_it_is_written_or_as_it_is_read():
    # What is read at a position was written at the one before it.
    np.testing.assert_allclose(word_weights(ATTENTION, layers=[1], by="read"), [[0.45, 0.45], [0, 0.8]])


def test_a_word_is_linked_with_what_it_attends_to_most():
    assert align(ATTENTION, layers=[0]) == {(1, 0), (0, 1)}
    assert align(ATTENTION, layers=[1]) == {(0, 0), (1, 1)}
    assert align(ATTENTION) == align(ATTENTION, layers=[1])  # the last layer, unless another is named
    assert to_pharaoh(align(ATTENTION, layers=[0])) == "0-1 1-0"


def test_heads_are_chosen():
    both = dataclasses.replace(ATTENTION, cross=np.concatenate([CROSS, CROSS[::-1]], axis=1))
    np.testing.assert_allclose(word_weights(both, layers=[0], heads=[1]), word_weights(ATTENTION, layers=[1]))
    np.testing.assert_allclose(word_weights(both, layers=[0]), word_weights(ATTENTION, layers=None))
    with pytest.raises(UserError, match="heads 0 to 1"):
        align(both, heads=[2])
    with pytest.raises(UserError, match="by is 'input'; it must be one of written, read"):
        align(both, by="input")


def test_a_token_of_two_words_counts_half_for_each():
    wide = Sentence("a b", ("a b", "<end>"), ("a", "b"), ((0, 1), ()))
    attention = dataclasses.replace(ATTENTION, source=wide, cross=np.full((1, 1, 4, 2), 0.5))
    np.testing.assert_allclose(word_weights(attention), 0.25)
    # As a target, a has half a token, and b one and a half, of which it takes the mean.
    wide = Sentence("a b", ("a b", "·b", "<end>"), ("a", "b"), ((0, 1), (1,), ()))
    attention = dataclasses.replace(ATTENTION, target=wide, cross=np.full((1, 1, 3, 4), 0.5))
    np.testing.assert_allclose(word_weights(attention), [[0.25, 0.5], [0.5, 1.0]])


def test_a_word_without_a_token_of_its_own_has_no_link():
    target = dataclasses.replace(TARGET, words_of=((0,), (0,), (), ()))
    assert align(dataclasses.replace(ATTENTION, target=target), layers=[0]) == {(1, 0)}


def test_gold_links_are_sure_or_possible(tmp_path):
    file = tmp_path / "gold.talp"
    file.write_text("0-0 1?2 2-1\n\n3p0\n")
    assert read_gold(file) == [
        Gold(frozenset({(0, 0), (2, 1)}), frozenset({(0, 0), (1, 2), (2, 1)})),
        Gold(frozenset(), frozenset()),
        Gold(frozenset(), frozenset({(3, 0)})),
    ]
    file.write_text("1-1 2?1\n")
    assert read_gold(file, first=1) == [Gold(frozenset({(0, 0)}), frozenset({(0, 0), (1, 0)}))]


@pytest.mark.parametrize("link", ["1:2", "1-2-3", "-1-2", "one-two", "0-4"])
def test_what_is_no_link_is_refused_with_its_line(tmp_path, link):
    file = tmp_path / "gold.talp"
    file.write_text(f"1-1\n2-2 {link}\n")
    with pytest.raises(UserError, match=rf"gold.talp, line 2: '{link}' is not a link; .* counted from 1"):
        read_gold(file, first=1)


def test_the_error_rate_is_that_worked_out_by_hand():
    gold = [
        Gold(frozenset({(0, 0), (1, 1)}), frozenset({(0, 0), (1, 1), (2, 1)})),
        Gold(frozenset(), frozenset({(0, 0)})),
    ]
    # The first sentence: A = {0-0, 2-1, 3-3}, of which one is sure and two are possible; the second: A = P.
    alignments = [frozenset({(0, 0), (2, 1), (3, 3)}), frozenset({(0, 0)})]
    assert error_rate(alignments, gold) == pytest.approx(1 - (1 + 2 + 0 + 1) / (3 + 2 + 1 + 0))
    assert error_rate([g.sure for g in gold], gold) == 0
    assert error_rate([frozenset({(5, 5)}), frozenset()], gold) == 1


def test_there_are_as_many_gold_lines_as_alignments():
    with pytest.raises(ValueError, match="shorter"):
        error_rate([frozenset(), frozenset()], [Gold(frozenset(), frozenset())])


@pytest.mark.parametrize("lines", [0, 2])
def test_without_any_link_there_is_no_error_rate(lines):
    with pytest.raises(UserError, match="there is no alignment error rate without links"):
        error_rate([frozenset()] * lines, [Gold(frozenset(), frozenset({(0, 0)}))] * lines)
