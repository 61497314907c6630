"""The translator on untrained models: whatever they put out, it must obey the laws."""

import dataclasses
import functools
import random
import string

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import TINY
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.search import Hypotheses, Sampling
from transformer_flax.decoding.translator import Translation, Translator
from transformer_flax.errors import UserError
from transformer_flax.model.transformer import Transformer, init_params
from transformer_flax.special_tokens import BEGIN_ID, END_ID, NUM_SPECIAL, PAD_ID


class Characters:
    """A tokenizer of which each character is a token: a text that is read again has the tokens it was written with."""

    def __init__(self, characters: str):
        assert len(characters) == TINY.vocab_size - NUM_SPECIAL
        self._characters = characters

    def encode(self, texts):
        return [[NUM_SPECIAL + self._characters.index(c) for c in text] for text in texts]

    def decode(self, ids):
        return "".join(self._characters[i - NUM_SPECIAL] for i in ids if i >= NUM_SPECIAL)


LETTERS = Characters(string.ascii_lowercase)
ONE = dataclasses.replace(TINY, num_layers=1)
OTHER = dataclasses.replace(TINY, num_layers=1, d_model=20, num_heads=2, pre_norm=True)
# Of two widths; the last window of 3 is all blank. Most of the time of these tests is compilation, for each setting and
# width once: where one width will do, they use WORDS.
LINES = ["abc", "", "hello", "thequickbrownfoxjumpsover", " \t", "zz", "hello", "a", "aardvark", "\u2028", "", "\x1c"]
WORDS = ["abc", "hello", "zz", "a", "aardvark"]
EMPTY = [Translation("", 0.0, 0.0, ())]
SETTINGS = {
    "beam_size": 3,
    "nbest": 3,
    "length_penalty": "gnmt",
    "alpha": 0.6,
    "min_length": 0,
    "max_extra_length": 5,
    "max_input_length": 32,
    "batch_size": 4,
    "window": 100,
}
GREEDY = {"beam_size": 1, "nbest": 1}


@functools.cache
def large_params(config):
    # Larger weights than a fresh model's: translations then depend on the source and differ from each other.
    return jax.tree.map(lambda x: 2 * x, init_params(config, jax.random.key(1)))


def new(configs=(ONE,), tokenizer=LETTERS, **changes) -> Translator:
    params = [large_params(config) for config in configs]
    return Translator([Transformer(config) for config in configs], params, tokenizer, **(SETTINGS | changes))


make = functools.cache(new)  # with its compiled programs; to be changed by no test


def found(lines, prefixes="", **changes) -> list[list[Translation]]:
    return list(make(**changes).search(lines, prefixes=prefixes))


def texts(translations) -> list[list[str]]:
    return [[t.text for t in of_line] for of_line in translations]


def scores_of(translations) -> np.ndarray:
    return np.array([t.score for of_line in translations for t in of_line])


def counted(lines, log: list[int]):
    """Lines, which leave in the log how many of them have been read."""
    for n, line in enumerate(lines, start=1):
        log.append(n)
        yield line


# ----- lines and windows


@pytest.mark.parametrize("window", [1, 3, len(LINES)])
def test_each_line_has_its_translations_in_order_for_any_window(window):
    alone = [translations for line in LINES for translations in found([line])]
    together = found(LINES, window=window)
    assert texts(together) == texts(alone)
    np.testing.assert_allclose(scores_of(together), scores_of(alone), atol=1e-4)
    assert len({best.text for best, *_ in together}) > 5
    assert make(window=window).translate(LINES) == [best.text for best, *_ in alone]


def test_order_of_the_lines_changes_nothing_but_the_order():
    order = np.random.default_rng(0).permutation(len(LINES))
    expected = found(LINES)
    assert texts(found([LINES[i] for i in order])) == [texts(expected)[i] for i in order]


def test_size_of_the_batches_changes_nothing():
    together, alone = found(LINES), found(LINES, batch_size=1)
    assert texts(together) == texts(alone)
    np.testing.assert_allclose(scores_of(together), scores_of(alone), atol=1e-4)


@pytest.mark.parametrize("changes", [{}, GREEDY, {"sampling": Sampling(), "nbest": 2}], ids=str)
def test_a_line_without_words_has_one_empty_translation(changes):
    for line in ("", " ", "\t", "\u2028", "\x1c\x85", "\u3000 \r"):
        assert found([line], **changes) == [EMPTY]
        assert found([line], prefixes="abc", **changes) == [EMPTY]


def test_of_no_lines_there_are_no_translations():
    done = []
    assert make().translate([], progress=done.append) == []
    assert make().score([], [], progress=done.append) == []
    assert done == []


@pytest.mark.parametrize("window", [1, 3])
def test_a_search_reads_no_further_than_its_window(window):
    read_lines, read_prefixes = [], []
    lines, prefixes = counted(["", "a", "", "b", "", "c", "d"], read_lines), counted("xyzabcd", read_prefixes)
    search = make(window=window, **GREEDY).search(lines, prefixes=prefixes)
    assert read_lines == []
    for put_out, _ in enumerate(search, start=1):
        windows = -(-put_out // window)
        assert len(read_lines) == len(read_prefixes) == min(window * windows, 7)
    assert put_out == 7


def test_a_translation_is_one_line_even_if_the_model_puts_out_line_breaks():
    breaks = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    tokenizer = Characters(breaks + "abcdefghijklmnop")
    translations = [t for of_line in found(["abc", "p\ng", "hello", "dad"], tokenizer=tokenizer) for t in of_line]
    assert any(set(tokenizer.decode(t.tokens)) & set(breaks) for t in translations)
    for t in translations:
        assert len(f"{t.text}.".splitlines()) == 1
        kept = [c for c in tokenizer.decode(t.tokens) if c not in breaks]
        assert [c for c in t.text if c != " "] == kept


# ----- search


def greedy_by_hand(line: str) -> tuple[str, float]:
    """Next token by next token from whole teacher-forced passes: no cache, no batch, no loop of JAX."""
    longest = len(line) + 1 + SETTINGS["max_extra_length"]
    source, target = np.zeros((1, 16), int), np.zeros((1, 24), int)
    source[0, : len(line) + 1] = [*LETTERS.encode([line])[0], END_ID]
    log_prob = 0.0
    for position in range(longest):
        log_probs = np.array(jax.nn.log_softmax(teacher_forced(source, target)[0, position]))
        log_probs[[PAD_ID, BEGIN_ID]] = -np.inf
        target[0, position] = END_ID if position == longest - 1 else log_probs.argmax()
        log_prob += log_probs[target[0, position]]
        if target[0, position] == END_ID:
            return LETTERS.decode(target[0]), log_prob
    raise AssertionError


@jax.jit
def teacher_forced(source, target):
    return Transformer(ONE).apply({"params": large_params(ONE)}, source, target)


def test_a_beam_of_one_takes_the_likeliest_token_again_and_again():
    lines = ["abc", "hello", "zz", "aardvark"]
    for line, [translation] in zip(lines, found(lines, **GREEDY), strict=True):
        text, log_prob = greedy_by_hand(line)
        assert translation.text == text
        assert translation.log_prob == pytest.approx(log_prob, abs=1e-4)


def test_the_best_of_several_is_the_one():
    for several, [one] in zip(found(WORDS), found(WORDS, nbest=1), strict=True):
        assert several[0].tokens == one.tokens
        assert several[0].score == pytest.approx(one.score, abs=1e-5)


def test_the_best_translations_are_different_and_in_order():
    for translations in found(WORDS):
        assert len({t.tokens for t in translations}) == len(translations) == 3
        assert [t.score for t in translations] == sorted((t.score for t in translations), reverse=True)


@pytest.mark.parametrize(
    ("kind", "penalty"), [("gnmt", lambda length: ((5 + length) / 6) ** 0.6), ("length", lambda length: length**0.6)]
)
def test_a_score_is_the_log_probability_over_the_penalty_of_all_tokens(kind, penalty):
    for t in (t for translations in found(WORDS, length_penalty=kind) for t in translations):
        assert t.tokens[-1] == END_ID
        assert END_ID not in t.tokens[:-1]
        assert t.score == pytest.approx(t.log_prob / penalty(len(t.tokens)), rel=1e-5)


# ----- samples


def test_a_sample_at_temperature_zero_is_greedy_search():
    sampled = found(WORDS, sampling=Sampling(temperature=0), **GREEDY)
    assert sampled == found(WORDS, **GREEDY)


def test_samples_of_a_line_are_the_same_in_any_batch_and_window():
    changes = {"sampling": Sampling(temperature=5.0), "nbest": 2}
    lines = ["abc", "", "hello", "zz", "hello"]
    expected = texts(found(lines, **changes))
    assert texts(found(lines, **changes)) == expected
    assert texts(found(lines, batch_size=1, **changes)) == expected
    assert texts(found(lines, window=2, **changes)) == expected


def test_samples_differ_between_lines_between_each_other_and_between_seeds():
    lines = ["hello"] * 4
    some = found(lines, sampling=Sampling(temperature=5.0), nbest=2)
    others = found(lines, sampling=Sampling(temperature=5.0, seed=1), nbest=2)
    assert len({t.text for of_line in (*some, *others) for t in of_line}) == 2 * 4 * 2


# ----- scores of given translations


def assert_scored(translator: Translator, line: str, translations: list[Translation]):
    scores = translator.score([line] * len(translations), [t.text for t in translations])
    for t, log_probs in zip(translations, scores, strict=True):
        assert len(log_probs) == len(t.tokens)
        assert sum(log_probs) == pytest.approx(t.log_prob, abs=1e-4)


def test_a_translation_has_the_log_probability_it_was_found_with():
    # The cache, the search and the training pass must speak of one and the same model.
    for line, translations in zip(WORDS, found(WORDS), strict=True):
        assert_scored(make(), line, translations)


def test_a_sample_has_the_log_probability_of_the_model_itself():
    translator = make(sampling=Sampling(temperature=2.0, top_k=9, top_p=0.9), nbest=2)
    for line, translations in zip(["hello", "abc"], translator.search(["hello", "abc"]), strict=True):
        assert_scored(make(), line, translations)


def test_scores_do_not_depend_on_the_other_lines():
    targets = ["cba", "x", "", "jumpsover", "quiteabitlongerthanitssource", "zz", "olleh", "", "a", "b", "", "c"]
    sources = [line.strip() for line in LINES]
    together = make().score(sources, targets)
    assert [len(log_probs) for log_probs in together] == [len(target) + 1 for target in targets]
    for source, target, log_probs in zip(sources, targets, together, strict=True):
        [alone] = make().score([source], [target])
        np.testing.assert_allclose(log_probs, alone, atol=1e-4)
        assert max(log_probs) <= 0
    backwards = make(batch_size=1).score(sources[::-1], targets[::-1])
    np.testing.assert_allclose(np.concatenate(backwards[::-1]), np.concatenate(together), atol=1e-4)


def test_the_longest_outputs_can_be_scored():
    # At most so many tokens longer than the longest input that is taken.
    line = "thequickbrownfoxjumpsoverthelaz"
    [[translation]] = found([line], min_length=37, **GREEDY)
    assert len(translation.tokens) == 37
    assert_scored(make(), line, [translation])


def test_scores_need_a_target_for_each_source():
    with pytest.raises(UserError, match=r"2 .* 1"):
        make().score(["abc", "a"], ["abc"])


def test_lines_cut_for_scoring_are_counted_once(caplog):
    [scores, _] = make(max_input_length=16).score(["a" * 40, "b"], ["c" * 60, "d"])
    assert len(scores) <= 60
    assert "1 of 2 lines were cut" in caplog.text


# ----- ensembles


def test_an_ensemble_of_a_model_with_itself_is_the_model():
    lines = WORDS[:2]
    twice, once = found(lines, configs=(ONE, ONE)), found(lines)
    assert texts(twice) == texts(once)
    np.testing.assert_allclose(scores_of(twice), scores_of(once), atol=1e-4)
    for ours, own in zip(make(configs=(ONE, ONE)).score(lines, lines), make().score(lines, lines), strict=True):
        np.testing.assert_allclose(ours, own, atol=1e-4)


def test_an_ensemble_has_the_mean_of_the_probabilities_of_its_models():
    lines, targets = ["abc", "hello"], ["cab", "yellow"]
    both, one, other = (make(configs=configs) for configs in ((ONE, OTHER), (ONE,), (OTHER,)))
    of_both, of_one, of_other = (np.concatenate(some.score(lines, targets)) for some in (both, one, other))
    np.testing.assert_allclose(np.exp(of_both), (np.exp(of_one) + np.exp(of_other)) / 2, rtol=1e-4)
    assert np.abs(of_both - of_one).max() > 0.1
    for line, translations in zip(lines, both.search(lines), strict=True):
        assert_scored(both, line, translations)
    assert texts(both.search(lines)) != texts(one.search(lines))


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


# ----- a model that is broken


def test_a_model_that_is_no_number_is_told_of():
    translator = new()
    translator.params = jax.tree.map(lambda x: x * np.nan, translator.params)
    with pytest.raises(UserError, match="not finite"):
        translator.translate(["abc"])


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


@pytest.mark.parametrize("lines", [(["x" * 16], ["y"]), (["y"], ["x" * 16])], ids=["source", "target"])
def test_a_line_that_is_too_long_to_score_is_refused(lines):
    translator = make(refuse_long=True, max_input_length=16, max_extra_length=0)
    with pytest.raises(UserError, match="line 1 has 17 tokens and at most 16"):
        translator.score(*lines)


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


# ----- progress


@pytest.mark.parametrize("window", [2, 3, 100])
@pytest.mark.parametrize("lines", [LINES, LINES[:9], ["", " "]], ids=["blank at the end", "words at the end", "blank"])
def test_progress_ends_with_all_lines(window, lines):
    done = []
    make(window=window, batch_size=1, **GREEDY).translate(lines, progress=done.append)
    assert done == sorted(done)
    assert done[-1] == len(lines)


def test_progress_counts_a_window_only_once_it_is_reached():
    done = []
    search = make(window=2, **GREEDY).search(["a", "", "b", ""], progress=done.append)
    next(search)
    assert max(done) == 2


def test_progress_of_scores_ends_with_all_lines():
    done = []
    make(batch_size=4).score([line.strip() for line in LINES], ["a"] * len(LINES), progress=done.append)
    assert done == sorted(done)
    assert done[-1] == len(LINES)


# ----- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_size": 0, "nbest": 1}, "beam_size is 0"),
        ({"min_length": -1}, "min_length is -1"),
        ({"max_extra_length": -1}, "max_extra_length is -1"),
        ({"max_input_length": 1}, "max_input_length is 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"window": 0}, "window is 0"),
        ({"nbest": 0}, "nbest is 0"),
        ({"nbest": 4}, "nbest is 4 and beam_size 3"),
        ({"length_penalty": "gmnt"}, "length.penalty is 'gmnt'.* gnmt, length, none"),
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(changes, message):
    with pytest.raises(UserError, match=message):
        new(**changes)


def test_there_may_be_more_samples_than_a_beam_would_hold():
    assert len(found(["abc"], sampling=Sampling(), nbest=4, beam_size=1)[0]) == 4


# ----- compilations


def test_programs_are_compiled_once_for_a_width():
    translator = new(**GREEDY)
    translator.translate(LINES)
    assert translator.compilations == 2  # 16 and 32
    translator.translate(LINES[::-1], prefixes="ab")
    translator.translate(["ab", "x" * 20, "y" * 31, "x" * 100] * 3)
    assert translator.compilations == 2


def test_there_is_a_program_for_each_power_of_two_and_no_more():
    translator, shapes = new(**GREEDY, max_input_length=40, batch_size=64, window=500, max_extra_length=3), []

    def record(params, source, prefix, numbers):  # no search, only what it is given
        shapes.append((source.shape, prefix.shape, numbers.shape))
        found_nothing = np.zeros((len(source), 1))
        return Hypotheses(found_nothing[:, :, None].astype(int), found_nothing, found_nothing)

    translator._search = record
    translator.translate(["x" * n for n in range(1, 60)] * 5)
    assert set(shapes) == {((64, width), (64, width + 3), (64,)) for width in (16, 32, 40)}
    shapes.clear()
    wide = new(**GREEDY, max_input_length=200, batch_size=6)
    wide._search = record
    wide.translate(["x" * n for n in range(100, 220, 9)])
    assert {source for source, _, _ in shapes} == {(3, 128), (1, 200)}  # fewer sentences where they are long


def test_new_parameters_need_no_new_program():
    translator = new(**GREEDY)
    before = translator.translate(["abc", "hello"])
    compilations = translator.compilations
    translator.params = jax.tree.map(lambda x: -x, translator.params)
    assert translator.translate(["abc", "hello"]) != before
    assert translator.compilations == compilations


# ----- any text at all

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
    return settings(deadline=None, derandomize=True, max_examples=examples)


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
        assert text.startswith(" ".join(prefix.splitlines())) or not line.strip()


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
