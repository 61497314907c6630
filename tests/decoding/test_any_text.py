"""The translator on any text at all."""

import dataclasses
import functools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.decoding.translators import ONE, assert_scored, new
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.special_tokens import END_ID

WORDS_AND_WORSE = [
    *(
        "one",
        "two",
        "three",
        " ",
        "  ",
        "e\u0301",
        "\u0301",
        "ß",
        "🎉",
        "👩\u200d👩\u200d👧",
        "שלום",
        "\u202e",
        "مرحبا",
    ),
    *("\n", "\r", "\r\n", "\t", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "\x00", "\ufeff", "<end>"),
]
any_line = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(WORDS_AND_WORSE), max_size=8).map("".join))
any_lines = st.lists(any_line, max_size=6)
SMALL = {"beam_size": 2, "nbest": 1, "max_extra_length": 4, "max_input_length": 16}


def law(examples: int):
    return settings(derandomize=True, max_examples=examples)


@pytest.fixture(scope="module")
def bytewise():
    """Translators with a tokenizer of bytes, by batch size."""
    tokenizer = Tokenizer.train(WORDS_AND_WORSE * 3, 280)
    config = dataclasses.replace(ONE, vocab_size=tokenizer.vocab_size)
    return functools.cache(lambda size: new((config,), tokenizer, batch_size=size, **SMALL))


def assert_alike(some, others):
    """The same texts, but where two are as good as each other: sums in another order may prefer either."""
    for [one], [other] in zip(some, others, strict=True):
        assert one.text == other.text or one.score == pytest.approx(other.score, abs=1e-4)


@law(40)
@given(any_lines)
@example(["one", "x" * 100_000, "two"])
@example(["", "\n", "one\r\x0b\x1c\u2028two", "\u0301", "\x00"])
def test_any_lines_become_as_many_lines_whatever_the_size_of_the_batches(bytewise, lines):
    translations = list(bytewise(7).search(lines))
    assert len(translations) == len(lines)
    for line, [translation] in zip(lines, translations, strict=True):
        assert len(f"{translation.text}.".splitlines()) == 1
        assert translation.text == "" or line.strip()
        assert np.isfinite(translation.score)
    assert [best.text for [best] in translations] == bytewise(7).translate(lines)
    for size in (1, 64):
        assert_alike(translations, bytewise(size).search(lines))


@law(25)
@given(any_lines, st.randoms(use_true_random=False))
@example(["one", "x" * 100_000, "two", "🎉"], random.Random(0))
def test_a_line_becomes_the_same_in_any_order_and_company(bytewise, lines, shuffler):
    translations = list(bytewise(7).search(lines))
    order = list(range(len(lines)))
    shuffler.shuffle(order)
    assert_alike(bytewise(7).search([lines[i] for i in order]), [translations[i] for i in order])
    kept = order[: len(order) // 2]
    assert_alike(bytewise(7).search([lines[i] for i in kept]), [translations[i] for i in kept])


@law(25)
@given(st.lists(st.tuples(any_line, st.text(max_size=4)), max_size=4))
@example([("one", "\n"), ("two", "\ra"), ("two", " "), ("x" * 100_000, "<end>"), ("one", "e\u0301")])
def test_any_prefix_begins_its_line(bytewise, lines_and_prefixes):
    lines, prefixes = ([pair[side] for pair in lines_and_prefixes] for side in (0, 1))
    translations = bytewise(7).translate(lines, prefixes=prefixes)
    assert len(translations) == len(lines)
    for line, prefix, text in zip(lines, prefixes, translations, strict=True):
        assert len(f"{text}.".splitlines()) == 1
        assert text.startswith(" ".join(prefix.rstrip(" ").splitlines())) or not line.strip()


@law(25)
@given(st.lists(st.tuples(any_line, any_line), max_size=6))
@example([("one", "x" * 100_000), ("x" * 100_000, "two"), ("", ""), ("\n", "\n")])
def test_any_text_has_a_score(bytewise, pairs):
    scores = bytewise(7).score([source for source, _ in pairs], [target for _, target in pairs])
    assert len(scores) == len(pairs)
    for log_probs in scores:
        assert log_probs
        assert -np.inf < sum(log_probs) <= 0


@pytest.mark.parametrize("text", ["one two three one two", "🎉 ß", "שלום", "e\u0301\r\u2028\x00", "      <end>"])
def test_a_text_that_a_prefix_forces_has_the_score_it_was_found_with(bytewise, text):
    # Longer than a translation of "one" may be, so it is all of it, in the tokens it is read with.
    [[translation]] = bytewise(7).search(["one"], prefixes=text)
    [ids] = bytewise(7).tokenizer.encode([text])
    assert translation.tokens == (*ids, END_ID)
    assert_scored(bytewise(7), "one", [dataclasses.replace(translation, text=text)])
