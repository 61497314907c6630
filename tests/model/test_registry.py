import pytest

from configs import base
from tests.conftest import TINY
from transformer_flax.errors import UserError
from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.registry import kind_of, make_config, make_model
from transformer_flax.model.transformer import Transformer


def test_the_fields_of_a_config_make_the_model_that_they_name():
    config = make_config(100, base.get_config().model.to_dict() | {"dtype": "float32"})
    assert isinstance(config, TransformerConfig)
    assert (config.vocab_size, config.d_model) == (100, 512)
    assert isinstance(make_model(config), Transformer)
    assert kind_of(TINY).config is TransformerConfig


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "transfomer"}, "config.model.kind is 'transfomer'; it must be one of transformer"),
        ({"cell": "gru"}, "config.model.cell is not a field of kind 'transformer'; start from the file"),
        ({"d_ff": None}, "config.model.d_ff is missing for kind 'transformer'"),
    ],
)
def test_fields_of_another_kind_are_refused(change, message):
    fields = {**base.get_config().model, **change}
    with pytest.raises(UserError, match=message):
        make_config(100, {name: value for name, value in fields.items() if value is not None})
