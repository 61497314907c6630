"""The fields of models, and the registry of their kinds."""

import dataclasses
import math
import re

import pytest

from configs import base
from tests.conftest import TINY
from transformer_flax.errors import UserError
from transformer_flax.model.config import DEEP_STARTS, TransformerConfig
from transformer_flax.model.registry import kind_of, make_config, make_model
from transformer_flax.model.transformer import Transformer

FIELDS = dataclasses.fields(TransformerConfig)
SIZES = ("vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "max_length", "clip_distance")
RATES = ("dropout", "attention_dropout", "ffn_dropout")
# What no field of a type allows. None is what an override that was never given leaves behind; to Python, a bool is an
# int, and True would be a size of 1.
NEVER = {
    int: (None, -1, 2.0, "2", True),
    float: (None, -0.1, math.nan, math.inf, "0.1", False),
    bool: (None, 0, 1, "False"),
    str: (None, "", True, float),
}

INVALID = [
    *((field.name, value) for field in FIELDS for value in NEVER[field.type]),
    *((name, 0) for name in SIZES),
    *((name, value) for name in RATES for value in (1.0, 1, 1.5)),
    *(("positions", value) for value in ("rotational", "Learned")),
    ("compatibility", "product"),
    ("remat", "all"),
    ("branch_init", 0),
    ("start", "he"),
    ("attention_implementation", "flash"),
    *(("dtype", value) for value in ("float16", "float64")),
    ("d_model", 15),  # with sinusoids, which come in pairs
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_invalid_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(UserError, match=rf"^config\.model\.{name} is {re.escape(repr(value))}; it must be "):
        dataclasses.replace(TINY, **{name: value})


def test_odd_d_model_is_refused_with_either_sinusoids_and_allowed_with_learned_positions():
    with pytest.raises(UserError, match=r"config\.model\.d_model is 15"):
        dataclasses.replace(TINY, d_model=15, positions="sinusoidal_concatenated")
    for positions in ("learned", "relative"):
        assert dataclasses.replace(TINY, d_model=15, positions=positions).d_model == 15


def test_rotary_positions_turn_pairs_of_features_of_a_product():
    with pytest.raises(UserError, match=r"config\.model\.d_k is 5; it must be even"):
        dataclasses.replace(TINY, d_k=5, positions="rotary")
    with pytest.raises(UserError, match=r"config\.model\.compatibility is 'additive'; it must be scaled_dot or dot"):
        dataclasses.replace(TINY, d_k=6, positions="rotary", compatibility="additive")
    assert dataclasses.replace(TINY, d_k=6, d_model=15, positions="rotary", compatibility="dot").d_k == 6


@pytest.mark.parametrize("start", DEEP_STARTS)
def test_pre_norm_models_have_no_start_that_changes_residuals(start):
    with pytest.raises(UserError, match=rf"config\.model\.pre_norm is True; it must be False with start={start}"):
        dataclasses.replace(TINY, pre_norm=True, start=start)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("attention_dropout", 0.1),
        ("compatibility", "additive"),
        ("positions", "relative"),
        ("d_k", 12),
        ("d_k", 264),
        ("d_v", 16),
        ("neighbourhood", 2),
        ("neighbourhood", 10),
    ],
)
def test_cudnns_attention_refuses_what_its_kernel_cannot_compute(name, value):
    sizes = {"d_k": 8, "d_v": 8, "dtype": "bfloat16"}
    fused = dataclasses.replace(TINY, **sizes, compatibility="dot", attention_implementation="cudnn")
    with pytest.raises(UserError, match=rf"^config\.model\.{name} is {value!r}; it must be .* for cuDNN's attention"):
        dataclasses.replace(fused, **{name: value})


def test_smallest_values_are_allowed():
    smallest = dataclasses.replace(TINY, **dict.fromkeys(SIZES, 1), **dict.fromkeys(RATES, 0), positions="learned")
    assert smallest.num_layers == 1


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
        ({"cell": "gru"}, "config.model.cell is not a field of kind 'transformer'; its fields are num_layers"),
        ({"d_ff": None}, "config.model.d_ff is missing for kind 'transformer'"),
    ],
)
def test_fields_of_another_kind_are_refused(change, message):
    fields = {**base.get_config().model, **change}
    with pytest.raises(UserError, match=message):
        make_config(100, {name: value for name, value in fields.items() if value is not None})


def test_a_field_that_a_saved_run_lacks_is_as_it_was_before_there_was_a_choice():
    before = {
        "compatibility": "scaled_dot",
        "clip_distance": 16,
        "neighbourhood": 0,
        "branch_init": 1.0,
        "start": "xavier",
        "attention_implementation": "plain",
    }
    assert {field.name: field.default for field in FIELDS if field.name in before} == before
    fields = base.get_config().model.to_dict() | {"dtype": "float32"}
    saved = make_config(100, {name: value for name, value in fields.items() if name not in before})
    assert saved == dataclasses.replace(make_config(100, fields), **before)
