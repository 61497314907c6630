"""Bounds hold: a translation begins with its prefix, and it and its input have a least and a greatest length."""

import pytest

from tests.decoding.translators import EMPTY, GREEDY, LETTERS, LINES, WORDS, assert_scored, found, make, texts
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID

# ----- prefixes


def test_all_translations_begin_with_the_prefix_that_is_for_all():
    for line, translations in zip(LINES, found(LINES, prefixes="quo"), strict=True):
        if line.strip():
            assert len(translations) == 3
            assert all(t.text.startswith("quo") for t in translations)
            assert_scored(make(), line, translations)
        else:
            assert translations == EMPTY


@pytest.mark.parametrize("window", [3, 100])
def test_each_translation_begins_with_its_own_prefix(window):
    prefixes = ["a", "b", "", "quo", "c", "whatever", "hel", "zzz", "", "", "d", ""]
    translations = found(LINES, prefixes=iter(prefixes), window=window)
    for line, prefix, of_line in zip(LINES, prefixes, translations, strict=True):
        assert all(t.text.startswith(prefix) for t in of_line) or not line.strip()
    free = found(LINES)
    assert [texts(translations)[i] for i in (2, 8)] == [texts(free)[i] for i in (2, 8)]


def test_a_blank_behind_a_prefix_changes_nothing():
    assert found(WORDS, prefixes="quo ") == found(WORDS, prefixes="quo")


def test_greedy_search_goes_on_as_it_would_have_gone_on_without_a_prefix():
    own = make(**GREEDY).translate(WORDS)
    for letters in (1, 3, 30):
        assert make(**GREEDY).translate(WORDS, prefixes=[text[:letters] for text in own]) == own


def test_a_prefix_longer_than_the_translation_may_be_is_put_out_and_closed():
    prefix = "abcdefghijklmnopqrstuvwxyz" + "abcdefghij"  # 36 letters and the end: all that any output may have
    [translations, [empty], *_] = found(["zz", "", "a"], prefixes=["abcdefghijklmnopqrstuvwxy", prefix, prefix])
    assert [t.text for t in translations] == ["abcdefghijklmnopqrstuvwxy"]
    assert empty.text == ""
    assert make(**GREEDY).translate(["a", "zz"], prefixes=[prefix, "ab"])[0] == prefix


def test_behind_a_prefix_there_is_room_for_the_end_symbol():
    prefix = "abcdefghijklmnopqrstu"  # 21 letters: with the end symbol, one more than rows of 16 have room for
    [[translation]] = found(["a"], prefixes=prefix, **GREEDY)
    assert translation.tokens == (*LETTERS.encode([prefix])[0], END_ID)


@pytest.mark.parametrize(("window", "before"), [(100, 0), (2, 2)])
def test_a_prefix_without_room_is_refused_by_the_number_of_its_line(window, before):
    search = make(window=window, **GREEDY).search(["", "", "", "a", "b"], prefixes=["", "", "", "x" * 37, "x" * 50])
    assert [next(search) for _ in range(before)] == [EMPTY] * before
    with pytest.raises(UserError, match=r"prefix of line 4 has 37 tokens.* at most 37"):
        next(search)


@pytest.mark.parametrize("prefixes", [["x"], ["x"] * 3, []])
def test_a_prefix_is_needed_for_each_line(prefixes):
    with pytest.raises(UserError, match="prefix"):
        found(["", ""], prefixes=prefixes)


# ----- bounds


def test_translations_are_at_most_as_long_as_allowed():
    for extra in (0, 5):
        for line, translations in zip(WORDS, found(WORDS, max_extra_length=extra), strict=True):
            lengths = [len(t.tokens) for t in translations]
            assert max(lengths) <= len(line) + 1 + extra
    assert any(len(t.tokens) == len(line) + 6 for line, ts in zip(WORDS, found(WORDS), strict=True) for t in ts)


def test_translations_are_at_least_as_long_as_asked_for_where_they_may():
    assert any(len(t.tokens) < 9 <= len(line) + 6 for line, ts in zip(WORDS, found(WORDS), strict=True) for t in ts)
    for line, translations in zip(WORDS, found(WORDS, min_length=9), strict=True):
        assert all(len(t.tokens) >= min(9, len(line) + 1 + 5) for t in translations)
    assert found([""], min_length=9) == [EMPTY]


@pytest.mark.parametrize(("window", "before"), [(100, 0), (2, 4)])
def test_an_input_that_is_too_long_is_refused_by_the_number_of_its_line(window, before):
    search = make(window=window, refuse_long=True, max_input_length=16).search(
        ["", " ", "", "", "", "x" * 16, "y" * 20]
    )
    assert [next(search) for _ in range(before)] == [EMPTY] * before
    with pytest.raises(UserError, match=r"line 6 has 17 tokens and at most 16 .* max_input_length"):
        next(search)


@pytest.mark.parametrize("long", [("x" * 16, "y"), ("y", "x" * 16)], ids=["source", "target"])
def test_a_line_that_is_too_long_to_score_is_refused_by_its_number(long):
    translator = make(refuse_long=True, max_input_length=16, max_extra_length=0, window=1)
    with pytest.raises(UserError, match="line 2 has 17 tokens and at most 16"):
        translator.score(*zip(("a", "a"), long, strict=True))


def test_a_long_input_is_translated_up_to_its_cut_and_all_are_counted_in_one_warning(caplog):
    lines = ["q" * 15 + "rest", "", "zz", "aardvarksaardvarksandmore", "quitelongenough"]  # the last has 16 tokens
    translations = found(lines, max_input_length=16, window=2)
    assert [record.getMessage() for record in caplog.records] == ["2 of 5 lines were cut to 16 tokens"]
    # To the model it is a sentence like any other, with its end symbol.
    expected = found([line[:15] for line in lines], max_input_length=16, refuse_long=True)
    assert texts(translations) == texts(expected)


def test_a_search_that_is_given_up_tells_of_cut_lines_among_those_it_has_read(caplog):
    search = make(max_input_length=16, window=2, **GREEDY).search(["q" * 20, "a", "b"])
    next(search)
    search.close()
    assert [record.getMessage() for record in caplog.records] == ["1 of 2 lines were cut to 16 tokens"]


def test_no_line_is_cut_without_need(caplog):
    found(["quitelongenough", ""], max_input_length=16)
    assert not caplog.records
