from hypothesis import given
from hypothesis import strategies as st

from tests.data.make import ListPairs, corpus_of, data_config
from transformer_flax.data.batches import BucketedBatches, PackedBatches
from transformer_flax.data.corpus import load_corpus, select_training_pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.special_tokens import END_ID


def select(corpus, max_length, **fields):
    return select_training_pairs(corpus, data_config(max_length=max_length, **fields))


def test_selection_keeps_pairs_up_to_the_longest_and_counts_the_others():
    source, target = [5, 5, 6, 1, 2, 1, 9, 1], [5, 2, 5, 5, 1, 1, 9, 9]
    selection = select(corpus_of(source, target), max_length=5)
    assert selection.indices.tolist() == [0, 1]
    # The last pair is empty and too long: it counts once.
    assert selection.dropped == {"an empty side": 4, "more than 5 tokens": 2}


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=40), st.integers(2, 12))
def test_every_pair_is_selected_or_counted(lengths, max_length):
    source, target = zip(*lengths, strict=True) if lengths else ((), ())
    selection = select(corpus_of(source, target), max_length)
    assert len(selection.indices) + sum(selection.dropped.values()) == len(lengths)
    kept = [i for i, sides in enumerate(lengths) if min(sides) > 1 and max(sides) <= max_length]
    assert selection.indices.tolist() == kept


def test_a_wild_ratio_of_lengths_is_left_out_on_request():
    corpus = corpus_of([6, 7, 2, 3, 1], [2, 2, 6, 10, 3])
    assert len(select(corpus, 9).indices) == 3
    selection = select(corpus, 9, max_length_ratio=3)
    assert selection.indices.tolist() == [0, 2]  # three times as long is not over three times
    assert selection.dropped == {"an empty side": 1, "more than 9 tokens": 1, "one side over 3 times as long": 1}


def test_of_equal_pairs_the_first_stays_on_request(tmp_path):
    pairs = ListPairs([("a b", "c"), ("a", "b c"), ("a b", "c"), ("a b", "d"), ("a", "b c"), ("c", "a b")])
    corpus = load_corpus(pairs, Tokenizer.train(["a b c d"], 270), str(tmp_path))
    assert len(select(corpus, 9).indices) == 6
    selection = select(corpus, 9, drop_duplicates=True)
    assert selection.indices.tolist() == [0, 1, 3, 5]
    assert selection.dropped["an identical earlier pair"] == 2


def test_a_corpus_is_read_block_by_block_as_if_it_were_whole(monkeypatch):
    def made():
        source, target = [5, 1, 9, 5, 5, 7, 5], [5, 5, 5, 6, 5, 8, 5]
        corpus = corpus_of(source, target)
        corpus.source.ids[:], corpus.target.ids[:] = END_ID, END_ID  # pairs of the same lengths are the same
        selection = select(corpus, 8, drop_duplicates=True)
        batches = [
            BucketedBatches(corpus, selection.indices, num_buckets=2, **arguments),
            PackedBatches(corpus, selection.indices, width=9, **arguments),
        ]
        return selection.indices.tolist(), selection.dropped, *(each.shapes for each in batches)

    arguments = {"tokens_per_batch": 12, "rows_multiple_of": 1, "data_seed": 0, "seed": 0}
    whole = made()
    assert whole[0] == [0, 3, 5]
    monkeypatch.setattr("transformer_flax.data.corpus.BLOCK_PAIRS", 2)
    assert made() == whole
