import dataclasses
import json
import random
import shutil
import zlib

import numpy as np
import pytest

from configs import vectors as configured
from tests.conftest import ROOT
from tests.relatives.planted import TOPICS, planted_text, tokenise
from transformer_flax.analysis.plots import plot_plane, principal_plane
from transformer_flax.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.relatives import word_vectors
from transformer_flax.relatives.vector_files import Vectors, count_whole_words
from transformer_flax.relatives.word_vectors import LOSSES, VectorConfig, train_vectors, update
from transformer_flax.run import restore

SMALL = {"d_model": 8, "rows_per_batch": 4, "epochs": 12, "subsample": 0.0, "learning_rate": 0.2}
CONFIG = VectorConfig(**{**configured.get_config().vectors, **SMALL})
TOPIC_OF = {word: topic for topic in TOPICS for word in topic}


@pytest.fixture(scope="module", params=LOSSES)
def planted(request):
    """Vectors of a text in which words of a topic stand together."""
    tokenizer, sentences = tokenise(planted_text())
    return train_vectors([sentences], tokenizer, dataclasses.replace(CONFIG, kind=request.param), seed=0)


@pytest.fixture(scope="module")
def saved(planted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors") / "planted"
    planted.save(folder, {"seed": 0})
    return folder


def test_words_that_stand_together_are_neighbours(planted):
    for word, topic in TOPIC_OF.items():
        nearest = [neighbour for neighbour, _ in planted.nearest(word, 3)]
        assert set(nearest) == set(topic) - {word}
        cosines = [cosine for _, cosine in planted.nearest(word, 20)]
        assert cosines == sorted(cosines, reverse=True)
        assert len(cosines) == 11  # all words but itself


def test_vectors_are_of_the_size_that_a_model_s_embeddings_start_with(planted):
    lengths = np.sum(planted.vectors**2, axis=1)
    seen = planted.counts[0] > 0
    assert seen.sum() >= 12
    assert np.mean(lengths[seen]) == pytest.approx(1, abs=1e-5)
    assert np.mean(lengths[~seen]) == pytest.approx(1, abs=0.1)  # which chance has drawn


def test_an_unknown_word_has_no_vector_where_the_vocabulary_is_one_of_words():
    rng = np.random.default_rng(0)
    tokenizer = Tokenizer.train(["one two"] * 3, 20, "words")
    counts = np.ones(tokenizer.vocab_size, np.int64)
    vectors = Vectors.make(tokenizer, rng.normal(size=(tokenizer.vocab_size, 4)), counts, counts, rng)
    assert vectors.vector("two").shape == (4,)
    with pytest.raises(UserError, match="there is no vector of 'three'"):
        vectors.vector("three")
    assert "<unknown>" not in {word for word, _ in vectors.words()}


def test_vectors_start_evenly_spread_and_small(monkeypatch):
    tokenizer, sentences = tokenise(planted_text(60))
    begun = []

    def update(tables, *_, **__):
        begun.append(np.asarray(tables.vectors))
        raise KeyboardInterrupt

    monkeypatch.setattr(word_vectors, "update", update)
    with pytest.raises(KeyboardInterrupt):
        train_vectors([sentences], tokenizer, CONFIG, 0)
    words, contexts = np.split(begun[0], 2)
    assert 0.49 / CONFIG.d_model < np.abs(words).max() <= 0.5 / CONFIG.d_model
    assert not contexts.any()


def test_the_seed_rules_the_vectors():
    tokenizer, sentences = tokenise(planted_text(60))
    config = dataclasses.replace(CONFIG, epochs=2)
    one, again, other = (train_vectors([sentences], tokenizer, config, seed).vectors for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_the_loss_falls_and_is_told():
    tokenizer, sentences = tokenise(planted_text(60))
    told = []
    train_vectors([sentences], tokenizer, CONFIG, 0, progress=lambda *where: told.append(where))
    epochs, losses = zip(*told, strict=True)
    assert len(told) >= CONFIG.epochs
    assert losses[-1] < 0.8 * losses[0]
    assert list(epochs) == sorted(epochs)
    assert {*range(1, CONFIG.epochs + 1)} <= {*epochs}
    assert epochs[-1] == CONFIG.epochs


def test_the_rate_falls_evenly_to_zero(monkeypatch):
    tokenizer, sentences = tokenise(planted_text())
    rates = []
    monkeypatch.setattr(word_vectors, "update", lambda *given, **how: rates.append(given[2]) or update(*given, **how))
    train_vectors([sentences], tokenizer, dataclasses.replace(CONFIG, epochs=2), 0)
    np.testing.assert_allclose(rates, CONFIG.learning_rate * (1 - np.arange(len(rates)) / len(rates)), rtol=1e-5)


def test_a_text_without_words_is_refused():
    tokenizer, _ = tokenise(["a"])
    _, nothing = tokenise([""])
    with pytest.raises(UserError, match="no words in the text"):
        train_vectors([nothing], tokenizer, CONFIG, 0)


def test_a_text_of_which_nothing_is_left_to_learn_from_is_refused():
    tokenizer, sentences = tokenise(planted_text())
    with pytest.raises(UserError, match=r"no word of this text had a context: config\.vectors\.subsample, 1e-09"):
        train_vectors([sentences], tokenizer, dataclasses.replace(CONFIG, subsample=1e-9, epochs=1), 0)


def test_a_text_of_single_words_is_refused():
    tokenizer, sentences = tokenise(["a", "b", "c"])
    with pytest.raises(UserError, match="no word of this text had a context: every sentence is a single word"):
        train_vectors([sentences], tokenizer, dataclasses.replace(CONFIG, epochs=1), 0)


def test_vectors_that_have_diverged_are_refused():
    tokenizer, sentences = tokenise(planted_text())
    with pytest.raises(UserError, match=r"not finite; lower config\.vectors\.learning_rate, which is 1e\+38"):
        train_vectors([sentences], tokenizer, dataclasses.replace(CONFIG, epochs=2, learning_rate=1e38), 0)


def test_neighbours_that_no_word_is_frequent_enough_for_are_none(planted):
    with pytest.raises(UserError, match="no word stands in the text 5,000 times or more"):
        planted.nearest("cat", least=5_000)


def test_a_word_of_several_pieces_is_the_mean_of_them(planted):
    pieces = planted.tokenizer.encode(["catdog"])[0]
    assert len(pieces) > 1
    known = [piece for piece in pieces if planted.counts[0, piece]]
    np.testing.assert_allclose(planted.vector(" catdog "), planted.vectors[known].mean(axis=0))
    assert planted.nearest("cat dog", 1)[0][0] in TOPICS[0]
    for nothing in ("", "z"):
        with pytest.raises(UserError, match=f"no vector of {nothing!r}"):
            planted.vector(nothing)


def test_the_blank_before_an_unknown_word_is_no_vector_of_it():
    tokenizer = Tokenizer.train(["a b"], SMALLEST_VOCABULARY)  # single bytes
    counts = np.bincount(tokenizer.encode(["a b"])[0], minlength=tokenizer.vocab_size)
    made = Vectors.make(tokenizer, np.eye(tokenizer.vocab_size), counts, counts, np.random.default_rng(0))
    [blank, b] = tokenizer.encode(["b"])[0]
    assert counts[blank] > 0
    np.testing.assert_array_equal(made.vector("b"), made.vectors[b])
    with pytest.raises(UserError, match="no vector of 'z'"):
        made.vector("z")


def test_only_whole_words_are_counted_and_only_mostly_whole_ones_are_words():
    text = ["cat cats, cat. catcat cat-dog (cat) caté cat5 cat\u0301"]
    tokenizer = Tokenizer.train(["cat cat cat cat", "e\u0301 e\u0301 o\u0301"], 263)  # pieces: " cat" and the accent
    ids = np.array([*tokenizer.encode(text)[0], 2], np.uint16)
    _, sentences = tokenise(["a"])
    sentences = dataclasses.replace(sentences, ids=ids, offsets=np.array([0, len(ids)]))
    [cat] = tokenizer.encode(["cat"])[0]
    counts = np.bincount(ids, minlength=tokenizer.vocab_size)
    whole = count_whole_words([sentences], tokenizer)
    assert counts[cat] == 8  # of which (cat) has none of its blank
    assert whole[cat] == 3  # cat, cat. and cat-dog: what follows does not go on with the word
    made = Vectors.make(tokenizer, np.ones((tokenizer.vocab_size, 2)), counts, whole, np.random.default_rng(0))
    assert "cat" not in dict(made.words())
    whole[cat] = 5
    mostly = Vectors.make(tokenizer, np.ones((tokenizer.vocab_size, 2)), counts, whole, np.random.default_rng(0))
    assert dict(mostly.words())["cat"] == cat


def test_what_is_saved_is_loaded(planted, saved):
    loaded = Vectors.load(saved)
    np.testing.assert_array_equal(loaded.vectors, planted.vectors)
    np.testing.assert_array_equal(loaded.counts, planted.counts)
    assert loaded.tokenizer.to_json() == planted.tokenizer.to_json()
    assert loaded.nearest("cat") == planted.nearest("cat")
    assert loaded.fingerprint == planted.fingerprint
    assert json.loads((saved / "config.json").read_text())["config"] == {"seed": 0}
    with pytest.raises(UserError, match="is there already"):
        planted.save(saved, {})


def test_words_of_a_text_in_lower_case_are_looked_up_in_lower_case(planted, saved, tmp_path):
    with pytest.raises(UserError, match="no vector of 'CAT'"):
        Vectors.load(saved).vector("CAT")
    planted.save(tmp_path / "lower", {"data": {"lowercase": True}})
    loaded = Vectors.load(tmp_path / "lower")
    assert loaded.nearest(" CAT") == loaded.nearest("cat") == planted.nearest("cat")


@pytest.mark.parametrize("name", ["vectors.npy", "counts.npy", "tokenizer.json", "config.json"])
def test_every_damage_to_saved_vectors_is_noticed_or_harmless(saved, tmp_path, name):
    whole = Vectors.load(saved)
    folder = tmp_path / "vectors"
    shutil.copytree(saved, folder)
    content = (saved / name).read_bytes()
    rng = random.Random(0)
    flipped = []
    for _ in range(5):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        flipped.append(bytes(damaged))
    refused = 0
    for damaged in [b"", content[: len(content) // 2], *flipped]:
        (folder / name).write_bytes(damaged)
        try:
            found = Vectors.load(folder)
        except UserError:
            refused += 1
        else:
            np.testing.assert_array_equal(found.vectors, whole.vectors)
    assert refused >= 5
    (folder / name).unlink()
    with pytest.raises(UserError, match="cannot be read as word vectors" if name != "vectors.npy" else "holds no word"):
        Vectors.load(folder)


def test_nothing_is_unpickled(saved, tmp_path):
    folder = tmp_path / "vectors"
    shutil.copytree(saved, folder)
    np.save(folder / "vectors.npy", np.array([[{}]], object), allow_pickle=True)
    description = json.loads((folder / "config.json").read_text())
    description["checksums"]["vectors.npy"] = zlib.crc32((folder / "vectors.npy").read_bytes())
    del description["crc32"]
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=r"cannot be read as word vectors .*Object arrays cannot be loaded"):
        Vectors.load(folder)


def test_a_folder_without_vectors_is_told(saved, tmp_path):
    with pytest.raises(UserError, match=r"run_0\.1 holds no word vectors: there is no \S+/vectors\.npy$"):
        Vectors.load(ROOT / "tests/data/run_0.1")
    with pytest.raises(UserError, match=r"checksums, .* opened by python -m transformer_flax\.vectors"):
        restore(saved)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=rf"{folder} holds no word vectors: there is no {folder}/vectors\.npy$"):
            Vectors.load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "glove"),
        ("sides", "left"),
        ("window", 0),
        ("epochs", 1.5),
        ("noise_power", 2.0),
        ("subsample", 1.0),
        ("learning_rate", 0.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=rf"config\.vectors\.{field} is {value!r}; it must be"):
        dataclasses.replace(CONFIG, **{field: value})


def test_the_plane_is_the_one_in_which_vectors_differ_most(tmp_path):
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    angles = rng.uniform(0, 2 * np.pi, 30)
    flat = np.stack([2 * np.cos(angles), np.sin(angles)], axis=1) @ basis[:2]
    directions = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    points = principal_plane(flat)
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    np.testing.assert_allclose(distances, np.linalg.norm(directions[:, None] - directions, axis=-1), atol=1e-6)
    figure = plot_plane([f"$word{i}" for i in range(30)], flat, file=tmp_path / "plane.png")
    assert [text.get_text() for text in figure.axes[0].texts] == [f"$word{i}" for i in range(30)]
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")
