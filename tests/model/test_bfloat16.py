"""Types change rounding only: gradients in bfloat16 are near those in float32, for every kind of model."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from tests.conftest import TINY, VARIANTS, long
from tests.model.sentences import SOURCE, TARGET
from tests.relatives.rivals import CONVOLUTIONAL, RECURRENT
from transformer_flax.model.registry import init_params, kind_of, make_model, param_shapes
from transformer_flax.relatives.classifier import ClassifierConfig
from transformer_flax.special_tokens import NUM_SPECIAL
from transformer_flax.training.loss import classification_loss, translation_loss

ROWS, LENGTH, VOCAB_SIZE = 64, 32, 60
SIZES = {"vocab_size": VOCAB_SIZE, "num_layers": 1, "d_model": 16}
PAPER = dataclasses.replace(TINY, **SIZES, d_ff=64, num_heads=2, d_k=16, d_v=16)
ENCODER = {name: value for name, value in dataclasses.asdict(PAPER).items() if name != "tie_embeddings"}
CONFIGS = {
    "learned, biased": dataclasses.replace(PAPER, positions="learned", attention_bias=True),
    "additive, distances, pre_norm, untied": dataclasses.replace(
        PAPER, positions="relative", compatibility="additive", pre_norm=True, tie_embeddings=False
    ),
    "admin": dataclasses.replace(PAPER, start="admin"),
    "classifier": ClassifierConfig(**ENCODER, pooling="attention", num_classes=3, embedding_deviation=0.2),
    "recurrent": dataclasses.replace(RECURRENT, **SIZES),
    "convolutional": dataclasses.replace(CONVOLUTIONAL, **SIZES),
}


def batch() -> dict[str, np.ndarray]:
    """Tokens of Zipf's distribution: the gradients of frequent ones, as those of biases, are sums of many terms."""
    rank = np.arange(1, VOCAB_SIZE - NUM_SPECIAL + 1)
    share = 1 / rank / np.sum(1 / rank)
    rng = np.random.default_rng(0)
    sides = (NUM_SPECIAL + rng.choice(len(rank), (ROWS, LENGTH), p=share) for _ in range(2))
    return dict(zip(("source", "target"), sides, strict=True))


@functools.cache
def make_gradient(config, dtype: str):
    model = make_model(dataclasses.replace(config, dtype=dtype))
    inputs = batch()
    if kind_of(config).reads == ("source",):
        inputs["target"] = NUM_SPECIAL + np.arange(ROWS)[:, None] % config.num_classes  # the classes of the texts
        loss_fn = classification_loss(model, 0.1)
    else:
        loss_fn = translation_loss(model, 0.1)
    params = init_params(config, jax.random.key(0))
    return jax.jit(jax.grad(lambda params: loss_fn(params, inputs, None)[0]["loss"])), params


def gradients(config, dtype: str) -> dict[tuple[str, ...], np.ndarray]:
    gradient, params = make_gradient(config, dtype)
    found = gradient(params)
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(found))
    return {tuple(key.key for key in path): leaf.astype(np.float64) for path, leaf in leaves}


def relative_errors(config, rounded: dict[tuple[str, ...], np.ndarray]) -> dict[str, float]:
    """Returns each gradient's distance from that of `config` in float32, relative to its norm."""
    exact, errors = gradients(config, "float32"), {}
    for path, gradient in exact.items():
        # A softmax of products is the same with any bias of the keys, whose gradient is zero but for rounding.
        scale = exact[(*path[:-2], "query", "bias")] if path[-2:] == ("key", "bias") else gradient
        errors["/".join(path)] = np.linalg.norm(rounded[path] - gradient) / np.linalg.norm(scale)
    return errors


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_gradient_in_bfloat16_is_within_2_percent_of_that_in_float32(config):
    errors = relative_errors(config, gradients(config, "bfloat16"))
    assert min(errors.values()) > 1e-6  # it is not float32 twice
    assert {path: error for path, error in errors.items() if error > 0.02} == {}


FUSED = {
    "learned, biased": CONFIGS["learned, biased"],
    "rotary, local": dataclasses.replace(PAPER, positions="rotary", neighbourhood=4),
    "classifier": CONFIGS["classifier"],
}


@pytest.mark.parametrize("name", [name if name == "learned, biased" else long(name) for name in FUSED])
def test_so_is_every_gradient_of_attention_in_one_kernel(name):
    config = FUSED[name]
    fused = dataclasses.replace(config, dtype="bfloat16", attention_implementation="cudnn")
    errors = relative_errors(config, gradients(fused, "bfloat16"))
    assert errors != relative_errors(config, gradients(config, "bfloat16"))  # it is computed otherwise
    assert {path: error for path, error in errors.items() if error > 0.02} == {}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_product_under_bfloat16_is_one_of_bfloat16_backwards_too(config):
    gradient, params = make_gradient(config, "bfloat16")
    program = gradient.trace(params).lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"stablehlo.dot_general .*: (\(tensor<.*>, tensor<.*>\)) ->", program)
    assert products
    classes = "x3xf32>"  # the classifier's last layer, with its few columns, is float32 throughout
    assert {product for product in products if product.count("xbf16>") < 2 and classes not in product} == set()


@pytest.mark.parametrize(
    "config", [VARIANTS["t_fixup"], dataclasses.replace(TINY, scan_layers=True)], ids=["t_fixup", "scanned"]
)
def test_what_layers_hand_on_has_the_type_that_the_model_computes_in(config):
    # A residual connection without LayerNorm keeps the type of the embeddings, and a loop over layers allows no other.
    config = dataclasses.replace(config, dtype="bfloat16")
    features = functools.partial(make_model(config).apply, method="features")
    y, embedding = jax.eval_shape(features, {"params": param_shapes(config)}, SOURCE, TARGET)
    assert (y.dtype, embedding.dtype) == ("bfloat16", "float32")
