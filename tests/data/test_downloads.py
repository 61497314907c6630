"""A published text comes whole and checked, over a network that may fail, from a server on the loopback."""

import functools
import gzip
import hashlib
import http.server
import shutil
import threading
import types

import pytest

from transformer_flax.data.downloads import TEXTS, PublishedFile, PublishedText, fetch
from transformer_flax.data.sentence_pairs import SPLITS
from transformer_flax.errors import UserError

LINES = {"train.en": "one\ntwo\n", "train.de": "eins\nzwei\n", "valid.en": "three\n"}
REMOTE = {"train.en": "train.en.gz", "train.de": "train.de.gz", "valid.en": "val.en.gz"}
NOWHERE = "http://127.0.0.1:9"  # the port of the discard service, where nobody listens


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves `server.folder` at `server.url`, and remembers what was asked for."""
    monkeypatch.setenv("no_proxy", "*")
    folder, asked = tmp_path / "remote", []
    folder.mkdir()
    for name, text in LINES.items():
        (folder / REMOTE[name]).write_bytes(gzip.compress(text.encode()))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        yield types.SimpleNamespace(folder=folder, asked=asked, url=f"http://127.0.0.1:{listening.server_port}")
        listening.shutdown()


def made(url) -> PublishedText:
    files = {
        name: PublishedFile(REMOTE[name], len(text), hashlib.sha256(text.encode()).hexdigest())
        for name, text in LINES.items()
    }
    return PublishedText("made", "none", url, files)


def ignore(done, of):
    pass


def held(folder) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir() if file.suffix != ".gz"}


def test_files_come_decompressed_under_our_names_and_once(server, tmp_path):
    reports = []
    fetch(made(server.url), tmp_path / "a/b", lambda done, of: reports.append((done, of)))
    assert held(tmp_path / "a/b") == LINES
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (24, 24)
    fetch(made(NOWHERE), tmp_path / "a/b", ignore)
    assert sorted(server.asked) == sorted(f"/{name}" for name in REMOTE.values())


def test_without_a_network_the_missing_files_are_listed_and_those_put_there_are_read(server, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "valid.en").write_text(LINES["valid.en"])
    (folder / "train.de.gz").write_bytes((server.folder / "train.de.gz").read_bytes())
    with pytest.raises(UserError, match="could not be reached") as error:
        fetch(made(NOWHERE), folder, ignore)
    assert str(error.value).splitlines()[1:] == [
        f"Put these files into {folder} by hand, and run the same command again:",
        f"  {NOWHERE}/train.en.gz",
    ]
    assert held(folder) == {name: LINES[name] for name in ("valid.en", "train.de")}
    (folder / "train.en.gz").write_bytes((server.folder / "train.en.gz").read_bytes())
    fetch(made(NOWHERE), folder, ignore)
    assert held(folder) == LINES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"another text"), "is not the published text: its SHA-256 is "),
        (gzip.compress(bytes(1 << 20)), "is not the published text: its SHA-256 is "),  # no more of it is read
        (gzip.compress(LINES["train.de"].encode())[:-9], "is damaged or was cut short"),
        (b"<html>", "is damaged or was cut short"),
    ],
    ids=["another", "endless", "cut", "no gzip"],
)
def test_a_file_that_is_not_the_published_one_is_named_and_not_kept(server, tmp_path, content, message):
    (server.folder / "train.de.gz").write_bytes(content)
    with pytest.raises(UserError, match=f"{server.url}/train.de.gz {message}"):
        fetch(made(server.url), tmp_path / "text", ignore)
    assert held(tmp_path / "text") == {"train.en": LINES["train.en"]}
    (server.folder / "train.de.gz").write_bytes(gzip.compress(LINES["train.de"].encode()))
    fetch(made(server.url), tmp_path / "text", ignore)
    assert held(tmp_path / "text") == LINES


def test_an_interrupted_transfer_keeps_nothing_of_its_file(server, tmp_path, monkeypatch):
    whole = (server.folder / "train.en.gz").read_bytes()

    def send_half(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(whole)))
        handler.end_headers()
        handler.wfile.write(whole[: len(whole) // 2])

    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "do_GET", send_half)
    with pytest.raises(UserError, match=r"train\.en\.gz is damaged or was cut short"):
        fetch(made(server.url), tmp_path / "text", ignore)
    assert held(tmp_path / "text") == {}


@pytest.mark.parametrize("name", ["valid.en", "val.en.gz"])
def test_a_file_of_the_user_is_never_overwritten(server, tmp_path, name):
    mine = b"mine\n" if name == "valid.en" else gzip.compress(b"mine\n")
    (tmp_path / name).write_bytes(mine)
    if name == "valid.en":  # beside the published one, which is not read then
        shutil.copy(server.folder / "val.en.gz", tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path / name} is not the published text.* move it away"):
        fetch(made(server.url), tmp_path, ignore)
    assert (tmp_path / name).read_bytes() == mine


def test_a_published_file_that_is_gone_is_reported_with_the_reason(server, tmp_path):
    (server.folder / "val.en.gz").unlink()
    with pytest.raises(UserError, match=r"could not be reached \((Not Found|File not found)\)(.|\n)*/val\.en\.gz$"):
        fetch(made(server.url), tmp_path / "text", ignore)


def test_every_known_text_has_all_splits_in_two_languages():
    for text in TEXTS.values():
        languages = {name.partition(".")[2] for name in text.files}
        assert len(languages) == 2
        assert {*text.files} == {f"{split}.{language}" for split in SPLITS for language in languages}
        assert all(len(file.sha256) == 64 and file.remote.endswith(".gz") for file in text.files.values())
