"""JSON of small files that anybody may have written."""

import json
import os
import pathlib
import zlib
from typing import Any

CHECKSUM = "crc32"
LARGEST = 1 << 20  # bytes; ours have some thousand
DEEPEST = 16  # levels; a config has 3


def read_json(file: pathlib.Path, *, largest: int = LARGEST) -> Any:
    """The value in a file of at most `largest` bytes.

    Raises:
      OSError, ValueError: it cannot be read, or is refused by `parse_json`, or is no plain file or far too large.
    """
    require_plain(file)
    with file.open("rb") as stream:
        content = stream.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return parse_json(content.decode())


def parse_json(text: str) -> Any:
    """The value of a text; NaN and Infinity, which Python writes, are read.

    Raises:
      ValueError: it is no JSON, has a key twice, half a character or a whole number beyond 64 bits, or is nested too
        deeply to be walked through.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_int=_bounded)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _require_shallow(value)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate could neither be shown nor name a file
    return value


def signed(value: dict[str, Any]) -> dict[str, Any]:
    """The same with a checksum of it as its last entry."""
    return {**value, CHECKSUM: zlib.crc32(json.dumps(value).encode())}


def checked(value: Any) -> dict[str, Any]:
    """What was `signed`, without its checksum; whoever changes such a thing on purpose takes the checksum out.

    Raises:
      ValueError: it is not what was written, or no object.
    """
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    content = {name: content for name, content in value.items() if name != CHECKSUM}
    if CHECKSUM in value and signed(content)[CHECKSUM] != value[CHECKSUM]:
        raise ValueError(f"it has changed since its {CHECKSUM} was computed")
    return content


def require_plain(file: pathlib.Path) -> None:
    """Refuses what may never come to an end when it is read: a pipe, a device.

    Raises:
      OSError, ValueError: it is not there, or none of the kind.
    """
    file.stat()
    if not file.is_file():
        raise ValueError("it is no plain file")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)[:40]!r} twice")
    return value


def _bounded(digits: str) -> int:
    if len(digits) > 20 or abs(value := int(digits)) >= 1 << 63:
        raise ValueError(f"the number {digits[:20]}... is too large")
    return value


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def cache_root(cache_dir: str) -> pathlib.Path:
    """`cache_dir`, or where caches are kept by custom."""
    if cache_dir:
        return pathlib.Path(cache_dir)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "transformer_flax"
