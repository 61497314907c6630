import dataclasses
import math
import re

import pytest

from tests.conftest import TINY
from transformer_flax.errors import UserError
from transformer_flax.model.config import TransformerConfig

FIELDS = [field.name for field in dataclasses.fields(TransformerConfig)]
SIZES = ("vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "max_length", "clip_distance")
RATES = ("dropout", "attention_dropout", "ffn_dropout")
SWITCHES = ("pre_norm", "tie_embeddings", "attention_bias", "scan_layers")

INVALID = [
    # None is what an override that was never given leaves behind; a new field must refuse it too.
    *((name, None) for name in FIELDS),
    *((name, value) for name in SIZES for value in (0, -1, 2.0, "2")),
    *((name, True) for name in SIZES),  # a bool is an int to Python, and would be a size of 1
    *((name, value) for name in RATES for value in (1.0, 1, 1.5, -0.1, math.nan, "0.1", False)),
    *((name, value) for name in SWITCHES for value in (0, 1, "False")),
    *(("neighbourhood", value) for value in (-1, 2.0, "2", True)),
    *(("positions", value) for value in ("", "rotational", "Learned", True)),
    *(("compatibility", value) for value in ("", "product", True)),
    *(("remat", value) for value in ("", "all", False)),
    *(("branch_init", value) for value in (0, -0.5, math.inf, math.nan, "0.5", True)),
    *(("dtype", value) for value in ("", "float16", "float64", float)),
    ("d_model", 15),  # with sinusoids, which come in pairs
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_invalid_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(UserError, match=rf"^config\.model\.{name} is {re.escape(repr(value))}; it must be "):
        dataclasses.replace(TINY, **{name: value})


def test_every_field_has_a_kind_of_value_that_is_tested():
    others = ("neighbourhood", "positions", "compatibility", "branch_init", "remat", "dtype")
    assert sorted((*SIZES, *RATES, *SWITCHES, *others)) == sorted(FIELDS)


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


def test_smallest_values_are_allowed():
    smallest = dataclasses.replace(TINY, **dict.fromkeys(SIZES, 1), **dict.fromkeys(RATES, 0), positions="learned")
    assert smallest.num_layers == 1


def test_sizes_of_the_heads_are_independent_of_d_model():
    # Rows A and B of table 3: neither d_k nor d_v need be d_model / num_heads.
    assert dataclasses.replace(TINY, d_model=16, num_heads=5, d_k=3, d_v=11).d_v == 11
