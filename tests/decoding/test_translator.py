"""The translator on untrained models: what it gives must be in order, and one line for one line, however bad."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.translator import Translator
from transformer_flax.model.transformer import Transformer, init_params, shift_right
from transformer_flax.special_tokens import END_ID

LINES = ["one two three", "", "two", "three one two one two three four five six", "🎉 ß \x00", " ", "two"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES * 3, 280)


def make(tokenizer, *, scale=3.0, **settings):
    config = dataclasses.replace(TINY, vocab_size=tokenizer.vocab_size)
    # Larger weights than a fresh model's: translations then depend on the source and differ from each other.
    params = jax.tree.map(lambda x: scale * x, init_params(config, jax.random.key(0)))
    defaults = {"beam_size": 2, "alpha": 0.6, "max_extra_length": 6, "max_input_length": 64, "batch_size": 4}
    return Translator(Transformer(config), params, tokenizer, **(defaults | settings))


def test_one_line_for_each_line_in_order_whatever_the_batch(tokenizer):
    together = make(tokenizer).translate(LINES)
    assert len(together) == len(LINES)
    assert together[1] == ""
    assert together[2] == together[6]
    assert len(set(together)) > 3
    assert make(tokenizer, batch_size=1).translate(LINES) == together
    order = [3, 0, 6, 5, 4, 2, 1]
    assert make(tokenizer).translate([LINES[i] for i in order]) == [together[i] for i in order]


def test_programs_are_compiled_once_for_a_width(tokenizer):
    translator = make(tokenizer)
    translator.translate(LINES)
    first = translator.compilations
    translator.translate(LINES[::-1])
    assert translator.compilations == first <= 2


def test_new_parameters_need_no_new_program(tokenizer):
    translator = make(tokenizer)
    before = translator.translate(LINES)
    compilations = translator.compilations
    translator.params = jax.tree.map(lambda x: -x, translator.params)
    assert translator.translate(LINES) != before
    assert translator.compilations == compilations


def test_over_long_input_is_cut_and_counted(tokenizer, caplog):
    translator = make(tokenizer, max_input_length=20)
    lines = ["one two three " * 40, "one two"]
    assert len(translator.translate(lines)) == 2
    assert "1 of 2 lines were cut to 20 tokens" in caplog.text


def test_output_is_at_most_the_allowed_length(tokenizer):
    translator = make(tokenizer, max_extra_length=3)
    source = np.array([[9, 8, 7, END_ID] + [0] * 12, [5, END_ID] + [0] * 14], np.int32)
    tokens = np.asarray(translator._search(translator.params, source).tokens)
    assert (tokens[0, 0] != 0).sum() <= 4 + 3
    assert (tokens[1, 0] != 0).sum() <= 2 + 3


def test_the_score_of_a_translation_is_that_of_a_teacher_forced_pass(tokenizer):
    # The cache, the search and the training pass must speak of one and the same model.
    translator = make(tokenizer, beam_size=4)
    source = np.array([[9, 8, 7, END_ID] + [0] * 12], np.int32)
    found = translator._search(translator.params, source)
    tokens, score = found.tokens[:, 0], float(found.scores[0, 0])
    logits = translator.model.apply({"params": translator.params}, source, tokens)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[0, :, 0]
    length = int((tokens != 0).sum())
    assert shift_right(tokens)[0, 0] == 1
    assert score == pytest.approx(float(log_probs[:length].sum()) / ((5 + length) / 6) ** 0.6, abs=1e-4)
