"""A kind of one's own that is made of the Transformer's parts."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests.analysis.random_run import SOURCE, TARGET, random_run
from tests.conftest import TINY
from transformer_flax.decoding.ctranslate2 import require_supported
from transformer_flax.errors import UserError
from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.flops import count_parameters
from transformer_flax.model.layers import EncoderLayer
from transformer_flax.model.registry import KINDS, Kind, init_params, make_model, param_shapes, register
from transformer_flax.model.transformer import Decoder, Encoder, Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(TransformerConfig):
    """The Transformer's fields."""


class OwnLayer(EncoderLayer):
    """A layer of the decoder without attention to the memory."""

    def __call__(self, y, mask, memory, memory_mask):
        return super().__call__(y, mask)


class OwnDecoder(Decoder):
    layer = OwnLayer


class TwiceEncoder(Encoder):
    """Applies each layer twice."""

    def __call__(self, x, mask):
        return super().__call__(super().__call__(x, mask), mask)


class Own(Transformer):
    """A Transformer with these stacks and a bias of its own, which is added to the memory."""

    encoder_class, decoder_class = TwiceEncoder, OwnDecoder

    def setup(self):
        super().setup()
        self.bias = self.param("bias", nn.initializers.zeros, (self.config.d_model,))

    def encode(self, source, segments=None):
        return super().encode(source, segments) + self.bias


CONFIG = OwnConfig(**vars(TINY))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr("transformer_flax.model.registry.KINDS", {**KINDS})
    attention = {"encoder": "encoder_*/self_attention", "decoder": "decoder_*/self_attention"}
    register("own", Kind(OwnConfig, Own, attention=attention))


def test_its_own_parameters_are_counted():
    counts = count_parameters(CONFIG)
    assert counts["bias"] == CONFIG.d_model
    assert sum(counts.values()) == sum(leaf.size for leaf in jax.tree.leaves(param_shapes(CONFIG)))


def test_all_passes_of_a_layer_are_shown():
    attention = random_run(CONFIG).attention(SOURCE, TARGET)
    assert attention.kinds == ("encoder", "decoder")
    assert len(attention.encoder) == 2 * CONFIG.num_layers
    assert len(attention.decoder) == CONFIG.num_layers
    np.testing.assert_allclose(attention.encoder.sum(-1), 1, rtol=1e-5)
    assert not np.allclose(attention.encoder[0], attention.encoder[CONFIG.num_layers])


def test_a_decoder_of_other_layers_starts_as_a_decoder():
    config = dataclasses.replace(CONFIG, start="deepnorm", branch_init=1.0)
    model = make_model(config).bind({"params": init_params(config, jax.random.key(0))})
    n = config.num_layers
    for stack, beta in ((model.encoder, 0.87 * n ** (-5 / 16)), (model.decoder, (12 * n) ** -0.25)):
        assert [layer.config.branch_init for layer in stack.layers] == pytest.approx([beta] * n)


def test_it_is_not_taken_for_the_transformer():
    with pytest.raises(UserError, match="kind 'mine' has the config of kind 'transformer': give it a subclass"):
        register("mine", Kind(TransformerConfig, Own, attention={}))
    with pytest.raises(UserError, match="CTranslate2 runs Transformers alone"):
        require_supported(CONFIG)
    register("own", Kind(OwnConfig, Transformer, attention={}))  # again, as a notebook does
    assert type(make_model(CONFIG)) is Transformer
