import collections
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.make import corpus_of, data_config
from transformer_flax.data.batches import (
    Batches,
    BucketedBatches,
    PackedBatches,
    bucket_edges,
    round_up,
    training_batches,
)
from transformer_flax.data.corpus import select_training_pairs
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL, PAD_ID

law = settings(max_examples=60)
KINDS = (BucketedBatches, PackedBatches)
kinds = pytest.mark.parametrize("kind", KINDS)


@st.composite
def cases(draw, kinds=KINDS):
    """A kind of batches, and arguments for it: a corpus, some of its pairs, and what suits them."""
    kind = draw(st.sampled_from(kinds))
    lengths = draw(st.lists(st.tuples(st.integers(2, 20), st.integers(2, 20)), min_size=1, max_size=60))
    corpus = corpus_of(*zip(*lengths, strict=True))
    indices = np.array(sorted(draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1))))
    longest = max(max(lengths[i]) for i in indices)
    multiple = draw(st.integers(1, 4))
    own = {"num_buckets": draw(st.integers(1, 6)), "length_multiple_of": draw(st.integers(1, 4))}
    widest = round_up(longest, own["length_multiple_of"])
    if kind is PackedBatches:
        longest += draw(st.integers(0, 30))
        own = {"width": longest}
        widest = longest
    smallest = widest * multiple
    return kind, own | {
        "corpus": corpus,
        "indices": indices,
        "tokens_per_batch": draw(st.integers(smallest, 4 * smallest)),
        "rows_multiple_of": multiple,
        "data_seed": draw(st.integers(0, 9)),
        "seed": draw(st.integers(0, 9)),
    }


def make(kind=BucketedBatches, **fields) -> Batches:
    """200 pairs of 2 to 30 tokens, in a few hundred tokens a batch."""
    rng = np.random.default_rng(0)
    case = {
        "corpus": corpus_of(rng.integers(2, 31, 200), rng.integers(2, 31, 200)),
        "indices": np.arange(200),
        "tokens_per_batch": 300,
        "rows_multiple_of": 2,
        "data_seed": 0,
        "seed": 0,
    }
    case |= {"width": 60} if kind is PackedBatches else {"num_buckets": 4}
    return kind(**(case | fields))


def epoch(batches: Batches, number: int = 0) -> list:
    n = batches.batches_per_epoch
    return [batches[k] for k in range(number * n, (number + 1) * n)]


def pairs_in(batch) -> list[int]:
    """The pairs of a batch, row by row, by the ids that corpus_of gives them."""
    source = batch["source"]
    before = np.pad(source[:, :-1], ((0, 0), (1, 0)), constant_values=END_ID)
    return (source[(before == END_ID) & (source != PAD_ID)] - NUM_SPECIAL).tolist()


def shapes_of(batches) -> list[tuple[int, int]]:
    return [batch["source"].shape for batch in batches]


def assert_same(some: list, others: list) -> None:
    for batch, other in zip(some, others, strict=True):
        assert batch.keys() == other.keys()
        for name, block in batch.items():
            np.testing.assert_array_equal(block, other[name])


# Edges


def slots(lengths, edges) -> int:
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


def fewest_slots(lengths, num_buckets: int) -> int:
    """By trying all choices of edges."""
    *others, longest = sorted(set(lengths))
    choices = itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(num_buckets))
    return min(slots(lengths, (*choice, longest)) for choice in choices)


@given(
    histogram=st.dictionaries(st.integers(1, 40), st.integers(1, 30), min_size=1, max_size=9),
    num_buckets=st.integers(1, 10),
)
def test_no_choice_of_edges_pads_less(histogram, num_buckets):
    lengths = np.repeat(list(histogram), list(histogram.values()))
    edges = bucket_edges(np.bincount(lengths), num_buckets)
    assert 1 <= len(edges) <= num_buckets
    assert edges.tolist() == sorted(set(edges.tolist()))
    assert edges[-1] == max(histogram)
    assert slots(lengths.tolist(), edges.tolist()) == fewest_slots(lengths.tolist(), num_buckets)


def test_enough_buckets_leave_no_padding():
    assert bucket_edges(np.bincount([7, 3, 3, 12, 7]), 3).tolist() == [3, 7, 12]
    assert bucket_edges(np.bincount([7, 3, 3, 12, 7]), 100).tolist() == [3, 7, 12]


# What a batch holds


@law
@given(cases())
def test_every_epoch_shows_every_pair_once(kind_and_case):
    kind, case = kind_and_case
    batches = kind(**case)
    for number in range(3):
        shown = [pair for batch in epoch(batches, number) for pair in pairs_in(batch)]
        assert sorted(shown) == case["indices"].tolist()


@law
@given(cases(kinds=[BucketedBatches]))
def test_a_row_is_a_whole_pair_or_empty(kind_and_case):
    _, case = kind_and_case
    corpus = case["corpus"]
    for batch in epoch(BucketedBatches(**case)):
        pairs = pairs_in(batch)
        for side in ("source", "target"):
            expected = np.zeros_like(batch[side])
            sentences = getattr(corpus, side)
            for row, pair in enumerate(pairs):
                expected[row, : sentences.lengths[pair]] = NUM_SPECIAL + pair
                expected[row, sentences.lengths[pair] - 1] = END_ID
            np.testing.assert_array_equal(batch[side], expected)
            assert batch[side].dtype == np.int32


@law
@given(cases(kinds=[PackedBatches]))
def test_a_packed_row_is_whole_pairs_side_by_side(kind_and_case):
    _, case = kind_and_case
    for batch in epoch(PackedBatches(**case)):
        pairs = iter(pairs_in(batch))
        for row in range(len(batch["source"])):
            count = batch["source_segments"][row].max()
            own = [next(pairs) for _ in range(count)]
            for side in ("source", "target"):
                sentences = getattr(case["corpus"], side)
                whole = [[NUM_SPECIAL + pair] * (sentences.lengths[pair] - 1) + [END_ID] for pair in own]
                segments = [[1 + i] * len(sentence) for i, sentence in enumerate(whole)]
                empty = [PAD_ID] * (case["width"] - sum(map(len, whole)))
                assert batch[side][row].tolist() == [*itertools.chain(*whole), *empty]
                assert batch[f"{side}_segments"][row].tolist() == [*itertools.chain(*segments), *empty]
        assert all(block.dtype == np.int32 for block in batch.values())
        assert list(pairs) == []


@law
@given(cases())
def test_a_batch_has_room_for_its_tokens_and_rows_that_divide(kind_and_case):
    kind, case = kind_and_case
    for batch in epoch(kind(**case)):
        rows, length = batch["source"].shape
        assert {block.shape for block in batch.values()} == {(rows, length)}
        assert rows > 0
        assert rows % case["rows_multiple_of"] == 0
        assert length % case.get("length_multiple_of", 1) == 0
        assert rows * length <= case["tokens_per_batch"]


@law
@given(cases())
def test_a_batch_has_as_many_rows_as_fit(kind_and_case):
    kind, case = kind_and_case
    for rows, length in kind(**case).shapes:
        assert (rows + case["rows_multiple_of"]) * length > case["tokens_per_batch"]


@law
@given(cases())
def test_at_most_one_batch_of_an_epoch_is_not_full(kind_and_case):
    kind, case = kind_and_case
    batches = kind(**case)
    for number in range(2):
        empty_rows = [np.sum(~batch["source"].any(axis=1)) for batch in epoch(batches, number)]
        assert sum(empty > 0 for empty in empty_rows) <= 1
        assert all(pairs_in(batch) for batch in epoch(batches, number))


@law
@given(cases(kinds=[BucketedBatches]))
def test_fewer_than_one_batch_of_a_bucket_moves_up(kind_and_case):
    _, case = kind_and_case
    batches = BucketedBatches(**case)
    lengths = np.maximum(case["corpus"].source.lengths, case["corpus"].target.lengths)
    widths = {pair: batch["source"].shape[1] for batch in epoch(batches) for pair in pairs_in(batch)}
    for rows, edge in zip(batches.rows, batches.edges, strict=True):
        assert sum(lengths[pair] <= edge < width for pair, width in widths.items()) < rows


# Shapes


@law
@given(cases())
def test_there_are_at_most_num_buckets_shapes(kind_and_case):
    kind, case = kind_and_case
    batches = kind(**case)
    seen = {shape for number in range(2) for shape in shapes_of(epoch(batches, number))}
    assert seen == set(batches.shapes)
    assert len(batches.shapes) == len(seen) <= case.get("num_buckets", 1)


@law
@given(cases(), st.integers(10, 10**6))
def test_shapes_do_not_depend_on_the_seed(kind_and_case, other_seed):
    kind, case = kind_and_case
    one, other = kind(**case), kind(**case | {"seed": other_seed})
    assert one.batches_per_epoch == other.batches_per_epoch
    for number in range(2):
        assert shapes_of(epoch(one, number)) == shapes_of(epoch(other, number))


@law
@given(cases())
def test_every_epoch_has_the_same_shapes(kind_and_case):
    kind, case = kind_and_case
    batches = kind(**case)
    counts = [collections.Counter(shapes_of(epoch(batches, number))) for number in range(3)]
    assert counts[0] == counts[1] == counts[2]


def test_the_order_of_shapes_changes_with_epoch_and_data_seed():
    order, other = (shapes_of(epoch(make(data_seed=data_seed))) for data_seed in (0, 1))
    assert order != other
    assert order != shapes_of(epoch(make(), 1))
    assert order != sorted(order, key=order.index)  # shapes are mixed, not one after the other


# A batch is a function of its number


@law
@given(cases(), st.data())
def test_a_batch_does_not_depend_on_what_was_asked_for_before(kind_and_case, data):
    kind, case = kind_and_case
    whole = kind(**case)
    n = 4 * whole.batches_per_epoch
    forward = [whole[k] for k in range(n)]
    order = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    fresh = kind(**case)
    assert_same([fresh[k] for k in order], [forward[k] for k in order])
    assert_same([whole[k] for k in order], [forward[k] for k in order])


@kinds
def test_a_batch_that_is_changed_by_its_user_is_not_changed_for_the_next(kind):
    batches = make(kind)
    batches[3]["source"][:] = 0
    assert_same([batches[3]], [make(kind)[3]])


@law
@given(cases(), st.sampled_from([1, 2, 4]))
def test_hosts_make_the_same_batches_together_as_one_alone(kind_and_case, hosts):
    kind, case = kind_and_case
    multiple = 4 * case["rows_multiple_of"]
    case |= {"rows_multiple_of": multiple, "tokens_per_batch": 4 * case["tokens_per_batch"]}
    alone = kind(**case)
    each = [kind(**case, share=(host, hosts)) for host in range(hosts)]
    assert {batches.batches_per_epoch for batches in each} == {alone.batches_per_epoch}
    for k in range(2 * alone.batches_per_epoch):
        parts = [batches[k] for batches in each]
        rows = len(alone[k]["source"]) // hosts
        assert {block.shape[0] for part in parts for block in part.values()} == {rows}
        assert pairs_in(alone[k]) == alone.pairs(k).tolist() == each[-1].pairs(k).tolist()
        for side, lengths in each[0].lengths(k).items():
            assert lengths.sum() == np.sum(alone[k][side] != PAD_ID)
        assert_same([alone[k]], [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}])


@kinds
@pytest.mark.parametrize("number", [0, 1])
def test_another_seed_fills_the_batches_with_other_pairs(kind, number):
    one, other = epoch(make(kind, seed=0), number), epoch(make(kind, seed=1), number)
    assert all(set(pairs_in(batch)) != set(pairs_in(peer)) for batch, peer in zip(one, other, strict=True))


def test_the_seed_of_a_run_fills_the_batches_and_that_of_its_data_orders_their_shapes():
    def of(data_seed, seed):
        config = data_config(tokens_per_batch=300, rows_multiple_of=2, num_buckets=4, seed=data_seed)
        return epoch(training_batches(make().corpus_of(0), np.arange(200), config, seed=seed, share=(0, 1)))

    one, another, elsewhere = of(0, 0), of(0, 1), of(1, 0)
    assert shapes_of(one) == shapes_of(another) != shapes_of(elsewhere)
    assert [pairs_in(batch) for batch in one] != [pairs_in(batch) for batch in another]


def test_training_batches_have_the_widths_that_the_config_describes():
    config = data_config(tokens_per_batch=300, rows_multiple_of=2, num_buckets=2, length_multiple_of=8)
    batches = training_batches(make().corpus_of(0), np.arange(200), config, seed=0, share=(0, 1))
    assert batches.shapes == [(12, 24), (8, 32)]  # of 8, 16, 24 and 32, with the fewest slots


@kinds
def test_every_epoch_has_another_order(kind):
    batches = make(kind)
    orders = [tuple(pair for batch in epoch(batches, number) for pair in pairs_in(batch)) for number in range(4)]
    assert len(set(orders)) == 4


@pytest.mark.parametrize(("kind", "own"), [(BucketedBatches, {"num_buckets": 1}), (PackedBatches, {})])
def test_every_epoch_of_every_seed_groups_the_pairs_anew(kind, own):
    groups = []
    for seed in (0, 1):
        batches = make(kind, tokens_per_batch=600, seed=seed, **own)  # of one shape
        groups += [{frozenset(pairs_in(batch)) for batch in epoch(batches, number)} for number in range(2)]
        assert batches.batches_per_epoch >= 5
    assert len(set.union(*groups)) == sum(map(len, groups)) == 4 * batches.batches_per_epoch


def test_every_epoch_packs_other_pairs_into_a_row():
    alike = corpus_of([5] * 20, [5] * 20)
    batches = make(
        PackedBatches, corpus=alike, indices=np.arange(20), width=10, tokens_per_batch=10, rows_multiple_of=1
    )
    one, other = ({frozenset(pairs_in(batch)) for batch in epoch(batches, number)} for number in range(2))
    assert len(one) == len(other) == 10
    assert len(one & other) < 5


def test_the_order_of_pairs_within_a_bucket_is_not_that_of_the_corpus():
    [batch] = epoch(make(indices=np.arange(20), num_buckets=1, tokens_per_batch=30 * 20))
    assert pairs_in(batch) != sorted(pairs_in(batch))


def test_pairs_that_move_up_are_spread_over_their_new_bucket():
    lengths = [5] * 3 + [30] * 37  # rows for 24 of 5 tokens, so the three move up to ten batches of 4 rows
    batches = make(corpus=corpus_of(lengths, lengths), indices=np.arange(40), num_buckets=2, tokens_per_batch=4 * 30)
    for number in range(3):
        assert len([batch for batch in epoch(batches, number) if {0, 1, 2} & {*pairs_in(batch)}]) > 1


@kinds
def test_the_first_batch_of_every_shape_is_the_first_that_has_it(kind):
    batches = make(kind)
    shapes = shapes_of(epoch(batches))
    assert batches.first_of_each_shape() == [k for k, shape in enumerate(shapes) if shape not in shapes[:k]]


def test_packed_rows_hold_sentences_of_more_than_255_tokens():
    lengths = [300, 256, 255, 44]
    own = {"corpus": corpus_of(lengths, lengths), "indices": np.arange(4)}
    batches = make(PackedBatches, width=300, tokens_per_batch=600, **own)
    assert sorted(np.sum(batch["source"] != PAD_ID) for batch in epoch(batches)) == [255, 600]


# Cutting and leaving out


@pytest.mark.parametrize(("max_length", "multiple"), [(2, 1), (5, 1), (5, 8), (29, 1), (30, 1), (30, 8), (100, 1)])
def test_max_length_cuts_and_drops_nothing(max_length, multiple):
    batches, corpus = make(max_length=max_length, length_multiple_of=multiple), make().corpus_of(0)
    shown = []
    for batch in epoch(batches):
        pairs = pairs_in(batch)
        shown += pairs
        for side in ("source", "target"):
            width = batch[side].shape[1]
            assert width <= -(-max_length // multiple) * multiple
            for row, pair in zip(batch[side], pairs, strict=False):
                length = getattr(corpus, side).lengths[pair]
                assert width >= min(length, max_length)
                expected = ([NUM_SPECIAL + pair] * (length - 1) + [END_ID])[:max_length]
                if side == "source" and length > max_length:
                    expected[-1] = END_ID  # as where a text is translated or classified
                assert row.tolist() == expected + [PAD_ID] * (width - len(expected))
    assert sorted(shown) == list(range(200))


def test_pairs_that_are_not_selected_are_never_shown():
    corpus = make().corpus_of(0)
    selection = select_training_pairs(corpus, data_config(max_length=20))
    batches = make(corpus=corpus, indices=selection.indices)
    shown = {pair for number in range(2) for batch in epoch(batches, number) for pair in pairs_in(batch)}
    assert shown == set(selection.indices.tolist())
    assert max(length for _, length in batches.shapes) <= 20


# Refusals


@kinds
def test_too_few_tokens_a_batch_are_refused_with_a_number_that_does(kind):
    with pytest.raises(
        UserError, match=r"config\.data\.tokens_per_batch is 239\b.*config\.data\.max_length"
    ) as refusal:
        make(kind, tokens_per_batch=239, rows_multiple_of=8)
    assert "config.data.rows_multiple_of" in str(refusal.value)
    enough = int(re.search(r"at least (\d+)", str(refusal.value)).group(1))
    make(kind, tokens_per_batch=enough, rows_multiple_of=8)
    with pytest.raises(UserError, match="tokens_per_batch"):
        make(kind, tokens_per_batch=enough - 1, rows_multiple_of=8)


@kinds
def test_no_pairs_are_refused(kind):
    with pytest.raises(UserError, match="no sentence pairs"):
        make(kind, indices=np.empty(0, np.int64))
