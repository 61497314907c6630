"""Files are written whole or not at all, and what is read from them is what was written."""

import errno
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from transformer_flax import files
from transformer_flax.errors import UserError
from transformer_flax.files import (
    JsonLines,
    cache_root,
    is_partial,
    read_json_lines,
    try_lock,
    whole_folder,
    write_whole,
)


def names(folder) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture
def full_disk(monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fail)


# Whole files


def test_a_file_is_replaced_whole(tmp_path):
    file = tmp_path / "a"
    for content, expected in (("ü\n", "ü\n".encode()), (b"\xff", b"\xff"), (os.fsdecode(b"\xff"), b"\\udcff")):
        write_whole(file, content)
        assert file.read_bytes() == expected
    assert names(tmp_path) == ["a"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, full_disk):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a'}'"):
        write_whole(tmp_path / "a", "new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_what_a_killed_process_left_of_a_file_is_removed_after_a_day(tmp_path):
    for name, age in ((".a.0.partial", 25), (".a.1.partial", 23), (".b.0.partial", 25)):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age * 3600,) * 2)
    write_whole(tmp_path / "a", "new")
    assert names(tmp_path) == [".a.1.partial", ".b.0.partial", "a"]


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "victim").write_text("work")
    (tmp_path / "a").symlink_to(tmp_path / "victim")
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "victim").read_text() == "work"
    assert not (tmp_path / "a").is_symlink()


def test_what_a_kill_leaves_of_a_file_is_known_by_its_name(tmp_path):
    program = """if True:
        import os, pathlib, signal, sys
        from transformer_flax.files import write_whole
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        write_whole(pathlib.Path(sys.argv[1]), "new")
        """
    (tmp_path / "a").write_text("old")
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")], cwd=ROOT)
    whole, left = sorted(tmp_path.iterdir(), key=is_partial)
    assert (whole.name, whole.read_text()) == ("a", "old")
    assert is_partial(left)


# Whole folders


def test_a_folder_appears_when_it_is_whole(tmp_path):
    with whole_folder(tmp_path / "deeper/new") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "deeper/new").exists()
    assert names(tmp_path / "deeper") == ["new"]
    assert names(tmp_path / "deeper/new") == ["file"]


def test_a_folder_that_was_not_finished_is_removed(tmp_path):
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "new"):
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_of_two_processes_the_first_makes_the_folder(tmp_path):
    with whole_folder(tmp_path / "new") as ours:
        (ours / "ours").touch()
        with whole_folder(tmp_path / "new") as theirs:
            (theirs / "theirs").touch()
    assert names(tmp_path) == ["new"]
    assert names(tmp_path / "new") == ["theirs"]


def test_a_folder_that_cannot_take_its_name_is_told(tmp_path):
    (tmp_path / "new").write_text("in the way")
    with pytest.raises(OSError, match="new"), whole_folder(tmp_path / "new"):
        pass
    assert names(tmp_path) == ["new"]


# JSON lines


def test_lines_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "lines.jsonl"
    lines = [{"step": 0, "x": 0.1}, {"name": "ü", "nested": {"a": [1, None]}}, {"x": float("inf")}]
    lines.append({"path": os.fsdecode(b"/caf\xe9")})  # in a folder that an older system has named
    writer = JsonLines(file, lines[:1])
    for line in lines[1:]:
        writer.write(line)
    writer.close()
    assert read_json_lines(file) == lines
    assert all("crc32" in json.loads(line) for line in file.read_text("utf-8").splitlines())
    assert read_json_lines(file, len) == [2, 2, 1, 1]


def test_a_full_disk_leaves_the_lines_that_were_there(tmp_path, full_disk):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(OSError, match="No space left on device"):
        JsonLines(file, [{"a": 2}])
    assert read_json_lines(file) == [{"a": 1}]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    file = tmp_path / "lines.jsonl"
    JsonLines(file, [{"a": 1}, {"a": 2}]).close()
    file.write_bytes(file.read_bytes()[:-1])
    assert read_json_lines(file) == [{"a": 1}]


def test_a_changed_line_is_told_with_its_place(tmp_path):
    file = tmp_path / "lines.jsonl"
    JsonLines(file, [{"a": 1}, {"a": 2}]).close()
    file.write_text(file.read_text().replace('"a": 2', '"a": 3'))
    with pytest.raises(UserError, match=r"lines\.jsonl is damaged in line 2: it does not match its crc32"):
        read_json_lines(file)


def test_lines_are_not_written_to_a_file_that_an_editor_has_replaced(tmp_path):
    file = tmp_path / "lines.jsonl"
    writer = JsonLines(file, [{"a": 1}])
    (tmp_path / "edited").write_bytes(file.read_bytes())
    (tmp_path / "edited").replace(file)
    with pytest.raises(UserError, match=r"lines\.jsonl was replaced or deleted while it was written"):
        writer.write({"a": 2})
    writer.close()


def test_a_line_that_has_no_room_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "lines.jsonl"
    program = """if True:
        import pathlib, resource, sys
        from transformer_flax.files import JsonLines
        lines = JsonLines(pathlib.Path(sys.argv[1]), [{"a": 1}])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        lines.write({"b": "x" * 200})
        """
    result = subprocess.run([sys.executable, "-c", program, str(file)], cwd=ROOT, capture_output=True, text=True)
    assert f"UserError: {file} cannot be written" in result.stderr
    assert file.read_bytes().count(b"\n") == len(file.read_bytes().splitlines()) == 1


# Locks


def test_a_lock_is_held_by_one_process_until_it_ends(tmp_path):
    hold = "import sys, fcntl, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    (tmp_path / "lock").touch()
    command = [sys.executable, "-c", hold, str(tmp_path / "lock")]
    with (tmp_path / "lock").open() as file:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            other.stdout.readline()
            assert not try_lock(file)
            other.kill()
        assert try_lock(file)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(files.fcntl, "flock", fail)
    with (tmp_path / "lock").open("w") as file:
        assert try_lock(file)
    assert "lock cannot be locked" in caplog.text


# The cache


def test_a_cache_directory_that_is_named_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root(str(tmp_path / "mine")) == tmp_path / "mine"


def test_the_usual_cache_directory_is_xdg_cache_home_or_else_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root("") == tmp_path / "transformer_flax"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # counts as none, as its specification says
    assert cache_root("") == pathlib.Path(tmp_path, ".cache", "transformer_flax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root("") == pathlib.Path(tmp_path, ".cache", "transformer_flax")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)  # a user who is not in /etc/passwd
    with pytest.raises(UserError, match="no home directory for the cache: set HOME"):
        cache_root("")
