"""Content that is nearly right: what a random generator makes of a real file."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

HOSTILE = [  # in the place of any value of a JSON file
    *[
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        0.5,
        -0.0,
        1e999,
        float("nan"),
        1e308,
        5e-324,
        1 << 31,
        1 << 40,
        1 << 63,
        10**30,
    ],
    *["", "0", "1", "\0", "\ud800", "../../outside", "/dev/zero", "x" * 5000, "a.b", "[", "é", "<end>", "float32"],
    *[[], {}, [[]], [0, 1], {"": 0}, {"get": 1}, {"a.b": 1}, {"__class__": {}}, {"config": {}}, [None] * 100],
]
TOKENS = [  # of the formats, where a byte may stand
    *[
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b"null",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b'"\\ud800"',
        b"\\",
        b"0x",
        b"-",
    ],
    *[
        b"\n",
        b"\r",
        b"\0",
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\x1f\x8b",
        b"\xfd7zXZ\0",
        b"PK\x03\x04",
    ],
    *[b"9" * 30, b"9" * 5000, b"[" * 200, b'{"a":' * 200, b"(" * 300, b" " * 1000],
]


def mutate(rng: random.Random, content: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The content changed in one to four ways, or arbitrary bytes.

    Args:
      rng: decides all.
      content: of a real file.
      others: contents to take parts of.
    """
    kind = rng.random()
    if kind < 0.02:
        return rng.randbytes(rng.randrange(200))
    if kind < 0.4 and (changed := _mutate_json(rng, content)) is not None:
        return changed
    for _ in range(rng.randint(1, 4)):
        content = rng.choice(CHANGES)(rng, content, [content, *others])
    return content


def _mutate_json(rng: random.Random, content: bytes) -> bytes | None:
    """One or two values of a JSON file, or of one of its lines, replaced, removed or doubled; None where it is none."""
    lines = content.split(b"\n") if content.count(b"{") > content.count(b"\n") / 2 > 0.9 else [content]
    number = rng.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except ValueError:
        return None
    for _ in range(rng.randint(1, 2)):
        value = _change(rng, value)
    lines[number] = json.dumps(value).encode()
    return b"\n".join(lines)


def _change(rng: random.Random, value: Any) -> Any:
    if not (isinstance(value, (dict, list)) and value) or rng.random() < 0.1:
        return _replacement(rng, value)
    places = list(value) if isinstance(value, dict) else range(len(value))
    place = rng.choice(places)
    changed = value.copy()
    what = rng.random()
    if what < 0.75:
        changed[place] = _change(rng, value[place])
    elif what < 0.85:
        del changed[place]
    elif isinstance(changed, dict):
        name = rng.choice([rng.choice(HOSTILE), rng.choice(places), f"{place}x"])
        changed[name if isinstance(name, str) else repr(name)] = rng.choice([value[place], rng.choice(HOSTILE)])
    else:
        changed.insert(place, value[rng.choice(places)])
    return changed


def _replacement(rng: random.Random, value: Any) -> Any:
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-1, 1, value, 1 << rng.randrange(70)])
    if type(value) is str and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice(["", "x", "Ġ", value, "\0"]) + value[place + 1 :]
    if rng.random() < 0.02:
        nested: Any = 0
        for _ in range(rng.choice([20, 300])):
            nested = {"a": nested} if rng.random() < 0.5 else [nested]
        return nested
    return rng.choice(HOSTILE)


def _flip(rng: random.Random, content: bytes, _) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 8]) if content else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(rng: random.Random, content: bytes, _) -> bytes:
    return content[: rng.randint(0, len(content))]


def _remove(rng: random.Random, content: bytes, _) -> bytes:
    start, stop = sorted(rng.randint(0, len(content)) for _ in range(2))
    return content[:start] + content[min(stop, start + rng.choice([1, 10, 1000])) :]


def _splice(rng: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    start, stop = sorted(rng.randint(0, len(other)) for _ in range(2))
    place = rng.randint(0, len(content))
    return content[:place] + other[start : min(stop, start + 1000)] + content[rng.randint(place, len(content)) :]


def _insert(rng: random.Random, content: bytes, _) -> bytes:
    place = rng.randint(0, len(content))
    return content[:place] + rng.choice(TOKENS) + content[place + rng.choice([0, 1]) :]


def _digit(rng: random.Random, content: bytes, _) -> bytes:
    digits = [place for place, byte in enumerate(content[:500]) if 48 <= byte < 58]
    if not digits:
        return content
    place = rng.choice(digits)
    return content[:place] + rng.choice([b"-1", b"9", b"999999999999999999", b"1e5", b"0"]) + content[place + 1 :]


CHANGES: list[Callable[[random.Random, bytes, Sequence[bytes]], bytes]] = [
    *[_flip, _truncate, _remove, _splice, _insert, _digit],
]
