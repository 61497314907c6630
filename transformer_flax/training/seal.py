"""Checkpoints that tell when they are damaged: of the arrays that it stores, Orbax keeps no checksums."""

import json
import pathlib
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.data.strict_json import parse_json, read_json

METADATA = "_CHECKPOINT_METADATA"  # of a checkpoint, which Orbax makes


class AnotherError(ValueError):
    """A state of another step or seed than that of the checkpoint which it was read as."""


class Seal(NamedTuple):
    """What is stored beside a state."""

    fingerprints: dict[str, int]  # of its parts, by their names
    totals: Any  # JSON: what was measured and is not logged yet


@jax.jit
def fingerprint(tree: Any) -> jax.Array:
    """A number, uint32 [], that changes with any single element of a tree of arrays, and hardly ever stays the same.

    It is computed where the arrays are: the sum of all elements, their bits read as integers, each multiplied with an
    odd number of its own (so no change of one can be lost modulo 2^32), and the same once more over the leaves. The
    fingerprint of a single whole number is that number.
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        odd = 2 * jax.lax.iota(jnp.uint32, bits.size).reshape(bits.shape) + 1
        total = total * np.uint32(0x9E3779B1) + jnp.sum(bits * odd, dtype=jnp.uint32)
    return total


def seal(parts: dict[str, Any], totals: Any) -> dict[str, Any]:
    """The seal of a state's parts, as JSON."""
    fingerprints = {name: int(fingerprint(part)) for name, part in parts.items()}
    content = json.dumps(Seal(fingerprints, totals)._asdict())
    return {"seal": content, "crc32": zlib.crc32(content.encode())}


def load_seal(folder: pathlib.Path) -> Seal:
    """The seal of a checkpoint.

    It is read from Orbax's file, as Orbax would read what describes each array too: TensorStore 0.1.86 never frees
    that.

    Raises:
      OSError, ValueError: it is not what was written, or there is none.
    """
    metadata = read_json(folder / METADATA).get("custom_metadata")
    if not metadata or zlib.crc32(metadata.get("seal", "").encode()) != metadata.get("crc32"):
        raise ValueError("its seal is broken or missing")
    sealed = Seal(**parse_json(metadata["seal"]))
    totals = sealed.totals
    if not isinstance(totals, dict) or totals.keys() not in (set(), {"sums", "counts"}):
        raise ValueError("its seal is none of ours")
    if not all(_are_numbers(part) for part in (sealed.fingerprints, *totals.values())):
        raise ValueError("its seal is none of ours")
    return sealed


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(type(value) in (int, float) for value in values.values())


def require_intact(part: Any, name: str, seal: Seal) -> None:
    """Checks a part of a state that has been read.

    Raises:
      ValueError: it is not what was sealed.
    """
    if int(fingerprint(part)) != seal.fingerprints[name]:
        raise ValueError(f"its {name} are not what was saved")


def require_own(seal: Seal, **numbers: int) -> None:
    """Checks the numbers of a state by their names, such as its step, of which the seal says enough.

    Raises:
      AnotherError: one of them is another.
    """
    for name, number in numbers.items():
        if seal.fingerprints[name] != number:
            raise AnotherError(f"its state is of {name} {seal.fingerprints[name]}, not {number}")
