import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_flax.data.packing import pack

WIDTH = 20
lengths = st.lists(st.tuples(st.integers(1, WIDTH), st.integers(1, WIDTH)), min_size=1, max_size=80)


def sides(pairs) -> tuple[np.ndarray, np.ndarray]:
    source, target = zip(*pairs, strict=True)
    return np.array(source), np.array(target)


def rows_of(packing, seed: int = 0) -> list[list[int]]:
    pairs, sizes = packing.look_up(packing.shuffled(np.random.default_rng(seed)), np.arange(len(packing)))
    return [row.tolist() for row in np.split(pairs, np.cumsum(sizes)[:-1])]


@given(lengths, st.integers(0, 5))
def test_every_pair_has_one_place_and_no_row_more_than_its_width(pairs, seed):
    source, target = sides(pairs)
    rows = rows_of(pack(source, target, WIDTH), seed)
    assert sorted(itertools.chain(*rows)) == list(range(len(pairs)))
    for row in rows:
        assert row
        assert max(source[row].sum(), target[row].sum()) <= WIDTH


@given(lengths)
def test_shuffling_changes_the_pairs_of_a_row_and_not_their_lengths(pairs):
    source, target = sides(pairs)
    packing = pack(source, target, WIDTH)
    one, other = rows_of(packing, 0), rows_of(packing, 1)
    for row, peer in zip(one, other, strict=True):
        assert source[row].tolist() == source[peer].tolist()
        assert target[row].tolist() == target[peer].tolist()


@given(lengths)
def test_a_pair_is_alone_only_where_it_fits_to_no_other_that_is(pairs):
    source, target = sides(pairs)
    alone = [row[0] for row in rows_of(pack(source, target, WIDTH)) if len(row) == 1]
    for i, one in enumerate(alone):
        for other in alone[:i]:
            assert max(source[one] + source[other], target[one] + target[other]) > WIDTH


def test_pairs_that_fit_together_exactly_fill_their_rows():
    source, target = np.array([7, 3, 5, 5, 7, 3]), np.array([6, 4, 5, 5, 6, 4])
    totals = [(source[row].sum(), target[row].sum()) for row in rows_of(pack(source, target, 10))]
    assert totals == [(10, 10)] * 3


@pytest.mark.parametrize("correlated", [True, False])
def test_a_corpus_fills_its_rows(correlated):
    rng = np.random.default_rng(0)
    source = np.clip(rng.normal(30, 12, 20_000), 3, 100).astype(np.int32)
    target = np.clip(source + rng.integers(-5, 6, len(source)), 3, 100) if correlated else rng.permutation(source)
    packing = pack(source, target, 256)
    assert max(source.sum(), target.sum()) / (256 * len(packing)) > (0.96 if correlated else 0.9)
    assert packing.places.dtype == packing.members.dtype == np.int32  # millions of pairs are held in memory


def test_wide_rows_take_memory_for_their_pairs_and_not_for_their_width():
    source, target = np.array([30_000, 40_000, 2_768, 9]), np.array([40_000, 30_000, 9, 2_768])
    tracemalloc.start()
    rows = rows_of(pack(source, target, 42_768))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sorted(sorted(row) for row in rows) == [[0, 3], [1, 2]]
    assert peak < 1 << 22


def test_every_order_is_possible():
    """Three pairs alike, two to a row: each is the one left alone in a third of all shuffles."""
    packing = pack(np.full(3, 5), np.full(3, 5), 10)
    alone = [rows_of(packing, seed)[-1] for seed in range(600)]
    shares = [sum(row == [pair] for row in alone) / 600 for pair in range(3)]
    np.testing.assert_allclose(shares, 1 / 3, atol=0.08)
