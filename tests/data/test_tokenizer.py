import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from tests.data.make import ListPairs
from transformer_flax.data import sentence_pairs
from transformer_flax.data.tokenizer import (
    JOINERS,
    LOSSLESS,
    SMALLEST_VOCABULARY,
    Tokenizer,
    sample_texts,
    smallest_vocabulary,
)
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import BEGIN_ID, END_ID, NUM_SPECIAL, PAD_ID

# "haus" and "house" each stand in one language only, "winter" in both.
PAIRS = ListPairs(
    (f"the house number {n} in winter, isn't it", f"das haus nummer {n} im winter, nicht wahr") for n in range(40)
)
TEXTS = [text for pair in PAIRS for text in pair]
VOCAB_SIZE = 320
LITERALS = ["<pad>", "<begin>", "<end>"]
# Words of the training text and markers among arbitrary text, so that merges and markers meet it.
texts = st.one_of(
    st.text(),
    st.lists(st.sampled_from([*LITERALS, "house", "haus", " ", "  ", "\n", "\t", "é", "it's", "12"])).map("".join),
)


@pytest.fixture(scope="module", params=LOSSLESS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(kind) -> Tokenizer:
    return Tokenizer.train(TEXTS, VOCAB_SIZE, kind)


@pytest.fixture(scope="module")
def loaded(tokenizer, tmp_path_factory) -> Tokenizer:
    """The same after a rest on disk."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(tokenizer.to_json(), encoding="utf-8")
    return Tokenizer.load(file)


@given(texts)
@example("")
@example(" ")
@example("  house ")
@example("<end>")
@example(" <pad><begin> <end>\n")
@example("\x00\r\n\t\x85\u2028\ufeff")
@example("e\u0301 é ﬁ Å ㎞")  # a Unicode normalisation would change these
@example("🏴󠁧󠁢󠁷󠁬󠁳󠁿 \U0010ffff")
def test_decoding_an_encoding_gives_the_text(tokenizer, text):
    [ids] = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text


@given(texts)
@example("<pad><begin><end>")
@example(" <pad> <begin> <end> ")
def test_text_is_never_a_special_token(tokenizer, loaded, text):
    for some in (tokenizer, loaded):
        [ids] = some.encode([text])
        assert all(NUM_SPECIAL <= i < some.vocab_size for i in ids)


def test_whole_words_are_never_special_tokens_either():
    words = Tokenizer.train(["the <end> of < pad >"] * 2, VOCAB_SIZE, kind="words")
    assert words.pieces("the <end> <pad>") == ["the", "<", "end", ">", "<", "pad", ">", "<end>"]


@given(texts)
@example("<end>")
def test_a_loaded_tokenizer_is_the_one_that_was_saved(tokenizer, loaded, text):
    [ids] = loaded.encode([text])
    assert [ids] == tokenizer.encode([text])
    assert loaded.decode(ids) == text


@given(st.lists(texts, max_size=5))
def test_a_text_is_encoded_alike_in_any_company(tokenizer, batch):
    assert tokenizer.encode(batch) == [tokenizer.encode([text])[0] for text in batch]


def test_saving_what_was_loaded_gives_the_same_file(tokenizer, loaded):
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.vocab_size == tokenizer.vocab_size


def test_only_an_empty_text_has_no_ids(tokenizer):
    assert tokenizer.encode(["", " ", "\n"])[0] == []
    assert all(tokenizer.encode([" ", "\n", "\x00"]))


@given(texts)
@example("")
@example("<end>")
@example("the house 🜁")
def test_pieces_are_the_names_of_the_ids_and_the_end_symbol(tokenizer, text):
    [ids] = tokenizer.encode([text])
    vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
    *pieces, last = tokenizer.pieces(text)
    assert [vocabulary[piece] for piece in pieces] == ids
    assert vocabulary[last] == END_ID


def test_pieces_can_be_read(tokenizer):
    assert tokenizer.pieces("the house") == ["Ġthe", "Ġhouse", "<end>"]
    assert tokenizer.pieces("") == ["<end>"]
    assert not {"<end>", "<pad>"} & set(tokenizer.pieces("<end><pad>")[:-1])


def test_special_tokens_are_left_out_of_the_text(tokenizer):
    [ids] = tokenizer.encode(["the house"])
    assert tokenizer.decode(np.array([BEGIN_ID, *ids, END_ID, PAD_ID, PAD_ID], np.int32)) == "the house"


def test_half_a_character_becomes_a_replacement_character(tokenizer):
    [ids] = tokenizer.encode(["house 🜁"])
    assert tokenizer.decode(ids[:-1]) == "house \ufffd"


@pytest.mark.parametrize("word", ["house", "haus", "winter", "unheard-of", "Straße", "12", "🜁"])
def test_a_word_has_the_same_pieces_at_the_start_and_within(tokenizer, word):
    [alone, before, whole] = tokenizer.encode([word, "the", f"the {word}"])
    assert before + alone == whole


def longest_first(word: str, vocabulary) -> list[str]:
    pieces = []
    while word:
        pieces.append(next(word[:n] for n in range(len(word), 0, -1) if word[:n] in vocabulary))
        word = word.removeprefix(pieces[-1])
    return pieces


def test_word_pieces_are_the_longest_that_fit_from_left_to_right():
    words = [
        first + second for first in ("house", "haus", "number", "winter", "nicht") for second in ("er", "isn", "mmer")
    ]
    spelt = {}
    for kind in LOSSLESS:
        tokenizer = Tokenizer.train(TEXTS, 400, kind)
        spelt[kind] = [tokenizer.pieces(word)[:-1] for word in words]
        vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
        greedy = [longest_first(f"Ġ{word}", vocabulary) for word in words]
        assert (spelt[kind] == greedy) == (kind == "wordpiece")


@pytest.mark.parametrize("mark", ["'", "\u2019"])
def test_word_pieces_keep_the_apostrophe_with_an_elided_word_and_english_contractions_as_they_are(mark):
    texts = [f"l{mark}homme qu{mark}elle d{mark}y c{mark}est isn{mark}t we{mark}ll they{mark}re house{mark}s"] * 9
    tokenizer = Tokenizer.train(texts, 500, "wordpiece")

    def words(text: str) -> list[str]:
        [ids] = tokenizer.encode([text])
        return [tokenizer.decode([i]) for i in ids]

    assert words(f"l{mark}homme") == [f"l{mark}", "homme"]
    assert words(f"qu{mark}elle c{mark}est d{mark}y") == [f"qu{mark}", "elle", f"c{mark}", "est", f"d{mark}", "y"]
    assert words(f"isn{mark}t we{mark}ll they{mark}re") == ["isn", f"{mark}t", "we", f"{mark}ll", "they", f"{mark}re"]
    assert words(f"house{mark}s")[-1] == f"{mark}s"


@pytest.mark.parametrize(
    "text",
    ["হাজার টাকা", "हज़ार रुपये", "వెయ్యి", "พันห้าร้อย", "שָׁלוֹם", "ألفاً", "می\u200cخواهم", "nghi\u0300n đo\u0302\u0300ng"],  # noqa: RUF001
    ids=["Bengali", "Hindi", "Telugu", "Thai", "Hebrew", "Arabic", "Persian", "Vietnamese"],
)
def test_marks_and_joiners_are_parts_of_a_word(text, kind):
    tokenizer = Tokenizer.train([text] * 9, 400, kind)
    assert [tokenizer.decode([i]) for [i] in tokenizer.encode(text.split())] == text.split()


@pytest.mark.parametrize("text", ["l's\u0302o", "d'm\u0301a"])
def test_an_accent_stays_on_the_letter_of_what_looks_like_a_contraction(text, kind):
    tokenizer = Tokenizer.train([text] * 9, 400, kind)
    [ids] = tokenizer.encode([text])
    assert tokenizer.decode(ids[-1:]) == text[2:]


def test_tokenizers_that_split_words_differently_are_comparable(tokenizer):
    other = json.loads(tokenizer.to_json()) | {"pre_tokenizer": {"type": "Whitespace"}}
    assert Tokenizer(Backend.from_str(json.dumps(other))).comparable() == tokenizer.comparable()
    other["normalizer"] = {"type": "Lowercase"}
    assert Tokenizer(Backend.from_str(json.dumps(other))).comparable() != tokenizer.comparable()


@given(st.text(st.characters(exclude_categories=("M", "Cs", "Cn"), exclude_characters=JOINERS)))
@example("it's  12 l'homme\n ❤ ")
def test_without_marks_the_words_of_bpe_are_those_of_gpt_2(text):
    tokenizer = Backend.from_str(Tokenizer.train([], SMALLEST_VOCABULARY).to_json())
    ours, theirs = tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize("letter", ["x", "é", "🜁", "<", " ", "1", "a'", "\n"])
def test_a_line_of_100_000_letters_costs_little_and_is_not_lost(tokenizer, letter):
    text = letter * 100_000
    started = time.perf_counter()
    [ids] = tokenizer.encode([text])
    assert time.perf_counter() - started < 20  # one word of this length would take hours
    assert tokenizer.decode(ids) == text


def test_both_languages_share_one_vocabulary(kind):
    tokenizer = Tokenizer.train(sample_texts(PAIRS, len(PAIRS), seed=0), 400, kind)
    # Frequent words of either side are one piece each.
    assert [len(ids) for ids in tokenizer.encode(["house", "haus", "winter"])] == [1, 1, 1]


def test_the_vocabulary_is_as_large_as_asked_for_where_the_texts_suffice(tokenizer, kind):
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert Tokenizer.train(["one"], 5_000, kind).vocab_size < 5_000


def test_training_twice_gives_the_same_file(tokenizer, kind):
    assert Tokenizer.train(iter(TEXTS), VOCAB_SIZE, kind).to_json() == tokenizer.to_json()


def test_training_in_another_process_without_threads_gives_the_same_file(tokenizer, kind):
    program = """if True:
        import sys
        from transformer_flax.data.tokenizer import Tokenizer
        sys.stdout.reconfigure(encoding="utf-8")
        print(Tokenizer.train(sys.stdin.read().splitlines(), int(sys.argv[1]), sys.argv[2]).to_json(), end="")
        """
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "5"}
    there = subprocess.run(
        [sys.executable, "-c", program, str(VOCAB_SIZE), kind],
        input="\n".join(TEXTS),
        env=environment,
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    assert there.stdout == tokenizer.to_json()


def test_the_smallest_vocabulary_is_every_byte_and_the_special_tokens(kind):
    assert SMALLEST_VOCABULARY == 256 + NUM_SPECIAL
    tokenizer = Tokenizer.train(TEXTS, SMALLEST_VOCABULARY, kind)
    assert tokenizer.vocab_size == SMALLEST_VOCABULARY
    every_two_byte_character = "".join(map(chr, range(0x800)))
    assert tokenizer.decode(tokenizer.encode([every_two_byte_character])[0]) == every_two_byte_character


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "[1, 2]"], ids=["empty", "cut", "other", "list"])
def test_a_broken_file_is_refused_by_its_name(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(file)


def test_a_missing_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read"):
        Tokenizer.load(tmp_path / "nowhere.json")


def sampled_pairs(max_pairs, seed=0):
    sample = list(sample_texts(PAIRS, max_pairs, seed))
    return list(zip(sample[::2], sample[1::2], strict=True))


def test_a_sample_is_of_whole_pairs_and_none_twice():
    sample = sampled_pairs(15)
    assert len(set(sample)) == len(sample) == 15
    assert set(sample) <= set(PAIRS)


@pytest.mark.parametrize("max_pairs", [len(PAIRS), 10**9])
def test_a_sample_as_large_as_the_pairs_is_all_of_them(max_pairs):
    assert sampled_pairs(max_pairs) == PAIRS


@pytest.mark.parametrize("max_pairs", [15, len(PAIRS)])
def test_a_sample_is_read_in_bulk_and_told_of(max_pairs, monkeypatch):
    monkeypatch.setattr(sentence_pairs, "CHUNK", 6)
    told = []
    sample = sample_texts(PAIRS, max_pairs, 0, progress=lambda *counts: told.append(counts))
    assert list(sample) == list(sample_texts(PAIRS, max_pairs, 0))
    assert told == [(min(done, max_pairs), max_pairs) for done in range(6, max_pairs + 6, 6)]


def test_the_seed_rules_the_sample():
    assert sampled_pairs(15, seed=0) == sampled_pairs(15, seed=0)
    assert sampled_pairs(15, seed=0) != sampled_pairs(15, seed=1)


def test_a_sample_is_drawn_from_all_the_pairs():
    assert {pair for seed in range(20) for pair in sampled_pairs(15, seed)} == set(PAIRS)


def test_of_words_those_that_occur_once_are_one_piece():
    texts = ["what is a cat?", "what is a dog?", "what is the <end> of a cat's life?"]
    tokenizer = Tokenizer.train(texts, 1_000, "words")
    assert tokenizer.pieces("what is a cat ?")[:-1] == ["what", "is", "a", "cat", "?"]
    assert tokenizer.pieces("what is the zebra?")[:-1] == ["what", "is", "<unknown>", "<unknown>", "?"]
    assert tokenizer.pieces("<end> a")[:-1] == ["<unknown>"] * 3 + ["a"]  # and not what ends a text
    assert Tokenizer.train(texts, 6, "words").pieces("a cat?")[:-1] == ["a", "<unknown>", "?"]  # the two most frequent


def test_the_smallest_vocabulary_of_words_has_room_for_one():
    assert Tokenizer.train(["a a"], smallest_vocabulary("words"), "words").pieces("a")[0] == "a"


def test_words_are_read_again_as_they_were(tmp_path):
    tokenizer = Tokenizer.train(["a b b a", "naïve naïve c"], 1_000, "words")
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    texts = ["a b", "naïve  c", "", "\t"]
    assert again.encode(texts) == tokenizer.encode(texts) == [[4, 5], [6, 3], [], []]
