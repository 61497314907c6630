"""Reads checkpoints and detects damaged ones.

Orbax stores no checksums of its arrays. So a seal is stored beside each state: a fingerprint of each of its parts.
"""

import asyncio
import contextlib
import functools
import json
import os
import pathlib
import sys
import threading
import zlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from transformer_flax.errors import UserError
from transformer_flax.files import read_json, refuse_dangling
from transformer_flax.training.multihost import share

PATIENCE = 60  # seconds to wait for the pending tasks of a failed read


class UnreadableError(UserError):
    """The error for a checkpoint that cannot be read, or whose step or seed is not the expected one."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step  # from the name of the checkpoint's folder


def saved_steps(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a directory, ascending. Incomplete checkpoints have other names."""
    refuse_dangling(directory)
    try:
        names = os.listdir(directory)  # not `glob`, which finds nothing where the directory cannot be read
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}") from error
    return sorted(int(name) for name in names if name.isdecimal())


def load_params(directory: pathlib.Path, step: int, like: Any, *, seed: int, kind: str = "params") -> Any:
    """Reads only the parameters of a checkpoint, to the first device. A run may be training in the directory.

    `like` is a tree of the parameters' shapes. `kind` is "params", or EMA for the moving average of the parameters.

    Raises:
      UnreadableError: the checkpoint is damaged, or of another model, step or seed.
    """
    loaded, _ = load_parts(directory, step, {kind: like}, seed=seed)
    return loaded[kind]


def load_parts(directory: pathlib.Path, step: int, like: dict[str, Any], *, seed: int) -> tuple[dict[str, Any], Any]:
    """Reads parts of a state to the first device, and checks them. Returns the parts and the totals of the seal.

    `like` has the shapes of the parts, by name. Raises an UnreadableError as `load_params` does.
    """
    folder = directory.resolve() / str(step)
    # Orbax then restores arrays to the first device, whichever devices the arrays were saved from.
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=first), like)
    with _reading(directory, step), _own_context():
        sealed = _load_seal(folder)
        fingerprints = sealed["fingerprints"]
        for name, number in {"step": step, "seed": seed}.items():  # an integer is its own fingerprint
            if fingerprints[name] != number:
                raise UserError(f"its state is of {name} {fingerprints[name]}, not {number}")
        loaded: Any = ocp.load_checkpointables(str(folder), {"state": like})["state"]
        for name, part in loaded.items():
            if int(fingerprint(part)) != fingerprints[name]:  # fails for a missing part, which is abstract
                raise ValueError(f"its {name} are not what was saved")
    return loaded, sealed["totals"]


@contextlib.contextmanager
def _reading(directory: pathlib.Path, step: int) -> Generator[None]:
    """Context manager: turns any failure to read a checkpoint into an UnreadableError.

    Raises:
      UserError: this user may not read the checkpoint, which says nothing about it.
    """
    try:
        with _settled_loops():
            yield
    except Exception as error:  # the storage raises errors of many types
        if isinstance(error.__cause__, KeyboardInterrupt):  # the storage reports Ctrl-C as damage
            raise error.__cause__ from None
        folder = directory / str(step)
        for file in (folder, *folder.rglob("*")):
            if os.path.exists(file) and not os.access(file, os.R_OK, effective_ids=True):
                raise UserError(f"{file} cannot be read: Permission denied") from error
        others = ", ".join(str(other) for other in saved_steps(directory) if other != step)
        another = isinstance(error, UserError)
        why = f"is another one: {error}" if another else "cannot be read: it is damaged, cut short, or of another model"
        raise UnreadableError(
            f"the checkpoint {folder} {why}; "
            + (f"there are those of steps {others} too" if others else "there is no other"),
            step,
        ) from error


def _own_context() -> ocp.Context:
    """Returns settings of Orbax with which this process reads some parts, whatever the other processes do."""
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    index, size = share()
    if size > 1:
        context.multiprocessing.active_processes = {index}
        context.multiprocessing.primary_host = index
        context.multiprocessing.barrier_sync_key_prefix = f"process_{index}"
    return context


METADATA = "_CHECKPOINT_METADATA"  # a file that Orbax writes in each checkpoint


@jax.jit
def fingerprint(tree: Any) -> jax.Array:
    """Returns a number, uint32 [], that changes if any single element of a tree of arrays changes.

    If several elements change, the number almost always changes. The number is computed where the arrays are. The bits
    of each element are read as an integer. Each integer is multiplied by an odd number of its own, and the products are
    summed modulo 2^32. With odd factors, no change of a single element is lost. The sums of the leaves are combined in
    the same way. The fingerprint of a single integer is that integer.
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        odd = 2 * jax.lax.iota(jnp.uint32, bits.size).reshape(bits.shape) + 1
        total = total * np.uint32(0x9E3779B1) + jnp.sum(bits * odd, dtype=jnp.uint32)
    return total


def seal(parts: dict[str, Any], totals: Any) -> dict[str, Any]:
    """Returns the data stored beside a state, to check that its parts, by name, are intact.

    `totals` are the metrics that were measured and are not logged yet.
    """
    fingerprints = {name: int(fingerprint(part)) for name, part in parts.items()}
    content = json.dumps({"fingerprints": fingerprints, "totals": totals})
    return {"seal": content, "crc32": zlib.crc32(content.encode())}


def _load_seal(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the seal of a checkpoint.

    The seal is read directly from Orbax's file. Orbax would also read the description of each array, and TensorStore
    0.1.86 never frees the memory of these descriptions.
    """
    metadata = read_json(folder / METADATA)["custom_metadata"]
    if zlib.crc32(metadata["seal"].encode()) != metadata["crc32"]:
        raise ValueError("its seal is broken")
    return json.loads(metadata["seal"])


_settling_lock = threading.RLock()


@contextlib.contextmanager
def _settled_loops() -> Generator[None]:
    """Context manager: new event loops finish their pending tasks before they close.

    Otherwise, a failed read of Orbax leaves tasks that later report a closed loop.
    """
    # Orbax makes loops with asyncio, or with uvloop where a loop is already running.
    makers: list[Any] = [asyncio, *filter(None, [sys.modules.get("uvloop")])]
    with _settling_lock, contextlib.ExitStack() as undone:  # one thread at a time, or the makers would stay changed
        for module in makers:
            undone.callback(setattr, module, "new_event_loop", module.new_event_loop)
            module.new_event_loop = functools.partial(_make_settling, module.new_event_loop)
        yield


def _make_settling(new_event_loop: Callable[[], Any]) -> Any:
    loop = new_event_loop()
    close = loop.close

    def settle_and_close() -> None:
        if not loop.is_closed():
            loop.run_until_complete(_others())
        close()

    loop.close = settle_and_close
    return loop


async def _others() -> None:
    """Waits for all other tasks of the running event loop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.gather(*others, return_exceptions=True)
