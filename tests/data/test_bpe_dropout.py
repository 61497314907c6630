"""BPE-dropout: other pieces of the same text in every epoch, and batches that are pure functions all the same."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from tests.data.make import data_config
from tests.training.small import small_config
from transformer_flax.data.batches import BucketedBatches, PackedBatches, training_batches
from transformer_flax.data.bpe_dropout import SPELLINGS, BpeDropout, split_with_dropout
from transformer_flax.data.corpus import Corpus, Sentences
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, PAD_ID
from transformer_flax.training.config_checks import check

LINES = ["the cat doesn't eat  two cats' fish", "die Katze frißt's nicht: 'to eat' 3 Fische", "a", "ẞ\tso so"] * 5
PAIRS = [LINES, LINES[::-1]]
LONGEST = 40


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, 330)


@pytest.fixture(scope="module")
def corpus(tokenizer):
    sides = []
    for lines in PAIRS:
        encoded = [[*ids, END_ID] for ids in tokenizer.encode(lines)]
        sides.append(Sentences(np.concatenate(encoded).astype(np.uint16), np.cumsum([0, *map(len, encoded)])))
    return Corpus(*sides)


@pytest.fixture(scope="module")
def dropout(corpus, tokenizer):
    return BpeDropout(corpus, tokenizer, 0.3, LONGEST, seed=0)


def test_each_merge_is_left_out_at_its_rate_at_each_step():
    ranks = {("b", "c"): 0, ("a", "b"): 1, ("a", "bc"): 2}
    assert split_with_dropout("abc", ranks, 0.0, random.Random(0)) == ["abc"]
    spelt = [tuple(split_with_dropout("abc", ranks, 0.2, random.Random(seed))) for seed in range(4000)]
    # First b and c are merged, or else a and b, or neither; then, in the first case, a and bc.
    expected = {("abc",): 0.8 * 0.8, ("a", "bc"): 0.8 * 0.2, ("ab", "c"): 0.2 * 0.8, ("a", "b", "c"): 0.2 * 0.2}
    for pieces, share in expected.items():
        assert spelt.count(pieces) / 4000 == pytest.approx(share, abs=0.025)


def test_without_dropout_words_have_the_tokenizers_own_pieces(corpus, tokenizer):
    epoch = BpeDropout(corpus, tokenizer, 0.0, LONGEST, seed=0).epoch(0, 0)
    for side, plain in zip(epoch, (corpus.source, corpus.target), strict=True):
        assert [side[i].tolist() for i in range(len(LINES))] == [plain[i].tolist() for i in range(len(LINES))]


def test_every_epoch_spells_the_same_text_otherwise(corpus, tokenizer, dropout):
    epochs = [[*dropout.epoch(seed, number)] for seed, number in ((0, 0), (0, 1), (1, 0))]
    spelt = [[[side[i].tolist() for i in range(len(LINES))] for side in sides] for sides in epochs]
    for sides in spelt:
        for side, lines in zip(sides, PAIRS, strict=True):
            assert [tokenizer.decode(ids) for ids in side] == lines
            assert all(ids[-1] == END_ID and END_ID not in ids[:-1] for ids in side)
            assert len({tuple(ids) for ids in side[::4]}) > 1  # the same line, in one epoch
    assert spelt[0] != spelt[1] != spelt[2] != spelt[0]
    again = BpeDropout(corpus, tokenizer, 0.3, LONGEST, seed=0).epoch(0, 1)
    assert [[side[i].tolist() for i in range(len(LINES))] for side in again] == spelt[1]
    other = BpeDropout(corpus, tokenizer, 0.3, LONGEST, seed=1).epoch(0, 1)
    assert [[side[i].tolist() for i in range(len(LINES))] for side in other] != spelt[1]
    indices = np.array([7, 0, 3])  # alone, or with others in any order
    lengths = again.source.lengths_of(indices)
    assert again.source.tokens(indices, lengths).tolist() == [token for i in indices for token in spelt[1][0][i]]


def test_epochs_draw_every_spelling_but_the_tokenizers_own(dropout):
    indices, seen = np.arange(len(LINES)), set()
    for number in range(20):
        source = dropout.epoch(0, number).source
        spellings, _, too_long = source.choose(indices)
        drawn = spellings[~np.repeat(too_long, source.words.lengths_of(indices))]
        seen |= set((drawn % SPELLINGS).tolist())
    assert seen == set(range(1, SPELLINGS))


def test_sentences_without_room_keep_the_tokenizers_own_pieces_and_are_counted(corpus, tokenizer):
    longest = int(corpus.source.lengths.max())
    dropout = BpeDropout(corpus, tokenizer, 0.9, longest, seed=0)
    source, room = dropout.epoch(0, 0).source, dropout.room.source.lengths
    lengths = source.lengths_of(np.arange(len(LINES)))
    assert (lengths <= room).all()
    assert room.max() == longest
    widest = int(corpus.source.lengths.argmax())
    assert source[widest].tolist() == corpus.source[widest].tolist()
    np.testing.assert_array_equal(
        BpeDropout(corpus, tokenizer, 0.9, 2, seed=0).room.source.lengths, corpus.source.lengths
    )
    assert source.words.lengths[2] == 2  # "a" and the end symbol, so the last word of a line is spelt like any other
    assert 10 <= dropout.too_long(np.arange(len(LINES)), 0) <= 2 * len(LINES)


@pytest.mark.parametrize("kind", [BucketedBatches, PackedBatches])
def test_batches_of_an_epoch_have_its_pieces_in_shapes_that_are_the_same_for_all(tokenizer, dropout, kind):
    own = {"num_buckets": 3} if kind is BucketedBatches else {"width": LONGEST}
    own |= {"tokens_per_batch": 4 * LONGEST, "rows_multiple_of": 2, "data_seed": 0}

    def make(seed, share=(0, 1)):
        text = lambda epoch: dropout.epoch(seed, epoch)  # noqa: E731
        return kind(dropout.room, np.arange(len(LINES)), seed=seed, share=share, text=text, **own)

    batches, others = make(0), make(1)
    assert batches.batches_per_epoch >= 3
    seen = []
    for k in range(2 * batches.batches_per_epoch):
        batch, halves = batches[k], [make(0, (i, 2))[k] for i in range(2)]
        assert batch["source"].shape == others[k]["source"].shape
        for side in ("source", "target"):
            np.testing.assert_array_equal(batch[side], np.concatenate([half[side] for half in halves]))
            assert (batch[side] != PAD_ID).sum() == batches.lengths(k)[side].sum()
        assert batches.corpus_of(k).source.key == dropout.epoch(0, k // batches.batches_per_epoch).source.key
        text = batch["source"][batch["source"] != PAD_ID]
        sentences = [tokenizer.decode(ids) for ids in np.split(text, np.flatnonzero(text == END_ID) + 1)[:-1]]
        assert sentences == [LINES[i] for i in batches.pairs(k)]
        seen += batches.pairs(k).tolist()
    assert sorted(seen) == sorted([*range(len(LINES))] * 2)
    assert batches.corpus_of(0).source.key != batches.corpus_of(batches.batches_per_epoch).source.key


def test_training_batches_have_the_spellings_of_their_seed_and_room_for_them(corpus, dropout):
    config = data_config(tokens_per_batch=4 * LONGEST, rows_multiple_of=2, length_multiple_of=1)
    room, own = ([np.maximum(sides.source.lengths, sides.target.lengths).max()] for sides in (dropout.room, corpus))
    assert room != own
    for seed in (0, 1):
        batches = training_batches(corpus, np.arange(len(LINES)), config, seed=seed, share=(0, 1), dropout=dropout)
        assert batches.corpus_of(0).source.key == dropout.epoch(seed, 0).source.key
        assert [width for _, width in batches.shapes][-1:] == room


def test_tokens_added_to_the_vocabulary_stay_whole(tokenizer):
    backend = Backend.from_str(tokenizer.to_json())
    backend.add_tokens(["<2de>"])
    tokenizer = Tokenizer(backend)
    [ids] = tokenizer.encode(["<2de> the cat"])
    added = tokenizer.vocab_size - 1
    assert ids.count(added) == 1
    side = Sentences(np.array([*ids, END_ID], np.uint16), np.array([0, len(ids) + 1]))
    dropout = BpeDropout(Corpus(side, side), tokenizer, 0.9, LONGEST, seed=0)
    spelt = [dropout.epoch(0, epoch).source[0].tolist() for epoch in range(20)]
    assert all(each.count(added) == 1 for each in spelt)
    assert len({*map(tuple, spelt)}) > 1


def test_another_tokenizer_is_refused_before_the_text_is_read(tmp_path):
    wordpiece = Tokenizer.train(LINES, 330, "wordpiece")
    file = tmp_path / "tokenizer.json"
    file.write_text(wordpiece.to_json())
    with pytest.raises(
        UserError, match=r"config\.data\.tokenizer is 'wordpiece'; it must be bpe with config\.data\.bpe"
    ):
        check(small_config(data__bpe_dropout=0.1, data__tokenizer="wordpiece"))
    given = {"data__tokenizer_file": str(file), "data__vocab_size": wordpiece.vocab_size}
    with pytest.raises(UserError, match=r"config\.data\.bpe_dropout is for a byte-level BPE, and this .* WordPiece"):
        check(small_config(data__bpe_dropout=0.1, **given))
    bpe = Tokenizer.train(LINES, 330)
    given = {"data__tokenizer_file": str(file), "data__vocab_size": bpe.vocab_size}
    for part in ("decoder", "pre_tokenizer"):
        file.write_text(json.dumps(json.loads(bpe.to_json()) | {part: None}))
        with pytest.raises(UserError, match=rf"for a byte-level BPE, and this tokenizer has .*{part} None"):
            check(small_config(data__bpe_dropout=0.1, **given))


def test_a_tokenizer_from_elsewhere_may_split_words_before_it_writes_bytes():
    content = json.loads(Tokenizer.train(LINES, 330).to_json())
    split, letters = content["pre_tokenizer"]["pretokenizers"]
    of = lambda part: Tokenizer(Backend.from_str(json.dumps(content | {"pre_tokenizer": part})))  # noqa: E731
    assert of(letters | {"use_regex": True}).merges() == of(content["pre_tokenizer"]).merges()
    digits = {"type": "Digits", "individual_digits": True}
    for parts in ([letters, letters], [split, letters | {"add_prefix_space": True}], [letters, split], [split, digits]):
        with pytest.raises(UserError, match=r"has model BPE, pre_tokenizer (Sequence|Split|Digits)"):
            of({"type": "Sequence", "pretokenizers": parts}).merges()
