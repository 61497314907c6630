"""A file from outside may hold anything: it is read, or refused in words."""

import gzip
import io
import json
import pathlib
import zlib

import numpy as np
import pytest

from tests.data.make import ListPairs
from tests.training.small import small_config
from transformer_flax.data.text_files import MOST_LINE_BYTES, decode_lines, open_text
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.trained_model import load_setup

PAIRS = ListPairs((f"number {n}", f"die Nummer {n}") for n in range(3))
TOKENIZER = Tokenizer.train([text for pair in PAIRS for text in pair], 270)


# config.json


def claim(folder: pathlib.Path) -> dict:
    """Makes the directory of a run; what its config.json holds, without the checksum."""
    RunDirectory(folder).claim(small_config(), {"train": "abc"}, TOKENIZER)
    run = json.loads((folder / "config.json").read_text())
    del run["crc32"]
    return run


def described(folder: pathlib.Path, **changes) -> str:
    """Returns the message that refuses a run whose config has these values."""
    run = claim(folder)
    for name, value in changes.items():
        section, field = name.split("__")
        run["config"][section][field] = value
    (folder / "config.json").write_text(json.dumps(run))
    with pytest.raises(UserError) as refusal:
        load_setup(RunDirectory(folder))
    assert str(folder / "config.json") in str(refusal.value) or "config.model." in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    "value", ["16", None, True, [16], {"a": 1}, 16.0, 0, -16, 10**9, 10**30, float("nan")], ids=str
)
def test_a_size_that_is_none_is_refused(tmp_path, value):
    assert "d_model" in described(tmp_path, model__d_model=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode__beam_size", "4"),
        ("decode__alpha", None),
        ("decode__another", 1),
        ("model__another", 1),
        ("model__num_layers", 10**6),
        ("model__dropout", float("nan")),
        ("eval__final_average", 0),
        ("checkpoint__every", 0),
        ("data__source", 7),
    ],
)
def test_a_value_that_is_used_and_of_another_type_or_unknown_is_named(tmp_path, name, value):
    assert name.replace("__", ".") in described(tmp_path, **{name: value})


def test_json_that_is_no_config_is_refused_by_its_name(tmp_path):
    claim(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(UserError, match=r"config\.json"):
        load_setup(RunDirectory(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path, name):
    claim(tmp_path)
    with (tmp_path / name).open("ab") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=rf"{name} cannot be read .*it has more than 67,108,864 bytes"):
        load_setup(RunDirectory(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, name):
    claim(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        load_setup(RunDirectory(tmp_path))


# tokenizer.json


def tokenizer_with(**changes) -> str:
    parts = json.loads(TOKENIZER.to_json())
    for part, value in changes.items():
        (parts if part in parts else parts["model"])[part] = value
    return json.dumps(parts)


def vocabulary_with(token: str, number: int) -> str:
    return tokenizer_with(vocab=json.loads(TOKENIZER.to_json())["model"]["vocab"] | {token: number})


@pytest.mark.parametrize(
    "content",
    [
        tokenizer_with(continuing_subword_prefix="x" * 5000),  # of which the library panics
        vocabulary_with("new", 2**31 - 1),
        vocabulary_with("<end>", 3),
        tokenizer_with(model="/etc/passwd"),
    ],
    ids=lambda content: f"{zlib.crc32(content.encode()):08x}",
)
def test_a_tokenizer_that_nothing_could_be_done_with_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read as a tokenizer: ."):
        Tokenizer.load(tmp_path / "tokenizer.json")


# metrics.jsonl


@pytest.mark.parametrize(
    "line", ["[]", "", "nonsense", '{"step": 3, "seconds": 1}\x0c{"step": 4, "seconds": 1}', "\udcff"]
)
def test_a_line_that_is_no_measurement_is_told_with_its_place(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 2, "seconds": 1}}\n{line}\n', errors="surrogateescape")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged in line 2"):
        read_json_lines(file)


def test_metrics_that_are_not_finite_are_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "seconds": 1, "train/perplexity": Infinity, "valid/bleu": NaN}\n')
    assert read_json_lines(file)[0]["train/perplexity"] == np.inf


# Text


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path):
    file = tmp_path / "bomb.gz"
    with gzip.open(file, "wb") as stream:
        stream.write(b"short\n")
        for _ in range(64):
            stream.write(bytes(1 << 20))
    assert file.stat().st_size < 100_000
    with open_text(file) as stream:
        lines = decode_lines(stream, "bomb")
        assert next(lines) == "short"
        with pytest.raises(UserError, match=rf"bomb, line 2: at least {MOST_LINE_BYTES:,} bytes long"):
            next(lines)
        assert stream.tell() <= 6 + MOST_LINE_BYTES


def test_a_line_of_nearly_the_longest_is_read():
    line = b"x" * (MOST_LINE_BYTES - 2)
    assert list(decode_lines(io.BytesIO(line + b"\n" + line), "text")) == [line.decode()] * 2
