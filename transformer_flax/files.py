"""Writes files whole and checks files when it reads them: JSON, JSON lines, folders, locks and the cache folder."""

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import pathlib
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Generator, Iterable
from typing import IO, Any

from transformer_flax.errors import UserError

CHECKSUM = "crc32"
MOST_BYTES = 1 << 26  # of a file of a run; the tokenizer's is the largest, with some million
ABANDONED_SECONDS = 24 * 3600  # nobody still writes a partial file that has not changed for so long

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def named_errors(name: str) -> Generator[None]:
    """Context manager: an OSError, such as that of a full disk, names the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from error


def refuse_dangling(folder: pathlib.Path) -> None:
    """Checks that neither a folder nor one above it is a link to a folder that is not there."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            target = place.readlink()
            raise UserError(f"{place} is a link to {target}, which is not there: mount its disk, or put it back")


def write_whole(file: pathlib.Path, content: str | bytes) -> None:
    """Replaces a file, or a link of that name, by this content. The file is never partly written.

    Partial files that killed processes left behind are removed after a day.
    """
    for abandoned in file.parent.glob(f".{glob.escape(file.name)}.*.partial"):
        with contextlib.suppress(OSError):  # another process has finished or removed it
            if time.time() - abandoned.lstat().st_mtime > ABANDONED_SECONDS:
                abandoned.unlink()
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex}.partial")
    try:
        with named_errors(str(file)):
            with partial.open("xb") as stream:
                stream.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(file)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def is_partial(file: pathlib.Path) -> bool:
    """Returns whether a file was left behind by a `write_whole` that was killed."""
    return file.name.startswith(".") and file.name.endswith(".partial")


@contextlib.contextmanager
def whole_folder(folder: pathlib.Path) -> Generator[pathlib.Path]:
    """Context manager: yields an empty folder to fill. It becomes `folder` at the end; after an error it is removed.

    If another process has made `folder` in the meantime, the other process's folder stays. Folders that killed
    processes left behind are removed after a day.
    """
    for abandoned in folder.parent.glob(f"{glob.escape(folder.name)}.partial.{'[0-9a-f]' * 32}"):
        with contextlib.suppress(OSError):  # another process has finished or removed it
            if time.time() - abandoned.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(abandoned)
    partial = folder.with_name(f"{folder.name}.partial.{uuid.uuid4().hex}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_free(folder: pathlib.Path) -> None:
    """Checks that there is no file, folder or link of this name."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already; name a new folder")


def require_other(output: str, inputs: Iterable[str | int]) -> None:
    """Checks that an output file is none of the inputs, which are names or descriptors of files."""
    if os.path.isfile(output) and any(os.path.samestat(os.stat(output), os.stat(file)) for file in inputs):
        raise UserError(f"{output} is an input; write to another file")


def read_bounded(file: pathlib.Path) -> bytes:
    """Reads a file of a run. Others may have made it, so a file of more than `MOST_BYTES` is refused."""
    with file.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return content


def read_json(file: pathlib.Path) -> Any:
    return json.loads(read_bounded(file))


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """Returns an object with its checksum as the last entry."""
    return {**value, CHECKSUM: zlib.crc32(json.dumps(value).encode())}


def verify_checksum(value: Any) -> dict[str, Any]:
    """Verifies and removes the checksum of an object, if it has one; raises ValueError if it does not match.

    To edit such an object in its file, delete the checksum there.
    """
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    content = {name: entry for name, entry in value.items() if name != CHECKSUM}
    if CHECKSUM in value and with_checksum(content)[CHECKSUM] != value[CHECKSUM]:
        raise ValueError(f"it does not match its {CHECKSUM}: it has changed since it was written")
    return content


class JsonLines:
    """A file of JSON lines to append to. Each line has a checksum, and is written whole or not at all.

    The file is replaced by a new one that begins with `lines`.
    """

    def __init__(self, file: pathlib.Path, lines: Iterable[dict[str, Any]]):
        self._file = file
        write_whole(file, b"".join(map(_encode_line, lines)))
        self._stream = file.open("ab", buffering=0)

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line. If it cannot be written, the file is unchanged."""
        if not os.fstat(self._stream.fileno()).st_nlink:  # an editor may replace the file; this one has no name now
            raise UserError(f"{self._file} was replaced or deleted while it was written; run the same command again")
        data = _encode_line(line)
        length = self._stream.seek(0, os.SEEK_END)
        try:
            if self._stream.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._stream.truncate(length)
            raise UserError(
                f"{self._file} cannot be written: {error.strerror}; fix this and run the same command"
            ) from error

    def close(self) -> None:
        self._stream.close()


def _encode_line(line: dict[str, Any]) -> bytes:
    # A path that is not UTF-8 has surrogates. They are written as \udcff, which JSON reads back.
    return json.dumps(with_checksum(line), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def read_json_lines(
    file: pathlib.Path, parse: Callable[[dict[str, Any]], Any] = lambda line: line
) -> list[dict[str, Any]]:
    """Reads a file of JSON lines, without their checksums; none if the file does not exist.

    Leaves out a last line that a killed process cut short. `parse` converts each line, in order, to the value to
    return; it may raise ValueError.
    """
    parsed: list[Any] = []
    try:
        for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else ():
            parsed.append(parse(verify_checksum(json.loads(line))))
    except ValueError as error:  # from JSON, UTF-8, a checksum, or `parse`
        raise UserError(
            f"{file} is damaged in line {len(parsed) + 1:,}: {error}; correct that line or move the file away"
        ) from error
    return parsed


def try_lock(file: IO) -> bool:
    """Locks an open file. Returns False if the file is locked already, through another open file of any process.

    The lock ends with the process. If the file system has no locks, warns and returns True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        logger.warning("%s cannot be locked: make sure that no other process uses its folder", file.name)
    return True


def cache_root(cache_dir: str) -> pathlib.Path:
    """Returns the folder of caches: `cache_dir`, or the user's cache directory if `cache_dir` is empty."""
    if cache_dir:
        return pathlib.Path(cache_dir)
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "transformer_flax"
    except RuntimeError as error:  # as in a container whose user has no entry in /etc/passwd
        raise UserError("no home directory for the cache: set HOME or XDG_CACHE_HOME to a folder") from error


def cache_error(what: str, needed: str, folder: pathlib.Path, error: OSError) -> UserError:
    """Returns the error for a cache folder that cannot be written; `needed` is a size, such as "12.3 MB"."""
    return UserError(
        f"{what} needs {needed} in {folder}, which cannot be written ({error.strerror or error}); make room there, or "
        "name another place with --config.data.cache_dir"
    )
