"""`python -m transformer_flax.fetch` as a user meets it; tests/data/test_downloads.py has the rest."""

import gzip

import pytest

from tests import forked
from tests.commands.process import refused

FETCH = """
import hashlib, sys
from transformer_flax import cli, fetch
from transformer_flax.data.downloads import TEXTS, PublishedFile, PublishedText

digest = hashlib.sha256(b"a cat").hexdigest()
files = {"train.en": PublishedFile("train.en.gz", 5, digest)}
TEXTS["cats"] = PublishedText("all about cats", "free", "http://nowhere", files)
cli.run(fetch.main)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one text, as in python -m transformer_flax.fetch multi30k; there are multi30k"),
        (["multi30"], "there is no text 'multi30'; did you mean 'multi30k'?"),
    ],
)
def test_an_unknown_text_is_refused_with_those_there_are(arguments, message):
    assert refused("fetch", *arguments) == message


def test_a_text_is_told_of_and_put_where_it_was_asked_for(tmp_path):
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(b"a cat"))
    result = forked.run("-c", FETCH, "cats", f"--output={tmp_path}")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        f"all about cats\nlicence: free\n1 files, 0.0 MB, for {tmp_path}\n"
        f"train on it with --config.data.path={tmp_path}\n"
    )
    assert (tmp_path / "train.en").read_text() == "a cat"
