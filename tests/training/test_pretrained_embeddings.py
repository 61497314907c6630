"""A run that starts from word vectors starts from exactly those."""

import functools

import jax
import numpy as np
import pytest

from tests.conftest import VARIANTS
from tests.training.small import small_config, write_text
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.model.registry import init_params
from transformer_flax.relatives.vector_files import Vectors
from transformer_flax.run import restore
from transformer_flax.training.config_checks import check, model_config
from transformer_flax.training.fine_tuning import with_embeddings
from transformer_flax.training.loop import train
from transformer_flax.training.step import init_key

UNMOVED = 1e-30  # times the paper's learning rate: less than any entry's last digit


def made_vectors(tokenizer: Tokenizer, seed: int = 0) -> Vectors:
    rng = np.random.default_rng(seed)
    counts = np.ones(tokenizer.vocab_size, np.int64)
    counts[-2:] = 0
    return Vectors.make(tokenizer, rng.normal(size=(tokenizer.vocab_size, 16)), counts, 0 * counts, rng)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    return write_text(tmp_path / "text")


@pytest.fixture
def vectors(text, tmp_path):
    lines = [line for file in sorted(text.glob("train.*")) for line in file.read_text().splitlines()]
    made = made_vectors(Tokenizer.train(lines, 300))
    made.save(tmp_path / "vectors", {})
    return made


def config_of(tmp_path, **changes):
    return small_config(
        steps=1,
        embedding_init=str(tmp_path / "vectors"),
        data__path=str(tmp_path / "text"),
        data__cache_dir=str(tmp_path / "cache"),
        data__tokenizer_file=str(tmp_path / "vectors/tokenizer.json"),
        optimizer__factor=UNMOVED,
        **changes,
    )


def test_a_run_starts_from_exactly_these_vectors_and_goes_on_with_no_others(vectors, tmp_path, capsys):
    config = config_of(tmp_path)
    train(config, tmp_path / "run")
    assert f"initial embeddings: {tmp_path / 'vectors'}; 2 pieces at random\n" in capsys.readouterr().out
    params = restore(tmp_path / "run").params
    np.testing.assert_array_equal(params["embedding"]["embedding"], vectors.vectors)

    rest = init_params(model_config(config, 300), init_key(config.seed))  # as chance has it
    del rest["embedding"], params["embedding"]
    same = functools.partial(np.testing.assert_allclose, atol=UNMOVED)  # biases, from 0, have moved
    jax.tree.map(same, params, rest)

    other = tmp_path / "other"
    made_vectors(vectors.tokenizer, seed=1).save(other, {})
    (tmp_path / "vectors").rename(tmp_path / "before")
    other.rename(tmp_path / "vectors")
    with pytest.raises(UserError, match="the embedding_init data have changed"):
        train(config, tmp_path / "run")


def test_where_embeddings_are_not_tied_those_of_words_start_from_them():
    config = VARIANTS["untied"]
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    table = rng.normal(size=(config.vocab_size, config.d_model)).astype(np.float32)
    started = with_embeddings(params, Vectors(Tokenizer.train(["a"], 259), table, np.ones((2, 259), np.int64)))
    for name in ("source_embedding", "target_embedding"):
        np.testing.assert_array_equal(started[name]["embedding"], table)
    assert started["output_embedding"] is params["output_embedding"]
    assert jax.tree.structure(started) == jax.tree.structure(params)
    assert with_embeddings(params, None) is params


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.tokenizer_file": ""},
            r"train another one: set .*tokenizer_file=\S+/vectors/tokenizer.json .*vocab_size=300",
        ),
        ({"model.d_model": 18}, r"config\.model\.d_model is 18, and the vectors .* have 16 entries"),
        ({"embedding_init": "nowhere"}, "nowhere holds no word vectors"),
    ],
)
def test_vectors_that_do_not_fit_are_refused_before_anything_starts(vectors, tmp_path, changes, message):
    config = config_of(tmp_path)
    check(config)
    config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=message):
        check(config)


def test_vectors_of_another_tokenizer_are_refused(vectors, tmp_path):
    other = Tokenizer.train((tmp_path / "text/train.en").read_text().splitlines(), 300)
    assert other.vocab_size == vectors.tokenizer.vocab_size
    (tmp_path / "other.json").write_text(other.to_json())
    config = config_of(tmp_path)
    config.data.tokenizer_file = str(tmp_path / "other.json")
    with pytest.raises(UserError, match=r"the run uses \S+other\.json: set"):
        check(config)
