"""The same step on one device or many: `jit` over a mesh, or `pmap`."""

import collections
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_flax.errors import UserError

AXIS = "data"
MODES = ("jit", "pmap")


class Parallel(Protocol):
    """Places a train state and batches on devices and compiles a step for them."""

    num_devices: int

    @property
    def axis_name(self) -> str | None:
        """What the step must sum over by itself."""
        ...

    def replicate(self, tree: Any) -> Any:
        """Puts a copy of a tree of host or device arrays on every device."""
        ...

    def unreplicate(self, tree: Any) -> Any:
        """One copy of a replicated tree, the shapes those of a single device."""
        ...

    def local(self, tree: Any) -> Any:
        """The same for programs that only this of several processes runs."""
        ...

    def shard(self, batch: Any) -> Any:
        """Spreads the rows of a batch over the devices; with several hosts, each gives the rows of its own devices."""
        ...

    def compile(self, function: Callable, *, donate_state: bool = False) -> Callable:
        """Compiles `function(replicated, sharded) -> replicated`."""
        ...


class Jit:
    """One program over a mesh of all devices; it sees global batches, and XLA inserts the sums."""

    axis_name = None

    def __init__(self, devices: list[jax.Device]):
        self.num_devices = len(devices)
        # Auto axes: XLA propagates the shardings, as make_mesh's Explicit default would not.
        self.mesh = Mesh(np.array(devices), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._sharded = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def replicate(self, tree: Any) -> Any:
        if self._replicated.is_fully_addressable:
            return jax.device_put(tree, self._replicated)

        def put(x):  # each process on its own devices; device_put would compare the values of all processes first
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return x
            x = np.asarray(x)
            return jax.make_array_from_process_local_data(self._replicated, x, x.shape)

        return jax.tree.map(put, tree)

    def unreplicate(self, tree: Any) -> Any:
        return tree

    def local(self, tree: Any) -> Any:
        if self._replicated.is_fully_addressable:
            return tree
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    def shard(self, batch: Any) -> Any:
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, self._sharded), batch)

    def compile(self, function: Callable, *, donate_state: bool = False) -> Callable:
        return jax.jit(
            function,
            in_shardings=(self._replicated, self._sharded),
            out_shardings=self._replicated,
            donate_argnums=(0,) if donate_state else (),
        )


class Pmap:
    """The same program on each device, over its own rows; the step sums by itself over AXIS."""

    axis_name = AXIS

    def __init__(self, devices: list[jax.Device]):
        self.num_devices = len(devices)
        self.devices = devices
        # pmap wants a leading axis of devices, and each of its entries on its own.
        self._by_device = NamedSharding(Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS))

    def replicate(self, tree: Any) -> Any:
        def stack(x):
            return jnp.broadcast_to(x, (self.num_devices, *jnp.shape(x)))

        return jax.device_put(jax.tree.map(stack, tree), self._by_device)

    def unreplicate(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x[0], tree)

    def local(self, tree: Any) -> Any:
        return self.unreplicate(tree)

    def shard(self, batch: Any) -> Any:
        return jax.device_put(
            jax.tree.map(lambda x: x.reshape(self.num_devices, -1, *x.shape[1:]), batch), self._by_device
        )

    def compile(self, function: Callable, *, donate_state: bool = False) -> Callable:
        return jax.pmap(function, axis_name=AXIS, devices=self.devices, donate_argnums=(0,) if donate_state else ())


def make_parallel(config, rows_multiple_of: int, accumulation_steps: int) -> Parallel:
    """What `config.parallel` asks for.

    Raises:
      UserError: an unknown mode, more devices than there are, or rows that do not divide among devices and steps.
    """
    if config.mode not in MODES:
        raise UserError(f"config.parallel.mode is {config.mode!r}; it must be one of {', '.join(MODES)}")
    # Rows are shared among processes in their order, which the numbers of devices need not follow.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if jax.process_count() > 1:
        _check_processes(config, devices)
    if not 0 <= config.num_devices <= len(devices):
        raise UserError(
            f"config.parallel.num_devices is {config.num_devices}; this machine has {len(devices)} "
            f"({devices[0].device_kind}); 0 takes all"
        )
    devices = devices[: config.num_devices or None]
    if rows_multiple_of % (len(devices) * accumulation_steps):
        raise UserError(
            f"config.data.rows_multiple_of is {rows_multiple_of}, which does not divide among {len(devices)} devices x "
            f"{accumulation_steps} accumulation steps; set it to a multiple of {len(devices) * accumulation_steps}, or "
            "use other numbers of devices (config.parallel.num_devices) and steps (config.accumulation_steps)"
        )
    return Pmap(devices) if config.mode == "pmap" else Jit(devices)


def _check_processes(config, devices: list[jax.Device]) -> None:
    """Raises:
    UserError: several processes cannot do what `config.parallel` asks for with these devices.
    """
    if config.mode == "pmap":
        raise UserError("config.parallel.mode is 'pmap', which is for one process; several need 'jit'")
    if config.num_devices not in (0, len(devices)):
        raise UserError(
            f"config.parallel.num_devices is {config.num_devices}; {jax.process_count()} processes use all their "
            f"{len(devices)} devices: set it to 0"
        )
    counts = collections.Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"process {index}: {counts[index]}" for index in sorted(counts))
        raise UserError(f"the processes have different numbers of devices ({listed}); they must have the same")
