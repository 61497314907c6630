"""Tokenizers that were not trained here: what of them acts, and which are refused."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from transformer_flax.data import tokenizer as ours
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL

SPECIAL = ["<pad>", "<begin>", "<end>"]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
TEXTS = ["the house is a home", "in the winter", "das Haus im Winter"] * 10


def bpe(pre_tokenizer, decoder, normalizer=None, alphabet=ALPHABET) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if normalizer:
        backend.normalizer = normalizer
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def bert() -> Tokenizer:
    """Lower-case words, with special tokens around them, cut to 3 and padded to 9."""
    vocabulary = [*SPECIAL, "<unk>", "the", "house", "is", "a", "home", "ho", "##me", "##s"]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", 1), ("<end>", 2)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    return backend


def llama() -> Tokenizer:
    return bpe(
        pre_tokenizers.Split("▁", "merged_with_next"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


BACKENDS = {
    "gpt2": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "roberta": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
    "sentencepiece": lambda: bpe(pre_tokenizers.Metaspace(), decoders.Metaspace(), alphabet=["▁"]),
    "llama": llama,
    "bert": bert,
}


@pytest.fixture
def load(tmp_path):
    """Loads a backend, or what its JSON has become, from a file."""

    def load(backend, change=lambda content: None) -> ours.Tokenizer:
        content = json.loads(backend.to_str())
        change(content)
        (tmp_path / "own.json").write_text(json.dumps(content), encoding="utf-8")
        return ours.Tokenizer.load(tmp_path / "own.json")

    return load


@pytest.mark.parametrize("name", BACKENDS)
def test_a_word_has_the_same_pieces_at_the_start_and_within_and_no_blank_is_added(load, name):
    tokenizer = load(BACKENDS[name]())
    house, the, both = tokenizer.encode(["house", "the", "the house"])
    assert both == the + house
    assert tokenizer.decode(both) == "the house"
    assert not any(tokenizer.decode([i]).strip() == "" for i in both)  # a piece that is a blank and nothing else


def test_words_are_spelt_as_elsewhere(load):
    for name, pieces in {
        "roberta": ["Ġa", "Ġhouse"],
        "sentencepiece": ["▁a", "▁house"],
        "llama": ["▁a", "▁house"],
        "bert": ["a", "house"],
    }.items():
        assert load(BACKENDS[name]()).pieces("a house") == [*pieces, "<end>"]


@pytest.mark.parametrize("name", ["gpt2", "roberta", "llama"])
@pytest.mark.parametrize("text", [" a", "  a house ", "a  house", ""])
def test_blanks_are_kept_where_the_tokenizer_has_them(load, name, text):
    tokenizer = load(BACKENDS[name]())
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_no_blank_is_put_before_a_text_where_it_would_not_come_off_again(load):
    def blanks_are_words(content):
        word_level(*SPECIAL, "a", "house", "<unk>")(content)
        content["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": "\\w+"},
            "behavior": "Isolated",
            "invert": False,
        }

    assert load(bert(), blanks_are_words).pieces("a house") == ["a", "<unk>", "house", "<end>"]


def test_cutting_padding_and_special_tokens_of_the_file_do_not_act(load):
    tokenizer = load(bert())
    [ids] = tokenizer.encode(["The house is a homes"])
    assert tokenizer.decode(ids) == "the house is a homes"
    assert ids == [4, 5, 6, 7, 8, 11]
    assert tokenizer.pieces("the") == ["the", "<end>"]
    content = json.loads(tokenizer.to_json())
    assert content["truncation"] is None
    assert content["padding"] is None


def test_a_tokenizer_may_lose_what_it_likes(load):
    tokenizer = load(bert())
    assert tokenizer.decode(tokenizer.encode(["THE garden"])[0]) == "the <unk>"
    assert tokenizer.encode([" ", "\n"]) == [[], []]


def model(**fields):
    return lambda content: content["model"].update(fields)


def word_level(*words, unknown="<unk>"):
    def change(content):
        vocabulary = {word: i for i, word in enumerate(words)}
        content["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown}
        content["pre_tokenizer"] = {"type": "Whitespace"}
        content["added_tokens"] = []

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            word_level("<unk>", *SPECIAL),
            r"its ids 0, 1, 2 are <unk>, <pad>, <begin>; they must be <pad>, <begin>, <end>",
        ),
        (word_level(*SPECIAL[:2]), r"its ids 0, 1, 2 are <pad>, <begin>, None"),
        (
            lambda content: content["model"].update(vocab={**content["model"]["vocab"], "gap": 999}),
            r"it has 13 tokens and ids up to 999; its ids must be those from 0 to 12",
        ),
        (lambda content: content["model"].update(vocab={**content["model"]["vocab"], "twice": 5}), "each of one token"),
        (word_level(*SPECIAL, "a", unknown="<pad>"), "special token <pad> of a part of"),
        (word_level(*SPECIAL, "a", unknown="nowhere"), r"Missing \[UNK\] token"),
        (
            lambda content: content.update(pre_tokenizer={"type": "WhitespaceSplit"}, added_tokens=[]),
            "special token <pad> of a part of",
        ),
        (model(type="BPE", merges=[], dropout=0.1), r"its dropout is 0\.1.*; it must be null"),
        # Panics of Rust: at loading, and at a text.
        (lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}), "charsmap"),
        (lambda content: content.update(pre_tokenizer={"type": "FixedLength", "length": 0}), "must be non-zero"),
    ],
    ids=[
        "other",
        "few",
        "gap",
        "twice",
        "unknown is special",
        "no unknown",
        "literal",
        "dropout",
        "panic",
        "late panic",
    ],
)
def test_a_file_that_no_model_can_use_is_refused_by_its_name(load, change, message):
    with pytest.raises(UserError, match=rf"own\.json cannot be read as a tokenizer: .*{message}"):
        load(bert(), change)


def test_a_panic_at_a_text_is_told(load):
    def change(content):
        content["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(b+)+$"}, "behavior": "Isolated"}
        content["pre_tokenizer"]["invert"] = False

    tokenizer = load(bert(), change)
    with pytest.raises(UserError, match=r"the tokenizer fails at a text: .*retry-limit"):
        tokenizer.encode(["b" * 40 + "c"])


def test_a_special_token_that_is_none_to_the_library_is_refused(load):
    backend = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
    content = json.loads(backend.to_str())
    content["added_tokens"][END_ID]["special"] = False
    with pytest.raises(UserError, match="special token <end> of a part of"):
        load(Tokenizer.from_str(json.dumps(content)))


def test_tokens_added_to_the_vocabulary_are_text(load):
    backend = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
    backend.add_tokens([AddedToken("Hausboot", normalized=False)])
    tokenizer = load(backend)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    [ids] = tokenizer.encode(["ein Hausboot"])
    assert ids[-1] == tokenizer.vocab_size - 1
    assert min(ids) >= NUM_SPECIAL
    assert tokenizer.decode(ids) == "ein Hausboot"
