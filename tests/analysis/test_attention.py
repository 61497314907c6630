"""The arrays are those of the training pass, and their labels what a person reads."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.random_run import SOURCE, TARGET, random_run
from tests.relatives.rivals import CONVOLUTIONAL, RECURRENT
from transformer_flax.analysis.alignment import align
from transformer_flax.analysis.attention import KINDS, attend, read_tokens
from transformer_flax.analysis.attention_page import attention_page
from transformer_flax.analysis.plots import plot_heads, plot_lines
from transformer_flax.data.batches import training_batches
from transformer_flax.data.corpus import load_corpus
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.model import registry
from transformer_flax.model.transformer import Transformer
from transformer_flax.run import restore
from transformer_flax.special_tokens import END_ID

BYTES = Tokenizer.train([], SMALLEST_VOCABULARY)  # each byte is a token
MERGED = Tokenizer.train([" a  b\u00e4\u00e4 \u4e2d\u6587"] * 3, SMALLEST_VOCABULARY + 12)  # blanks, characters


@pytest.fixture(scope="module")
def run(finished):
    return restore(finished)


def test_rows_sum_to_one_and_the_decoder_sees_no_later_token(run):
    sources, targets = run.split("test")
    for attention in run.attentions(sources, targets):
        s, t = len(attention.source.pieces), len(attention.target.pieces)
        shapes = {"encoder": (s, s), "decoder": (t, t), "cross": (t, s)}
        for kind in KINDS:
            weights = getattr(attention, kind)
            assert weights.shape == (run.model.config.num_layers, run.model.config.num_heads, *shapes[kind])
            np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(attention.decoder, np.tril(attention.decoder))
        assert repr(attention).startswith(f"<Attention {attention.source.text!r} -> ")
        assert len(repr(attention)) < 500
        assert attention.cross.min() > 0  # nothing of the sentence is masked


def test_the_arrays_are_those_of_the_training_pass(run):
    # The batch as training has it, with its padding and the other sentences, and the call that the loss makes.
    text = load_pairs(run.config.data, "train")
    corpus = load_corpus(text, run.tokenizer, run.config.data.cache_dir)
    batches = training_batches(corpus, np.arange(len(corpus)), run.config.data, seed=0, share=(0, 1))
    batch, rows = batches[0], batches.pairs(0)
    _, sown = jax.jit(lambda params: run.model.apply({"params": params}, **batch, mutable=["intermediates"]))(
        run.params
    )
    kinds = {("encoder", "self_attention"), ("decoder", "self_attention"), ("decoder", "cross_attention")}
    compared = 0
    for row, attention in enumerate(run.attentions(*zip(*text.read(rows), strict=True))):
        for side, name in kinds:
            ours = attention.cross if name == "cross_attention" else getattr(attention, side)
            for layer, weights in enumerate(ours):
                [trained] = sown["intermediates"][f"{side}_{layer}"][name]["weights"]
                _, queries, keys = weights.shape
                np.testing.assert_allclose(weights, trained[row, :, :queries, :keys], atol=1e-5)
                np.testing.assert_array_equal(trained[row, :, :queries, keys:], 0)
                compared += 1
    assert compared == 3 * run.model.config.num_layers * len(rows) > 10


def test_without_a_target_the_run_s_own_translation_is_read(run):
    sources = run.split("test")[0][:3]
    for source, attention, translation in zip(sources, run.attentions(sources), run.translate(sources), strict=True):
        assert (attention.source.text, attention.target.text) == (source, translation)
        assert attention.target.pieces[-1] == attention.source.pieces[-1] == "<end>"
        assert attention.labels("decoder")[0] == ("<begin>", *attention.target.pieces[:-1])
    greedy = run.attention(sources[0], beam_size=1)
    assert greedy.target.text == run.translate(sources[:1], beam_size=1)[0]


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_a_sentence_may_be_as_long_as_there_are_positions(positions):
    run = random_run(positions=positions, max_length=21)
    ids = [*[7] * 20, END_ID]
    [attention] = attend(run.model, run.params, run.tokenizer, [(ids, ids[-2:])])
    assert attention.cross.shape[2:] == (2, 21)


def test_more_sentences_than_a_batch_come_in_order():
    run = random_run()
    words = SOURCE.split()
    lines = [" ".join([words[i % 4]] * (1 + i % 3)) for i in range(20)]
    several = list(run.attentions(lines, lines))
    assert [attention.source.text for attention in several] == lines
    alone = run.attention(lines[17], lines[17])
    np.testing.assert_allclose(several[17].cross, alone.cross, atol=1e-6)


def test_a_model_that_is_computed_otherwise_shows_the_same():
    plain, other = (
        run.attention(SOURCE, TARGET) for run in (random_run(), random_run(scan_layers=True, remat="layers"))
    )
    for kind in KINDS:
        np.testing.assert_allclose(getattr(plain, kind), getattr(other, kind), atol=1e-6)


def test_another_module_of_the_same_config_shows_its_own(monkeypatch):
    class Reversed(Transformer):
        def encode(self, source, segments=None):
            return super().encode(source[:, ::-1], segments)

    shown = random_run().attention(SOURCE, TARGET).encoder
    monkeypatch.setitem(
        registry.KINDS, "transformer", dataclasses.replace(registry.KINDS["transformer"], module=Reversed)
    )
    run = random_run()
    other = dataclasses.replace(run, model=Reversed(run.model.config)).attention(SOURCE, TARGET).encoder
    assert np.abs(other - shown).max() > 0.1


def test_layers_and_heads_are_counted():
    run = random_run()
    config = run.model.config
    assert config.num_heads > 1
    assert run.count_heads() == dict.fromkeys(KINDS, (config.num_layers, config.num_heads))


def test_an_empty_line_is_its_end_symbol():
    first, _ = random_run().attentions(["", SOURCE], ["", TARGET])
    [own] = random_run().attentions([""])  # and so is its translation
    for attention in (first, own):
        assert attention.source.pieces == attention.target.pieces == ("<end>",)
        np.testing.assert_array_equal(attention.cross, 1)


@pytest.mark.parametrize(("rival", "layers"), [(RECURRENT, 1), (CONVOLUTIONAL, 2)], ids=["recurrent", "convolutional"])
def test_of_a_model_with_cross_attention_alone_that_is_shown(rival, layers, tmp_path):
    run = random_run(rival.changed(max_length=64))
    attention = run.attention(SOURCE, TARGET)
    s, t = len(attention.source.pieces), len(attention.target.pieces)
    assert run.count_heads() == {"cross": (layers, 1)}
    assert attention.kinds == ("cross",)
    assert attention.cross.shape == (layers, 1, t, s)
    np.testing.assert_allclose(attention.cross.sum(-1), 1, rtol=1e-5)
    assert len(align(attention, layers=None)) == len(TARGET.split())
    assert plot_heads(attention).get_suptitle() == f"cross attention, layer {layers} of {layers}"
    assert '"kinds":{"cross":' in attention_page(attention)
    with pytest.raises(UserError, match="kind is 'encoder'; it must be one of cross: the model has no other attention"):
        plot_lines(attention)


def test_each_kind_of_attention_has_its_own_number_of_heads():
    attention = random_run().attention(SOURCE, TARGET)
    fewer = dataclasses.replace(attention, cross=attention.cross[:, :1])
    assert fewer.heads("encoder", None) == [0, 1, 2]
    assert fewer.heads("cross", None) == [0]
    assert fewer.num_heads == 3  # as many colours


def test_a_model_without_attention_is_refused_before_it_translates():
    run = random_run(dataclasses.replace(RECURRENT, attention="none"))
    with pytest.raises(UserError, match="the model has no attention"):
        dataclasses.replace(run, params=None).attention(SOURCE)  # with which nothing could be translated


# Labels


def test_pieces_are_shown_as_they_are_read():
    tokenizer = Tokenizer.train(["sleep sleep waking walking twenty"] * 9, SMALLEST_VOCABULARY + 18)
    text = "sleeping, twenty-one"
    shown = read_tokens(tokenizer, tokenizer.encode([text])[0])
    assert shown.text == text
    assert shown.pieces == ("sleep", "·in", "·g", ",", "tw", "·enty", "-", "o", "·n", "·e")
    assert shown.words == ("sleeping,", "twenty-one")
    assert shown.words_of == (*[(0,)] * 4, *[(1,)] * 6)


def test_bytes_are_shown_as_the_character_they_are_of():
    text = "Öl €\n\N{GRINNING FACE}x"
    shown = read_tokens(BYTES, [*BYTES.encode([text])[0], END_ID])
    smile = "\N{GRINNING FACE}"
    # The first token is the blank before the text, which is taken off.
    expected = ("␣", "Ö", "Ö", "·l", "␣", "€", "€", "€", "␣", smile, smile, smile, smile, "x", "<end>")
    assert shown.pieces == expected
    assert shown.words == ("Öl", "€", f"{smile}x")
    assert shown.words_of == ((), (0,), (0,), (0,), (), (1,), (1,), (1,), (), *[(2,)] * 5, ())


def test_a_mark_continues_the_word_of_its_letter():
    assert read_tokens(BYTES, BYTES.encode(["e\u0301x"])[0]).pieces == ("␣", "e", *["·\u0301"] * 2, "·x")
    assert read_tokens(BYTES, BYTES.encode(["❤\ufe0fx"])[0]).pieces[-1] == "x"  # a mark on a sign


def test_half_a_character_is_shown_too():
    ids = BYTES.encode(["aü"])[0][:-1]
    assert read_tokens(BYTES, ids).pieces == ("␣", "a", "�")


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merged"])
@given(text=st.text(max_size=12))
def test_every_word_of_any_text_has_its_tokens_in_order(tokenizer, text):
    [ids] = tokenizer.encode([text])
    shown = read_tokens(tokenizer, ids)
    assert shown.text == text
    assert list(shown.words) == text.split()
    assert len(shown.pieces) == len(shown.words_of) == len(ids)
    of_words = [word for its_words in shown.words_of for word in its_words]
    assert of_words == sorted(of_words)
    assert set(of_words) == set(range(len(shown.words)))
    assert all(piece.isprintable() and piece.strip() for piece in shown.pieces)


@given(ids=st.lists(st.integers(0, SMALLEST_VOCABULARY - 1), max_size=12))
def test_any_tokens_that_a_model_may_write_can_be_shown(ids):
    shown = read_tokens(BYTES, ids)
    assert shown.text == BYTES.decode(ids)
    assert len(shown.pieces) == len(shown.words_of) == len(ids)
    assert all(piece.isprintable() and piece.strip() for piece in shown.pieces)


# What cannot be had


def test_what_is_not_there_is_refused_with_what_is(run):
    attention = random_run().attention(SOURCE, TARGET)
    with pytest.raises(UserError, match="layer is 2; the model has layers 0 to 1"):
        attention.layer("cross", 2)
    with pytest.raises(UserError, match="kind is 'self'; it must be one of encoder, decoder, cross"):
        attention.layers("self")
    with pytest.raises(UserError, match=r"heads is \[3\]; the model has heads 0 to 2"):
        attention.heads("cross", [3])
    with pytest.raises(UserError, match=r"line 2 has \d+ tokens and at most 40 are taken"):
        run.attentions(["zwei", "zwei drei vier " * 30])
    with pytest.raises(UserError, match="source text has 2 lines and the target text has 1"):
        run.attentions(["zwei", "drei"], ["two"])
    with pytest.raises(UserError, match="takes one line, not"):
        run.attention(["zwei"])
    with pytest.raises(UserError, match="an ensemble has no attention of its own"):
        run.ensemble(run).attention("zwei")
