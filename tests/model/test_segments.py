"""Several pairs in a row are to the model as if each had a row of its own."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import TINY, VARIANTS
from tests.model.parameters import random_params
from tests.model.sentences import compiled
from transformer_flax.model.attention import segment_mask
from transformer_flax.model.positions import positions_in_segments
from transformer_flax.model.transformer import Transformer, shift_right
from transformer_flax.special_tokens import BEGIN_ID

# Three pairs, in two rows of 10 and 9 tokens.
PAIRS = [([5, 9, 14, 3, 2], [7, 24, 2]), ([17, 4, 8, 2], [9, 3, 11, 5, 2]), ([6, 2], [28, 28, 4, 16, 2])]
SOURCE = np.array([[5, 9, 14, 3, 2, 17, 4, 8, 2, 0], [6, 2, 0, 0, 0, 0, 0, 0, 0, 0]])
SOURCE_SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
TARGET = np.array([[7, 24, 2, 9, 3, 11, 5, 2, 0], [28, 28, 4, 16, 2, 0, 0, 0, 0]])
TARGET_SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0]])
PACKED = (SOURCE, TARGET, SOURCE_SEGMENTS, TARGET_SEGMENTS)


def test_a_mask_keeps_segments_and_padding_apart():
    mask = segment_mask(np.array([[1, 2, 2, 0]]), np.array([[1, 1, 2, 0, 0]]))
    np.testing.assert_array_equal(mask, [[[[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]]])


@given(st.lists(st.integers(1, 4), max_size=4))
def test_positions_begin_anew_in_every_segment(lengths):
    segments = [n for n, length in enumerate(lengths, start=1) for _ in range(length)]
    expected = [i for length in lengths for i in range(length)]
    row = np.zeros((1, 20), np.int32)
    row[0, : len(segments)] = segments
    assert positions_in_segments(row)[0, : len(segments)].tolist() == expected
    assert positions_in_segments(row)[0].max() < 20


def test_every_segment_of_the_decoder_s_input_begins_with_the_begin_symbol():
    shifted = np.asarray(shift_right(TARGET, TARGET_SEGMENTS))
    assert shifted[0, :8].tolist() == [BEGIN_ID, 7, 24, BEGIN_ID, 9, 3, 11, 5]
    assert shifted[1, :5].tolist() == [BEGIN_ID, 28, 28, 4, 16]


NO_SEGMENTS = ("untied", "attention_bias", "pre_norm")  # what these change, segments do not meet


@pytest.mark.parametrize(
    "variant",
    [pytest.param(c, id=name, marks=[pytest.mark.long] * (name in NO_SEGMENTS)) for name, c in VARIANTS.items()],
)
def test_a_pair_has_the_same_logits_in_a_row_of_its_own(variant):
    apply, params = compiled(variant), {"params": random_params(variant)}
    packed = np.asarray(apply(params, *PACKED))
    source, target = np.zeros((3, 10), int), np.zeros((3, 9), int)
    for row, (words, translation) in enumerate(PAIRS):
        source[row, : len(words)], target[row, : len(translation)] = words, translation
    alone = np.asarray(apply(params, source, target))
    for row, place in enumerate([(0, slice(0, 3)), (0, slice(3, 8)), (1, slice(0, 5))]):
        own = alone[row, : len(PAIRS[row][1])]
        np.testing.assert_allclose(packed[place], own, rtol=2e-5, atol=2e-5)


def test_no_attention_crosses_from_one_pair_to_another():
    apply = jax.jit(functools.partial(Transformer(TINY).apply, mutable=["intermediates"]))
    _, sown = apply({"params": random_params(TINY)}, *PACKED)
    sides = {
        ("encoder", "self_attention"): (SOURCE_SEGMENTS, SOURCE_SEGMENTS),
        ("decoder", "self_attention"): (TARGET_SEGMENTS, TARGET_SEGMENTS),
        ("decoder", "cross_attention"): (TARGET_SEGMENTS, SOURCE_SEGMENTS),
    }
    for (stack, attention), (queries, keys) in sides.items():
        other = queries[:, None, :, None] != keys[:, None, None, :]
        for layer in range(TINY.num_layers):
            weights = np.asarray(sown["intermediates"][f"{stack}_{layer}"][attention]["weights"][0])
            np.testing.assert_array_equal(weights[np.broadcast_to(other, weights.shape)], 0)  # to the bit
            np.testing.assert_allclose(
                weights.sum(-1), np.broadcast_to((queries != 0)[:, None], weights.shape[:3]), rtol=1e-6
            )


@pytest.mark.parametrize("changed", ["source", "target"])
def test_a_pair_does_not_change_its_neighbour(changed):
    """To the bit; the neighbour stands behind it, where causality alone would let it look."""
    apply, params = compiled(TINY), {"params": random_params(TINY)}
    before = np.asarray(apply(params, *PACKED))
    source, target = SOURCE.copy(), TARGET.copy()
    {"source": source, "target": target}[changed][0, 1] = 20
    after = np.asarray(apply(params, source, target, SOURCE_SEGMENTS, TARGET_SEGMENTS))
    assert np.abs(after[0, 2] - before[0, 2]).max() > 1e-3
    np.testing.assert_array_equal(after[0, 3:8], before[0, 3:8])
