"""The encoder alone: what is pooled, and that padding, the other rows and the way it is computed change nothing."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY
from tests.model.formulas import flops_by_hand, parameters_by_hand
from tests.model.parameters import random_params
from tests.model.sentences import SOURCES, compiled
from transformer_flax.errors import UserError
from transformer_flax.model.attention import MultiHeadAttention, padding_mask
from transformer_flax.model.config import LayerConfig
from transformer_flax.model.flops import activation_bytes, count_parameters, forward_flops
from transformer_flax.model.layers import Embedding
from transformer_flax.model.registry import KINDS, attention_maps, init_params, make_config
from transformer_flax.model.residuals import choose_start
from transformer_flax.relatives.classifier import POOLING, Classifier, ClassifierConfig, Pooling
from transformer_flax.special_tokens import PAD_ID

ENCODER = {field.name: getattr(TINY, field.name) for field in dataclasses.fields(LayerConfig)}
ENCODER["num_layers"] = 1
CLASSES = 4


def tiny(pooling: str, **changes) -> ClassifierConfig:
    fields = {"pooling": pooling, "num_classes": CLASSES, "embedding_deviation": 0.2}
    return ClassifierConfig(**ENCODER | fields | changes)


def logits_of(config, source=SOURCES, dropout_key=None):
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return np.asarray(compiled(config)({"params": random_params(config)}, source, rngs=rngs))


@pytest.mark.parametrize("pooling", POOLING)
def test_neither_padding_nor_the_other_rows_change_anything(pooling):
    config = tiny(pooling)
    logits = logits_of(config)
    assert logits.shape == (len(SOURCES), CLASSES)
    assert np.abs(np.diff(logits, axis=0)).max() > 0.1  # the texts are told apart at all
    padded = np.pad(SOURCES, ((0, 1), (0, 5)), constant_values=PAD_ID)
    np.testing.assert_allclose(logits_of(config, padded)[: len(SOURCES)], logits, atol=1e-5)


@pytest.mark.parametrize("pooling", POOLING)
def test_what_is_pooled_is_what_it_says(pooling):
    config = tiny(pooling)
    params = random_params(config)
    model = Classifier(config)
    length = int((SOURCES[1] != PAD_ID).sum())
    x = np.asarray(model.apply({"params": params}, SOURCES, method="encode"))[1, :length]
    if pooling == "attention":
        own = params["pooling"]["attention"]
        query = np.einsum("d,dhk->hk", params["pooling"]["query"], own["query"]["kernel"])
        key, value = (np.einsum("sd,dhk->shk", x, own[name]["kernel"]) for name in ("key", "value"))
        weights = np.exp(np.einsum("hk,shk->hs", query, key) / math.sqrt(config.d_k))
        weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(
            attention_maps(config, params, SOURCES)["pooling"][0, 1, :, 0, :length], weights, atol=1e-5
        )
        pooled = np.einsum("hs,shv,hvd->d", weights, value, own["output"]["kernel"])
    else:
        pooled = {"mean": x.mean(axis=0), "max": x.max(axis=0), "first": x[0]}[pooling]
    logits = pooled @ params["output"]["kernel"] + params["output"]["bias"]
    np.testing.assert_allclose(logits_of(config)[1], logits, atol=1e-4)


@pytest.mark.parametrize("pooling", POOLING)
def test_a_row_without_a_token_has_finite_gradients(pooling):
    config = tiny(pooling)

    def loss(params):
        return Classifier(config).apply({"params": params}, np.zeros((1, 3), np.int32)).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(random_params(config))
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_dropout_is_active_when_a_key_is_given_and_all_choices_of_an_encoder_are_there():
    config = tiny("mean", dropout=0.5)
    assert np.abs(logits_of(config, dropout_key=jax.random.key(0)) - logits_of(config)).max() > 0.01
    np.testing.assert_allclose(logits_of(tiny("mean", scan_layers=True)), logits_of(tiny("mean")), atol=1e-5)
    assert np.abs(logits_of(tiny("max", pre_norm=True)) - logits_of(tiny("max"))).max() > 0.01


def test_attention_maps_are_of_every_layer_and_leave_padding_out():
    config = tiny("attention", scan_layers=True)
    maps = attention_maps(config, random_params(config), SOURCES)
    assert maps["encoder"].shape == (1, 2, 3, 7, 7)
    assert maps["pooling"].shape == (1, 2, 3, 1, 7)
    for weights in maps.values():
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
        assert (weights[:, 1, ..., 4:] == 0).all()
    assert attention_maps(tiny("mean"), random_params(tiny("mean")), SOURCES).keys() == {"encoder"}


class Attending(nn.Module):
    config: ClassifierConfig

    @nn.compact
    def __call__(self, x, mask):
        return MultiHeadAttention(self.config, name="self_attention")(x, x, mask)


class OnTop(nn.Module):
    """A classifier of which the third layer alone attends."""

    config: ClassifierConfig

    @nn.compact
    def __call__(self, source):
        x = Attending(self.config, name="encoder_2")(Embedding(self.config)(source), padding_mask(source))
        return nn.Dense(CLASSES)(x[:, 0])


def test_the_attention_of_a_few_layers_is_shown(monkeypatch):
    monkeypatch.setitem(KINDS, "classifier", dataclasses.replace(KINDS["classifier"], module=OnTop))
    config = tiny("mean", num_layers=3)
    maps = attention_maps(config, init_params(config, jax.random.key(0)), SOURCES)
    assert {kind: weights.shape[0] for kind, weights in maps.items()} == {"encoder": 1}


EVERYTHING = {"num_layers": 3, "positions": "learned", "pre_norm": True, "attention_bias": True}


@pytest.mark.parametrize("config", [*map(tiny, POOLING), tiny("attention", **EVERYTHING)], ids=[*POOLING, "everything"])
def test_counts_are_those_of_the_formulas(config):
    c, lengths = config, np.array([1, 7, 30])
    encoder = dataclasses.replace(
        TINY, **{field.name: getattr(c, field.name) for field in dataclasses.fields(LayerConfig)}
    )
    expected = {n: k for n, k in parameters_by_hand(encoder).items() if "decoder" not in n}
    attention = parameters_by_hand(encoder)["decoder/cross_attention"] // c.num_layers
    pooling = {"pooling": c.d_model, "pooling/attention": attention} if c.pooling == "attention" else {}
    assert count_parameters(c) == expected | pooling | {"output": (c.d_model + 1) * c.num_classes}

    expected = {n: k for n, k in flops_by_hand(encoder, lengths, lengths).items() if n.startswith("encoder")}
    size, tokens = c.num_heads * (c.d_k + c.d_v), int(lengths.sum())
    if c.pooling == "attention":
        expected["pooling/attention"] = 2 * ((len(lengths) + tokens) * c.d_model * size + tokens * size)
    expected["output"] = 2 * len(lengths) * c.d_model * c.num_classes
    assert forward_flops(c, lengths, lengths) == expected


def test_layers_are_counted_together_where_their_numbers_have_two_digits():
    one, eleven = (count_parameters(tiny("mean", num_layers=layers)) for layers in (1, 11))
    assert eleven == {name: count * (11 if name.startswith("encoder") else 1) for name, count in one.items()}


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_activations_grow_with_the_texts(pooling):
    config = tiny(pooling)
    kept = activation_bytes(config, 8, 16, 2)
    assert kept == activation_bytes(config, 8, 16, 99)  # there is no target
    assert kept > 4 * 8 * 16 * config.num_layers * (config.d_ff + config.d_model)
    assert kept == pytest.approx(activation_bytes(config, 4, 16, 2) * 2, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": "cls"}, "config.model.pooling is 'cls'; it must be one of mean, max, first, attention"),
        ({"num_classes": 1}, "config.model.num_classes is 1; it must be a whole number from 2 to"),
        ({"d_model": 0}, "config.model.d_model is 0"),
        (
            {"tie_embeddings": True},
            "config.model.tie_embeddings is not a field of kind 'classifier'",
        ),
    ],
)
def test_what_no_classifier_can_have_is_refused(changes, message):
    fields = {name: value for name, value in ENCODER.items() if name != "vocab_size"}
    fields |= {"kind": "classifier", "pooling": "mean", "num_classes": 3, "embedding_deviation": 0.2}
    with pytest.raises(UserError, match=message):
        make_config(29, fields | changes)


def test_bfloat16_gives_float32_logits_near_those_of_float32():
    config = tiny("max", dtype="bfloat16")
    logits = logits_of(config)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, logits_of(tiny("max")), atol=0.15)


def test_words_start_as_small_as_it_says():
    for deviation in (0.2, 1.0):
        config = tiny("mean", embedding_deviation=deviation, vocab_size=1_000)
        vectors = init_params(config, jax.random.key(0))["embedding"]["embedding"] * config.d_model**0.5
        assert jnp.std(vectors) == pytest.approx(deviation, rel=0.05)
    assert ClassifierConfig.embedding_deviation == 1.0  # of saved runs that lack the field
    with pytest.raises(UserError, match="embedding_deviation is 0; it must be a number above 0"):
        tiny("mean", embedding_deviation=0)


def test_the_mean_of_a_long_text_is_summed_in_float32():
    # bfloat16 has no number between 1 and 1 + 1/128, so 302/301 is 1; and none between 300 and 302.
    x, mask = jnp.ones((1, 301, 2), jnp.bfloat16).at[:, 0].set(2), np.ones((1, 1, 1, 301), bool)
    np.testing.assert_array_equal(Pooling(tiny("mean", dtype="bfloat16")).apply({}, x, mask), 1)


def test_the_query_of_a_text_starts_with_a_length_of_1():
    x, mask = np.zeros((1, 1, 400), np.float32), np.ones((1, 1, 1, 1), bool)
    params = jax.jit(Pooling(tiny("attention", d_model=400)).init)(jax.random.key(0), x, mask)["params"]
    assert np.linalg.norm(params["query"]) == pytest.approx(1, abs=0.15)


def test_t_fixup_is_of_translators():
    with pytest.raises(UserError, match=r"start is 't_fixup'; it must be one of xavier, fairseq, deepnorm, admin$"):
        tiny("mean", start="t_fixup")


def test_deepnorm_of_an_encoder_alone_has_factors_of_its_own():
    config, residual = choose_start(tiny("mean", num_layers=2, start="deepnorm"), decoder=False)
    alpha, beta = residual(config).alpha, config.branch_init
    assert (alpha, beta) == pytest.approx((4**0.25, 16**-0.25))  # Wang et al., 2022, figure 2, N = 2
