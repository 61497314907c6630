"""Counts are of the model that is built: they equal formulas worked out by hand."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from tests.conftest import ONE_LAYER, TINY, VARIANTS, long
from tests.model.formulas import flops_by_hand, parameters_by_hand
from tests.relatives.rivals import RIVALS
from transformer_flax.model import layers
from transformer_flax.model.config import REMAT
from transformer_flax.model.flops import (
    _factorise,
    _fit,
    _flops_polynomials,
    _module_of,
    activation_bytes,
    count_parameters,
    forward_flops,
    product_flops,
    training_flops,
)
from transformer_flax.model.layers import FeedForward
from transformer_flax.model.registry import KINDS, init_params, make_model
from transformer_flax.model.transformer import Transformer
from transformer_flax.special_tokens import NUM_SPECIAL
from transformer_flax.training.loss import translation_loss

CONFIGS = {
    **VARIANTS,
    # Every choice at once: each adds its own parameters to those of the others.
    "all": dataclasses.replace(
        TINY, num_layers=3, positions="learned", pre_norm=True, tie_embeddings=False, attention_bias=True
    ),
    "all others": dataclasses.replace(TINY, num_layers=3, positions="relative", compatibility="additive"),
    "one position": dataclasses.replace(TINY, positions="learned", max_length=1),
    "one in the window": dataclasses.replace(TINY, neighbourhood=1),
    "local": dataclasses.replace(TINY, neighbourhood=3),
    "even window": dataclasses.replace(TINY, num_layers=1, neighbourhood=4),  # sees 5 keys
    "scanned": dataclasses.replace(TINY, scan_layers=True, remat="layers"),
    "bfloat16": dataclasses.replace(TINY, dtype="bfloat16"),
    "of primes": dataclasses.replace(TINY, vocab_size=2 * 101, num_layers=1, d_ff=103, num_heads=107),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_counts_are_those_of_the_formulas_in_every_module(config):
    assert count_parameters(config) == parameters_by_hand(config)
    lengths = np.array([1, 7, 2, 30]), np.array([1, 3, 9, 33])
    assert forward_flops(config, *lengths) == flops_by_hand(config, *lengths)


def test_another_module_of_the_same_config_is_counted_and_initialised_anew(monkeypatch):
    class Wider(Transformer):
        @nn.compact
        def __call__(self, source, target):
            return nn.Dense(101, use_bias=False, name="more")(super().__call__(source, target))

    before, lengths = count_parameters(ONE_LAYER), (np.full(2, 3), np.full(2, 2))
    flops = forward_flops(ONE_LAYER, *lengths)
    monkeypatch.setitem(KINDS, "transformer", dataclasses.replace(KINDS["transformer"], module=Wider))
    assert init_params(ONE_LAYER, jax.random.key(0))["more"]["kernel"].shape == (29, 101)
    assert count_parameters(ONE_LAYER) == {**before, "more": 29 * 101}
    assert (
        sum(forward_flops(ONE_LAYER, *lengths).values()) == sum(flops.values()) + 2 * 4 * 29 * 101
    )  # a length the program must not have


@pytest.mark.parametrize(
    ("stack", "module"),
    [
        ("encoder_1/feed_forward/w_1", "encoder/feed_forward"),
        ("encoder_1/feed_forward_2/w_1", "encoder/feed_forward_2"),
        ("encoder_1/after_feed_forward/encoder/encoder_1/ff_0/w_1", "encoder/ff_0"),
    ],
)
def test_operations_belong_to_the_innermost_module_of_their_name(stack, module):
    modules = [f"encoder/{name}" for name in ("feed_forward", "feed_forward_2", "ff_0", "after_feed_forward")]
    assert _module_of(f"Transformer/encoder/{stack}", modules) == module


class OtherAxes(Transformer):
    """Products of S + 1 and S / 2 positions, and of S + T with themselves."""

    @nn.compact
    def __call__(self, source, target):
        logits, x = super().__call__(source, target), self.source_embedding(source)
        longer = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
        shorter = nn.Conv(7, (1,), strides=2, use_bias=False, name="strided")(x)
        both = jnp.concatenate([x, self.target_embedding(target)], axis=1)
        nn.Dense(9, use_bias=False, name="longer")(longer)
        with jax.named_scope("both"):
            weights = both @ both.swapaxes(1, 2)
        return logits + (jnp.sum(weights) + jnp.sum(shorter)) * 0


def test_axes_of_other_lengths_are_counted(monkeypatch):
    before = forward_flops(ONE_LAYER, np.array([10, 30]), np.array([5, 12]))
    monkeypatch.setitem(KINDS, "transformer", dataclasses.replace(KINDS["transformer"], module=OtherAxes))
    flops = forward_flops(ONE_LAYER, np.array([10, 30]), np.array([5, 12]))
    assert flops.pop("longer") == 2 * 16 * 9 * (11 + 31)
    assert flops.pop("strided") == 2 * 16 * 7 * (5 + 15)
    assert flops.pop("both") == 2 * 16 * (15**2 + 42**2)
    assert sum(flops.values()) == sum(before.values())


@pytest.mark.parametrize("config", [TINY, long(RIVALS["lstm, none"]), long(RIVALS["convolutional"])])
def test_nine_programs_give_the_factors_that_one_gives(config):
    model = make_model(config)
    one, nine = _factorise(model), _fit(model)
    assert _flops_polynomials(model) == one
    assert one.keys() == nine.keys()
    for module, factors in nine.items():
        expected = [one[module].get(powers, 0) for powers in factors]
        np.testing.assert_allclose([*factors.values()], expected, atol=1e-6 * max(expected))


class Experts(Transformer):
    """Products of as many rows as an expert takes of the source's tokens: its share, rounded up."""

    EXPERTS = 64

    @nn.compact
    def __call__(self, source, target):
        logits, x = super().__call__(source, target), self.source_embedding(source)
        capacity = jnp.zeros((-(-source.shape[1] // self.EXPERTS), 16))
        return logits + jnp.sum(nn.Dense(9, use_bias=False, name="expert")(capacity)) * jnp.sum(x)


class Doubling(Transformer):
    """A product whose number of rows doubles with every 64 tokens of the source."""

    @nn.compact
    def __call__(self, source, target):
        logits = super().__call__(source, target)
        return logits + jnp.sum(nn.Dense(9, name="doubling")(jnp.zeros((2 ** (source.shape[1] // 64), 16))))


class Empty(Transformer):
    """A product whose inputs have no features, so its kernel has size 0."""

    @nn.compact
    def __call__(self, source, target):
        nothing = nn.Dense(9, kernel_init=nn.initializers.zeros, name="empty")(jnp.zeros((3, 0)))
        return super().__call__(source, target) + jnp.sum(nothing)


def test_a_product_of_size_zero_counts_nothing(monkeypatch):
    before = forward_flops(ONE_LAYER, np.array([10]), np.array([5]))
    monkeypatch.setitem(KINDS, "transformer", dataclasses.replace(KINDS["transformer"], module=Empty))
    assert sum(forward_flops(ONE_LAYER, np.array([10]), np.array([5])).values()) == sum(before.values())


def test_lengths_that_are_rounded_are_counted_about_right(monkeypatch):
    monkeypatch.setitem(KINDS, "transformer", dataclasses.replace(KINDS["transformer"], module=Experts))
    assert _factorise(make_model(TINY))["expert"] == {(0, 0): 2 * 16 * 9 * 2}  # a size by chance: the config has a 2
    flops = forward_flops(ONE_LAYER, np.array([640, 32]), np.array([5, 12]))
    assert flops["expert"] == 2 * 16 * 9 * (10 + 0.5)


def test_operations_that_no_polynomial_gives_are_refused(monkeypatch):
    monkeypatch.setitem(KINDS, "transformer", dataclasses.replace(KINDS["transformer"], module=Doubling))
    with pytest.raises(NotImplementedError, match="the operations of Doubling are no polynomial in the lengths"):
        forward_flops(ONE_LAYER, np.array([10]), np.array([5]))


class ThirdMatrix(FeedForward):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.config.d_model, name="w_3")(super().__call__(x))


def test_a_change_of_the_model_changes_what_is_counted(monkeypatch):
    # 3 layers in each stack, each with 16 x 16 + 16 parameters more; 2 pairs of 3 and 2 tokens.
    config = dataclasses.replace(TINY, num_layers=3, vocab_size=31)
    lengths = np.full(2, 3), np.full(2, 2)
    parameters, flops = parameters_by_hand(config), flops_by_hand(config, *lengths)
    for stack, tokens in (("encoder", 6), ("decoder", 4)):
        parameters[f"{stack}/feed_forward"] += 816
        flops[f"{stack}/feed_forward"] += 2 * 3 * tokens * 16 * 16
    monkeypatch.setattr(layers, "FeedForward", ThirdMatrix)  # in a config of this test alone, as JAX keeps programs
    assert count_parameters(config) == parameters
    assert forward_flops(config, *lengths) == flops


BASE = dataclasses.replace(TINY, vocab_size=37_000, num_layers=6, d_model=512, d_ff=2048, num_heads=8, d_k=64, d_v=64)


def test_base_and_big_model_have_the_papers_number_of_parameters():
    # attention 512 * 8 * 256 = 1,048,576; FFN 2 * 512 * 2048 + 2048 + 512 = 2,099,712; LayerNorm 1,024
    # encoder layer 3,150,336; decoder layer 4,199,936; six of both 44,101,632; embeddings 18,944,000
    assert sum(count_parameters(BASE).values()) == 63_045_632
    big = count_parameters(dataclasses.replace(BASE, d_model=1024, d_ff=4096, num_heads=16))
    # attention 4,194,304; FFN 8,393,728; LayerNorm 2,048; so 6 * (12,592,128 + 16,788,480)
    assert sum(big.values()) - big["embedding"] == 176_283_648


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"compatibility": "additive"},
        {"positions": "relative"},
        {"positions": "relative", "compatibility": "additive"},
    ],
)
def test_training_flops_are_those_of_the_products_in_the_program(choices):
    config = dataclasses.replace(TINY, num_layers=1, d_k=6, d_v=10, vocab_size=37, **choices)
    source, target = (np.full((3, length), NUM_SPECIAL, np.int32) for length in (5, 7))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def gradient(params):
        return jax.grad(lambda params: Transformer(config).apply({"params": params}, source, target).sum())(params)

    counted = sum(product.flops for product in product_flops(jax.make_jaxpr(gradient)(params).jaxpr))
    assert training_flops(config, np.full(3, 5), np.full(3, 7)) == counted


def abstract(config, rows, source, target):
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return params, *(jax.ShapeDtypeStruct((rows, length), np.int32) for length in (source, target))


def training_loss(config, *, dropout=False):
    loss_fn = translation_loss(Transformer(config), 0.1)
    key = jax.random.key(0) if dropout else None
    return lambda params, source, target: loss_fn(params, {"source": source, "target": target}, key)[0]["loss"]


def test_flops_of_the_base_model_are_those_that_xla_counts():
    # XLA counts what is element by element too, so a little more. Two of the layers, which are all alike.
    config, rows, source, target = dataclasses.replace(BASE, num_layers=2, dropout=0.0), 8, 32, 28
    lengths = np.full(rows, source), np.full(rows, target)
    arguments, loss = abstract(config, rows, source, target), training_loss(config)
    forward = jax.jit(loss).lower(*arguments).cost_analysis()["flops"]
    assert sum(forward_flops(config, *lengths).values()) == pytest.approx(forward, rel=0.02)
    update = jax.jit(jax.grad(loss)).lower(*arguments).cost_analysis()["flops"]
    assert training_flops(config, *lengths) == pytest.approx(update, rel=0.02)


def test_activations_are_what_differentiation_keeps():
    config = dataclasses.replace(TINY, num_layers=1, num_heads=4, d_k=8, d_v=8, d_model=32, d_ff=128, vocab_size=101)
    few, many = (activation_bytes(config, rows, 16, 16) for rows in (8, 16))
    assert many == pytest.approx(2 * few, rel=0.01)
    tokens = 2 * 16 * 16
    # At the least, what the inner product of the feed-forward gives and what the ReLU makes of it, and the logits.
    assert many > tokens * 2 * 4 * config.d_ff + tokens / 2 * 4 * config.vocab_size
    assert many > activation_bytes(dataclasses.replace(config, dropout=0.0), 16, 16, 16)  # of which dropout keeps some
    in_chunks = activation_bytes(config, 16, 16, 16, loss_chunks=4)
    assert many - in_chunks == 3 / 4 * tokens / 2 * 4 * config.vocab_size


@pytest.mark.parametrize("scan_layers", [False, True])
def test_what_is_recomputed_is_not_kept_and_products_with_weights_are_kept_if_so_told(scan_layers):
    config = dataclasses.replace(TINY, num_layers=2, d_model=32, d_ff=128, scan_layers=scan_layers)
    kept = {how: activation_bytes(dataclasses.replace(config, remat=how), 16, 16, 16) for how in REMAT}
    assert kept["layers"] < kept["none"] / 2
    inner = config.num_layers * 2 * 16 * 16 * 4 * config.d_ff  # of the feed-forward networks of both stacks
    assert kept["layers"] + inner < kept["products"] < kept["none"]


def test_activations_are_about_the_room_that_xla_takes():
    config = dataclasses.replace(TINY, num_heads=4, d_k=16, d_v=16, d_model=64, d_ff=256, vocab_size=1000)
    rows = 16
    arguments = abstract(config, rows, 16, 16)
    compiled = jax.jit(jax.grad(training_loss(config, dropout=True))).lower(*arguments).compile()
    room = compiled.memory_analysis().temp_size_in_bytes
    assert room == pytest.approx(activation_bytes(config, rows, 16, 16), rel=0.25)


def test_a_product_that_is_not_counted_is_refused():
    def experts(x, w):
        return jax.lax.ragged_dot(x, w, jax.numpy.array([2, 1]))

    def until_large(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w[0], x)

    def kernel(x, w):
        def multiply(x, w, y):
            y[...] = x[...] @ w[0]

        return pallas.pallas_call(multiply, jax.ShapeDtypeStruct((3, 4), np.float32), grid=(2,), interpret=True)(x, w)

    for program, name in {experts: "ragged_dot_general", until_large: "while", kernel: "pallas_call"}.items():
        traced = jax.make_jaxpr(program)(np.ones((3, 4), np.float32), np.ones((2, 4, 4), np.float32))
        with pytest.raises(NotImplementedError, match=f"the operations of {name} are not counted"):
            product_flops(traced.jaxpr)
