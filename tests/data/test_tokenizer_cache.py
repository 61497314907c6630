"""Tokenizers are trained once for the same data and settings, and none is taken for another or when it is damaged."""

import logging

import pytest

from tests.data.make import ListPairs, data_config
from transformer_flax.data import tokenizer
from transformer_flax.data.tokenizer import Tokenizer, cached_tokenizer
from transformer_flax.errors import UserError

PAIRS = ListPairs((f"number {n}", f"die nummer {n}") for n in range(50))
TOKENIZER = Tokenizer.train([text for pair in PAIRS for text in pair], 280)


def is_found(pairs, config, **arguments) -> bool:
    """Returns whether the cache had the tokenizer of these pairs; afterwards it has."""
    trained = []
    found = cached_tokenizer(pairs, config, lambda: trained.append(True) or TOKENIZER, **arguments)
    assert found.to_json() == TOKENIZER.to_json()
    return not trained


@pytest.fixture
def config(tmp_path):
    return data_config(cache_dir=str(tmp_path), vocab_size=280)


def test_it_is_found_again_in_a_file_that_may_be_given(config, tmp_path):
    assert not is_found(PAIRS, config)
    assert is_found(PAIRS, config)
    [file] = (tmp_path / "tokenizers").iterdir()
    assert Tokenizer.load(file).to_json() == TOKENIZER.to_json()


@pytest.mark.parametrize(
    "other", [{"tokenizer": "wordpiece"}, {"vocab_size": 290}, {"tokenizer_sample": 9}, {"seed": 1}]
)
def test_one_of_other_settings_is_not_found(config, other):
    is_found(PAIRS, config)
    config.update(other)
    assert not is_found(PAIRS, config)


def test_one_of_other_pairs_or_another_library_is_not_found(config, monkeypatch):
    is_found(PAIRS, config)
    assert not is_found(ListPairs(list(PAIRS)[1:]), config)
    assert not is_found(PAIRS, config, sources_only=True)
    monkeypatch.setattr(tokenizer.tokenizers, "__version__", "0")
    assert not is_found(PAIRS, config)


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: content.replace(b"number", b"humber")]
)
def test_a_damaged_one_is_told_removed_and_made_anew(config, tmp_path, caplog, damage):
    is_found(PAIRS, config)
    [file] = (tmp_path / "tokenizers").iterdir()
    content = file.read_bytes()
    assert damage(content) != content
    file.write_bytes(damage(content))
    with caplog.at_level(logging.WARNING):
        assert not is_found(PAIRS, config)
    assert f"the tokenizer in {file} is damaged and is made anew" in caplog.text
    assert file.read_bytes() == content


def test_a_cache_that_cannot_be_written_is_told_and_nothing_is_left(config, tmp_path):
    (tmp_path / "tokenizers").write_text("in the way")
    with pytest.raises(UserError, match=r"needs 0\.0 MB in .*tokenizers, which cannot be written .*cache_dir"):
        is_found(PAIRS, config)
