"""Files of a working directory that are cut short or have a bit flipped, as a full disk or an old one leaves them."""

import pathlib
import random
import shutil

import jax
import numpy as np
import pytest

from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.run import restore
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.trained_model import load_setup

FLIPS = 5  # of each file
IDLE = ("translations", "selection.json", "events.out")  # that nobody reads again


@pytest.fixture(scope="module")
def copy(finished, tmp_path_factory):
    run = tmp_path_factory.mktemp("damage") / "run"
    shutil.copytree(finished, run)
    return run


@pytest.fixture
def rng(request):
    return random.Random(request.node.name)


def damages(rng: random.Random, content: bytes, flips: int):
    """The content cut at some places, the first and the last byte among them, then with a bit flipped at some."""
    size = len(content)
    for length in sorted({0, 1, size // 4, size // 2, size - 1}):
        yield content[:length]
    for _ in range(flips):
        yield flipped(content, rng.randrange(8 * size))


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def outcomes(file: pathlib.Path, contents, read) -> list:
    """Returns what is read of each content, None if it is refused; the file is as it was afterwards."""
    whole = file.read_bytes()
    found = []
    try:
        for content in contents:
            file.write_bytes(content)
            try:
                found.append(read())
            except UserError:
                found.append(None)
    finally:
        file.write_bytes(whole)
    return found


def leaves(run: pathlib.Path) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(restore(run, steps=[200]).params)]


def test_every_damage_to_the_tokenizer_is_noticed(copy, rng):
    file = copy / "tokenizer.json"
    contents = list(damages(rng, file.read_bytes(), flips=200))
    assert outcomes(file, contents, lambda: load_setup(RunDirectory(copy))) == [None] * len(contents)


def test_every_damage_to_the_config_is_noticed_or_harmless(copy, rng):
    file = copy / "config.json"
    whole = RunDirectory(copy).load_config()
    *cuts, last = list(damages(rng, file.read_bytes(), flips=0))
    assert outcomes(file, cuts, lambda: load_setup(RunDirectory(copy))) == [None] * len(cuts)
    assert outcomes(file, [last], RunDirectory(copy).load_config) == [whole]  # it lacks its last line break only
    flips = [flipped(file.read_bytes(), rng.randrange(8 * file.stat().st_size)) for _ in range(200)]
    found = outcomes(file, flips, RunDirectory(copy).load_config)
    assert all(config is None or config == whole for config in found)
    assert found.count(None) > 150


def test_every_damage_to_the_metrics_is_noticed_or_harmless(copy, rng):
    file = copy / "metrics.jsonl"
    whole = read_json_lines(file)
    for lines in outcomes(file, damages(rng, file.read_bytes(), flips=200), lambda: read_json_lines(file)):
        without = [{name: line[name] for name in line.keys() & whole[i].keys()} for i, line in enumerate(lines or [])]
        assert without == whole[: len(without)]  # a checksum may have lost its name


def test_files_that_nobody_reads_do_no_harm(copy, rng):
    whole = leaves(copy)
    files = [file for file in copy.rglob("*") if file.is_file() and any(name in str(file) for name in IDLE)]
    assert len(files) >= 4
    for file in files:
        assert outcomes(file, [b"", rng.randbytes(100)], lambda: leaves(copy)) == [whole] * 2


def test_a_checkpoint_that_is_cut_short_is_refused_or_read_as_it_was(copy, rng):
    whole = leaves(copy)
    refused = 0
    for file in checkpoint_files(copy):
        for found in outcomes(file, damages(rng, file.read_bytes(), flips=0), lambda: leaves(copy)):
            assert found is None or found == whole
            refused += found is None
    assert refused >= 20


def test_a_bit_flipped_in_what_describes_the_arrays_of_a_checkpoint_is_noticed_or_harmless(copy, rng):
    whole = leaves(copy)
    harmless = 0
    for file in set(checkpoint_files(copy)) - {arrays(copy)}:
        flips = [flipped(file.read_bytes(), rng.randrange(8 * file.stat().st_size)) for _ in range(FLIPS)]
        for found in outcomes(file, flips, lambda: leaves(copy)):
            assert found is None or found == whole
            harmless += found == whole
    assert harmless  # else nothing was read


def test_a_bit_flipped_in_the_arrays_of_a_checkpoint_is_noticed_or_harmless(copy, rng):
    whole, file = leaves(copy), arrays(copy)
    flips = [flipped(file.read_bytes(), rng.randrange(8 * file.stat().st_size)) for _ in range(20)]
    for found in outcomes(file, flips, lambda: leaves(copy)):
        assert found is None or found == whole


def checkpoint_files(run: pathlib.Path) -> list[pathlib.Path]:
    """Those that hold something; one of Orbax's only marks the place."""
    return sorted(file for file in (run / "checkpoints/200").rglob("*") if file.is_file() and file.stat().st_size)


def arrays(run: pathlib.Path) -> pathlib.Path:
    return max(checkpoint_files(run), key=lambda file: file.stat().st_size)
