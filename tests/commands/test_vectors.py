"""`python -m transformer_flax.vectors` as a user meets it."""

import os
import re
import subprocess
import sys

import pytest

from tests.commands.process import refused, run, succeeds
from tests.conftest import ROOT
from tests.relatives.planted import TOPICS, planted_text
from transformer_flax.relatives.vector_files import Vectors

ELSEWHERE = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import transformer_flax
sys.path.remove({str(ROOT)!r})  # the package can be found, as where it is installed, and configs/ not
runpy.run_module("transformer_flax.vectors", run_name="__main__")
"""
SMALL = [f"--config.vectors.{change}" for change in ("d_model=8", "epochs=8", "rows_per_batch=4", "subsample=0.0")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    text = "".join(f"{line}\n" for line in planted_text())
    for language, side in (("en", text), ("de", text.upper())):
        (folder / f"train.{language}").write_text(side)
    return folder


def train(folder, *arguments):
    text = [f"--config.data.{change}" for change in (f"path={folder}", f"cache_dir={folder}/cache", "vocab_size=340")]
    return succeeds("vectors", "train", "--config=configs/vectors.py", *text, *SMALL, *arguments)


def test_vectors_are_trained_asked_and_drawn(folder):
    told = train(folder, f"--output={folder}/made/both", "--config.vectors.learning_rate=0.2").stdout
    losses = re.findall(r"epoch \d of 8: loss ([\d.]+) a word", told)
    assert len(losses) == 8
    assert float(losses[0]) > float(losses[1]) + 1  # the first epoch begins with vectors that know nothing
    assert len({*losses}) == 8  # each is of its own epoch
    vectors = f"--vectors={folder}/made/both"
    found = succeeds("vectors", "nearest", vectors, "--count=3", "cat", given="unread").stdout.splitlines()
    assert {line.split("\t")[1] for line in found} == set(TOPICS[0]) - {"cat"}
    read = succeeds("vectors", "nearest", vectors, "--count=3", given="cat\n\nRED\n").stdout.splitlines()
    assert read[:3] == found
    assert {line.split("\t")[1] for line in read[3:]} == {word.upper() for word in TOPICS[1]} - {"RED"}
    rare = run("vectors", "nearest", vectors, "--least=5000", "cat")
    assert (rare.returncode, rare.stdout) == (2, "")
    some = run("vectors", "nearest", vectors, "--count=3", given="+\ncat\n§\n")
    assert (some.returncode, some.stdout.splitlines()) == (2, found)
    assert "WARNING: there is no vector of '+'" in some.stderr
    assert some.stderr.endswith("error: 2 of the words could not be looked up\n")
    assert "the input, line 1: not UTF-8" in refused("vectors", "nearest", vectors, given=b"Stra\xdfe\n")
    succeeds("vectors", "plot", vectors, f"--output={folder}/plane.png", "cat", "dog", "red")
    assert (folder / "plane.png").read_bytes().startswith(b"\x89PNG")
    assert "both is there already" in refused("vectors", "train", *SMALL, f"--output={folder}/made/both")


def test_one_side_may_be_left_out(folder):
    train(folder, f"--output={folder}/target", "--config.vectors.sides=target", "--config.vectors.epochs=1")
    words = [word for word, _ in Vectors.load(folder / "target").words()]
    assert sorted(words) == sorted(word.upper() for topic in TOPICS for word in topic)


def test_labels_are_no_words(folder):
    lines = "".join(f"LABEL\t{line}\n" for line in planted_text())
    (folder / "labelled").mkdir()
    (folder / "labelled" / "train.tsv").write_text(lines)
    text = ["--config.data.source=tsv", f"--config.data.path={folder}/labelled", "--config.data.vocab_size=300"]
    sides = "config.vectors.sides is 'both'; it must be 'source' for texts with labels"
    assert sides in refused("vectors", "train", *text, f"--output={folder}/refused")
    train(folder, *text, "--config.vectors.sides=source", "--config.vectors.epochs=1", f"--output={folder}/sources")
    vectors = Vectors.load(folder / "sources")
    assert sorted(word for word, _ in vectors.words()) == sorted(word for topic in TOPICS for word in topic)
    assert "LABEL" not in vectors.tokenizer.to_json()


def test_a_place_that_cannot_be_written_is_told_of_before_the_training(folder):
    text = [f"--config.data.{change}" for change in (f"path={folder}", f"cache_dir={folder}/cache", "vocab_size=340")]
    assert "train.en" in refused("vectors", "train", *text, *SMALL, f"--output={folder}/train.en/made")


def test_the_config_is_found_from_anywhere(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ELSEWHERE, "nearest", "--vectors=nowhere", "dog"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.stderr == "error: nowhere holds no word vectors: there is no nowhere/vectors.npy\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learn"], "unknown verb 'learn': python -m transformer_flax.vectors train | nearest | plot"),
        (["nearest", "dog"], "--vectors is missing: the folder of trained vectors"),
        (["train", "--output=x", "--config=configs/numbers.py"], "no section config.vectors"),
        (
            ["plot", "--vectors=x", "--output=x.bmp"],
            "--output=x.bmp: the file of a picture must end in .png, .svg, .pdf",
        ),
        (["train", "--output=x", "--config.data.target_language=en"], "it must be 'source' for texts of one language"),
        (["plot", "--count=3"], "--count has no effect with plot: leave it out"),
        (["nearest", "--output=x", "dog"], "--output has no effect with nearest"),
        (["plot", "--output=x.png", "--least=3", "dog"], "--least has no effect with words"),
        (["train", "dog"], "train takes no words: 'dog'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    assert message in refused("vectors", *arguments)
