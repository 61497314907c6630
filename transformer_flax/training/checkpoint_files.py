"""Reads checkpoints and tells when they are damaged.

Orbax keeps no checksums of the arrays that it stores. Beside each state lies a seal: a fingerprint of every part.
"""

import asyncio
import contextlib
import json
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from transformer_flax.errors import UserError
from transformer_flax.files import read_json
from transformer_flax.training.multihost import share

PATIENCE = 60  # seconds that pending tasks of a failed read have
STEP = re.compile("0|[1-9][0-9]{0,17}")  # the name of a checkpoint


class UnreadableError(UserError):
    """A checkpoint that cannot be read, or is another one than its place says."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step  # of its place


def saved_steps(directory: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a directory, ascending; those that were never completed have other names."""
    return sorted(int(folder.name) for folder in directory.glob("*") if STEP.fullmatch(folder.name))


def load_params(directory: pathlib.Path, step: int, like: Any, *, seed: int, kind: str = "params") -> Any:
    """The parameters of one checkpoint and nothing else of it, on the first device.

    Args:
      directory: where the checkpoints lie; it may be in use by a run that trains.
      step: one of `saved_steps`.
      like: a tree of their shapes.
      seed: of the run.
      kind: "params", or EMA for their moving average.

    Raises:
      UnreadableError: it is damaged, or of another model, step or seed.
    """
    context = own_context()
    context.pytree.loading.partial_load = True
    folder = directory.resolve() / str(step)
    with reading(directory, step), context:
        sealed = load_seal(folder)
        require_own(sealed, step=step, seed=seed)
        loaded: Any = ocp.load_checkpointables(str(folder), {"state": {kind: on_first_device(like)}})
        params = loaded["state"][kind]
        require_intact(params, kind, sealed)  # which fails at a missing part, too: Orbax leaves it as it was asked for
    return params


@contextlib.contextmanager
def reading(directory: pathlib.Path, step: int) -> Iterator[None]:
    """A context in which a checkpoint is read; any failure becomes an UnreadableError."""
    try:
        with _settled_loops():
            yield
    except Exception as error:  # of whatever kind the storage has for it
        if isinstance(error.__cause__, KeyboardInterrupt):  # which the storage takes for a damage
            raise error.__cause__ from None
        others = ", ".join(str(other) for other in saved_steps(directory) if other != step)
        another = isinstance(error, AnotherError)
        why = f"is another one: {error}" if another else "cannot be read: it is damaged, cut short, or of another model"
        raise UnreadableError(
            f"the checkpoint {directory / str(step)} {why}; "
            + (f"there are those of steps {others} too" if others else "there is no other"),
            step,
        ) from error


def own_context() -> ocp.Context:
    """Orbax's settings, with which a process reads by itself, whatever others do."""
    context = ocp.Context()
    index, size = share()
    if size > 1:
        context.multiprocessing.active_processes = {index}
        context.multiprocessing.primary_host = index
        context.multiprocessing.barrier_sync_key_prefix = f"process_{index}"
    return context


def on_first_device(like: Any) -> Any:
    """Abstract arrays of these shapes on the first device, to restore there whatever devices they were saved from."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)


METADATA = "_CHECKPOINT_METADATA"  # of a checkpoint, which Orbax makes


class AnotherError(ValueError):
    """A state of another step or seed than that of the checkpoint which it was read as."""


class Seal(NamedTuple):
    """Stored beside a state, to tell whether it is intact."""

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
    return Seal(**json.loads(metadata["seal"]))


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


@contextlib.contextmanager
def _settled_loops() -> Iterator[None]:
    """A context in which new event loops finish their pending tasks before they close.

    Else a failed read of Orbax leaves tasks that complain later of a closed loop.
    """
    makers: list[Any] = [asyncio, *filter(None, [sys.modules.get("uvloop")])]  # Orbax's, the second where one runs
    functions = [module.new_event_loop for module in makers]
    try:
        for module, function in zip(makers, functions, strict=True):
            module.new_event_loop = _settling(function)
        yield
    finally:
        for module, function in zip(makers, functions, strict=True):
            module.new_event_loop = function


def _settling(new_event_loop: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        loop = new_event_loop()
        close = loop.close

        def settle_and_close() -> None:
            if not loop.is_closed():
                loop.run_until_complete(_others())
            close()

        loop.close = settle_and_close
        return loop

    return make


async def _others() -> None:
    """Waits for all other tasks of its loop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.gather(*others, return_exceptions=True)
