"""The translator on untrained models: whatever they put out, it must obey the laws."""

import functools

import jax
import numpy as np
import pytest

from tests.decoding.translators import (
    EMPTY,
    GREEDY,
    LETTERS,
    LINES,
    ONE,
    OTHER,
    SETTINGS,
    WORDS,
    Characters,
    assert_scored,
    found,
    large_params,
    make,
    new,
    scores_of,
    texts,
)
from transformer_flax.data.normalisation import PLAIN, Normaliser
from transformer_flax.decoding import inference
from transformer_flax.decoding.search import Hypotheses
from transformer_flax.decoding.settings import Sampling
from transformer_flax.errors import UserError
from transformer_flax.model.transformer import Transformer
from transformer_flax.special_tokens import BEGIN_ID, END_ID, PAD_ID


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


def test_sources_prefixes_and_given_targets_are_normalised():
    lower = Normaliser("en", lowercase=True)
    source, target = make(normalise=(lower, PLAIN)), make(normalise=(PLAIN, lower))  # each refuses other capitals
    upper = [word.upper() for word in WORDS]
    found_small, scores = found(WORDS, prefixes="b"), make().score(WORDS, WORDS[::-1])
    assert list(source.search(upper, prefixes="b")) == list(target.search(WORDS, prefixes="B")) == found_small
    assert source.score(upper, WORDS[::-1]) == target.score(WORDS, upper[::-1]) == scores


def test_order_of_the_lines_changes_nothing_but_the_order():
    order = np.random.default_rng(0).permutation(len(LINES))
    expected = found(LINES)
    assert texts(found([LINES[i] for i in order])) == [texts(expected)[i] for i in order]


@pytest.mark.parametrize("devices", [1, 8])
def test_parameters_lie_on_every_device(devices):
    for params in (np.ones(3), jax.device_put(np.ones(3), jax.devices()[-1])):
        assert inference.on_devices(params, devices).devices() == {*jax.devices()[:devices]}


@pytest.fixture
def no_programs(monkeypatch):
    """Nothing is compiled yet."""
    monkeypatch.setattr(inference, "compile_rows", functools.lru_cache(16)(inference.compile_rows.__wrapped__))


@pytest.mark.parametrize("changes", [{}, {"sampling": Sampling(), "nbest": 2}], ids=str)
def test_eight_devices_translate_and_score_as_one_does(no_programs, changes):
    one, eight = (new(batch_size=1, num_devices=num_devices, **changes) for num_devices in (1, 0))
    assert (one.num_devices, eight.num_devices) == (1, 8)
    lines = WORDS * 2  # on eight devices, the last batch has rows to spare
    alone, together = (list(each.search(lines, prefixes="b")) for each in (one, eight))
    assert texts(together) == texts(alone)
    np.testing.assert_allclose(scores_of(together), scores_of(alone), atol=1e-4)
    for expected, log_probs in zip(one.score(lines, lines[::-1]), eight.score(lines, lines[::-1]), strict=True):
        np.testing.assert_allclose(log_probs, expected, atol=1e-4)
    assert eight.compilations == 2


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


def test_the_best_translations_are_different_and_in_order():
    for translations in found(WORDS):
        assert len({t.tokens for t in translations}) == len(translations) == 3
        assert [t.score for t in translations] == sorted((t.score for t in translations), reverse=True)


@pytest.mark.parametrize(
    ("kind", "alpha", "penalty"),
    [("gnmt", 0.6, lambda length: ((5 + length) / 6) ** 0.6), ("length", 0.25, lambda length: length**0.25)],
)
def test_a_score_is_the_log_probability_over_the_penalty_of_all_tokens(kind, alpha, penalty):
    for t in (t for translations in found(WORDS, length_penalty=kind, alpha=alpha) for t in translations):
        assert t.tokens[-1] == END_ID
        assert END_ID not in t.tokens[:-1]
        assert t.score == pytest.approx(t.log_prob / penalty(len(t.tokens)), rel=1e-5)


# ----- samples


def test_samples_of_a_line_are_the_same_in_any_batch_and_window():
    changes = {"sampling": Sampling(temperature=5.0), "nbest": 2}
    lines = ["abc", "", "hello", "zz", "hello"]
    with jax.default_prng_impl("rbg"):  # draws all numbers of a batch together
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
    backwards = make(batch_size=1, window=5).score(sources[::-1], targets[::-1])
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


def test_lines_cut_for_scoring_are_counted(caplog):
    translator = make(max_input_length=16, window=1)
    [scores, _] = translator.score(["a" * 40, "b"], ["c" * 60, "d"])
    told = ["1 of 2 lines were cut to 16 tokens", "1 of 2 target lines were cut to 20 tokens"]
    assert [record.getMessage() for record in caplog.records] == told
    # Of the 21 tokens of the longest output, the last would be the end symbol, with which a cut target does not end.
    [whole, _] = translator.score(["a" * 40, "b"], ["c" * 20, "d"])
    assert len(whole) == 21
    np.testing.assert_allclose(scores, whole[:20], atol=1e-4)


# ----- ensembles


def test_an_ensemble_has_the_mean_of_the_probabilities_of_its_models():
    lines, targets = ["abc", "hello"], ["cab", "yellow"]
    both, one, other = (make(configs=configs) for configs in ((ONE, OTHER), (ONE,), (OTHER,)))
    of_both, of_one, of_other = (np.concatenate(some.score(lines, targets)) for some in (both, one, other))
    np.testing.assert_allclose(np.exp(of_both), (np.exp(of_one) + np.exp(of_other)) / 2, rtol=1e-4)
    assert np.abs(of_both - of_one).max() > 0.1
    for line, translations in zip(lines, both.search(lines), strict=True):
        assert_scored(both, line, translations)
    assert texts(both.search(lines)) != texts(one.search(lines))


# ----- a model that is broken


def test_a_model_that_is_no_number_is_told_of():
    translator = new()
    translator.params = jax.tree.map(lambda x: x * np.nan, translator.params)
    with pytest.raises(UserError, match="not finite"):
        translator.translate(["abc"])


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
    make(batch_size=4, window=7).score([line.strip() for line in LINES], ["a"] * len(LINES), progress=done.append)
    assert done == sorted(done)
    assert done[-1] == len(LINES)


# ----- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    translator = new(**GREEDY, alpha=0.125)  # as no other translator has it
    translator.translate(LINES)
    assert translator.compilations == 2  # 16 and 32
    translator.translate(LINES[::-1], prefixes="ab")
    translator.translate(["ab", "x" * 20, "y" * 31, "x" * 100] * 3)
    assert translator.compilations == 2


@pytest.mark.parametrize(
    ("window", "devices", "lines", "rows"),
    [
        (1, 1, 1, [1]),
        (1, 4, 1, [4]),
        (6, 4, 6, [8]),
        (500, 1, 0, []),
        (500, 1, 1, [1]),
        (500, 1, 2, [8]),
        (500, 1, 9, [64]),
        (500, 1, 66, [64, 64]),
        (500, 4, 4, [4]),
        (500, 4, 5, [32]),
        (500, 4, 500, [256, 256]),
    ],
)
def test_a_batch_has_as_many_rows_as_the_lines_or_a_window_need(window, devices, lines, rows):
    if len(jax.local_devices()) < devices:
        pytest.skip(f"needs {devices} devices")
    translator = new(batch_size=64, window=window, num_devices=devices)
    assert [found for _, found, _ in translator._batches([5] * lines + [0], lambda done: None)] == rows


@pytest.mark.parametrize(("lines", "batches"), [(7, [(7, 8)]), (20, [(16, 16), (4, 16)])])
def test_few_long_lines_share_a_batch_as_far_as_memory_allows(lines, batches):
    found = new(batch_size=64, window=500, max_input_length=256)._batches([200] * lines, lambda done: None)
    assert [(len(chosen), rows) for chosen, rows, _ in found] == batches


def test_the_end_of_a_long_text_needs_no_program_of_its_own(no_programs):
    translator = new(**GREEDY, batch_size=4, window=8)
    translator.translate(["ab"] * 9)
    assert translator.compilations == 1


def test_equal_translators_share_their_programs():
    compilations = []
    for alpha in (0.25, 0.25, 0.375):
        translator = new(**GREEDY, alpha=alpha)
        translator.translate(["abc", "hello"])
        compilations.append(translator.compilations)
    assert compilations == [1, 0, 1]


def test_samples_of_another_seed_are_others_by_the_same_program(no_programs):
    drawn, compilations = [], []
    for seed in (0, 2**32 - 1, 0):
        translator = new(sampling=Sampling(temperature=2.0, seed=seed))
        drawn.append(texts(list(translator.search(["abc", "hello"]))))
        compilations.append(translator.compilations)
    assert compilations == [1, 0, 0]
    assert drawn[0] == drawn[2] != drawn[1]


def test_there_is_a_program_for_each_power_of_two_and_no_more():
    translator, shapes = new(**GREEDY, max_input_length=40, batch_size=64, window=500, max_extra_length=3), []

    def record(params, source, prefix, numbers):  # no search, only what it is given
        shapes.append((source.shape, prefix.shape, numbers.shape))
        found_nothing = np.zeros((len(source), 1))
        return Hypotheses(found_nothing[:, :, None].astype(int), found_nothing, found_nothing)

    translator._search = record
    translator.translate(["x" * n for n in range(1, 60)] * 5)
    assert set(shapes) == {((64, width), (64, width + 3), (64, 2)) for width in (16, 32, 40)}
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
