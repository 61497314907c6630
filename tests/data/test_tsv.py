"""Texts and labels in tab-separated files."""

import gzip
import re

import numpy as np
import pytest

from tests.data.make import data_config
from transformer_flax.data.classes import Classes
from transformer_flax.data.corpus import load_corpus
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.tokenizer import Tokenizer, sample_texts
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL


def write(folder, split, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    return folder


def read(folder, split="train", **fields):
    return load_pairs(data_config(source="tsv", path=str(folder), **fields), split)


def as_list(pairs):
    return pairs.read(range(len(pairs)))


def test_the_columns_that_are_named_are_the_label_and_the_text(tmp_path):
    rows = [("HUM", "desc", "Who was Galileo ?"), (" LOC ", "city", " Where ? "), ("NUM", "dist", "")]
    write(tmp_path, "train", rows)
    pairs = read(tmp_path, text_column=2)
    assert as_list(pairs) == [("Who was Galileo ?", "HUM"), (" Where ? ", "LOC"), ("", "NUM")]
    assert pairs.read([2, 0]) == [("", "NUM"), ("Who was Galileo ?", "HUM")]
    fine = read(tmp_path, label_column=1, text_column=2)
    assert [label for _, label in as_list(fine)] == ["desc", "city", "dist"]
    assert fine.fingerprint != pairs.fingerprint == read(tmp_path, text_column=2).fingerprint
    packed = tmp_path / "test.tsv.gz"
    packed.write_bytes(gzip.compress(b"HUM\tdesc\tWho ?\r\n"))
    assert as_list(read(tmp_path, "test", text_column=2)) == [("Who ?", "HUM")]


def test_texts_are_normalised_and_labels_are_not(tmp_path):
    write(tmp_path, "train", [("Good", "Isn't it FUN?")])
    assert as_list(read(tmp_path, lowercase=True, tokenized=True)) == [("isn &apos;t it fun ?", "Good")]


def test_what_is_held_out_depends_on_the_text_and_the_seed_alone_and_copies_stay_together(tmp_path):
    rows = [(str(i % 3), f"text {i % 400}") for i in range(1000)]  # most of them more than once
    write(tmp_path, "train", rows)
    train, valid = (as_list(read(tmp_path, split, held_out=0.2)) for split in ("train", "valid"))
    assert sorted(train + valid) == sorted((text, label) for label, text in rows)
    assert not {text for text, _ in train} & {text for text, _ in valid}
    assert len(valid) == pytest.approx(200, abs=50)

    write(tmp_path / "more", "train", [*reversed(rows), ("1", "another")])
    more = as_list(read(tmp_path / "more", "valid", held_out=0.2))
    assert {text for text, _ in more} - {"another"} == {text for text, _ in valid}
    other = as_list(read(tmp_path, "valid", held_out=0.2, seed=1))
    assert {text for text, _ in other} != {text for text, _ in valid}
    write(tmp_path, "test", rows)
    assert len(read(tmp_path, "test", held_out=0.2)) == 1000
    assert read(tmp_path, held_out=0.2).fingerprint != read(tmp_path).fingerprint


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([("a", "b"), ("a", "b", "c")], {}, r"train\.tsv, line 2: it has 3 columns and the first line 2"),
        ([("a", "b"), (" ", "b")], {}, r"train\.tsv, line 2: its column 0, the label, is empty"),
        ([("a", "b")], {"text_column": 2}, r"text_column is 2; \S+train\.tsv has columns 0 to 1: 'a\\tb'"),
        ([("a", "b")], {"label_column": -1}, "label_column is -1"),
    ],
)
def test_what_is_no_table_of_texts_is_refused(tmp_path, rows, fields, message):
    with pytest.raises(UserError, match=message):
        read(write(tmp_path, "train", rows), **fields)


def test_a_valid_split_is_either_a_file_or_held_out(tmp_path):
    write(tmp_path, "train", [("a", "b")])
    with pytest.raises(UserError, match=r"has no valid\.tsv .*; --config\.data\.held_out=0\.1 keeps a tenth of train"):
        read(tmp_path, "valid")
    with pytest.raises(UserError, match=r"has no test\.tsv"):
        read(tmp_path, "test")
    write(tmp_path, "valid", [("a", "c")])
    assert as_list(read(tmp_path, "valid")) == [("c", "a")]
    with pytest.raises(UserError, match=r"held_out is 0\.1, so \S+valid\.tsv would never be read"):
        read(tmp_path, held_out=0.1)
    with pytest.raises(UserError, match=re.escape("there is no such folder")):
        read(tmp_path / "nowhere", "valid")
    with pytest.raises(UserError, match=re.escape("that is a file; name the folder of texts")):
        read(tmp_path / "train.tsv", "valid")


def test_labels_are_one_token_each_and_no_text_for_the_tokenizer(tmp_path):
    rows = [("zebra", "one two"), ("ape", "two three"), ("zebra", "")]
    pairs = read(write(tmp_path, "train", rows))
    classes = Classes.of(pairs)
    assert (classes.names, classes.vocab_size) == (("ape", "zebra"), NUM_SPECIAL + 2)
    texts = list(sample_texts(pairs, 3, 0, sources_only=True))
    assert texts == ["one two", "two three", ""]
    tokenizer = Tokenizer.train(texts, 270)
    corpus = load_corpus(pairs, tokenizer, str(tmp_path / "cache"), labels=classes)
    assert [corpus.target[i].tolist() for i in range(3)] == [[NUM_SPECIAL + n, END_ID] for n in (1, 0, 1)]
    assert [corpus.source[i][:-1].tolist() for i in range(3)] == tokenizer.encode([text for _, text in rows])
    again = load_corpus(pairs, tokenizer, str(tmp_path / "cache"), labels=classes)
    np.testing.assert_array_equal(again.target.ids, corpus.target.ids)

    with pytest.raises(
        UserError, match="the label 'zebra' is none of the classes of the train split, which are ape, bee"
    ):
        load_corpus(pairs, tokenizer, str(tmp_path / "cache"), labels=Classes(["ape", "bee"]))
