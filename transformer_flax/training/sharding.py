"""Runs a step on one device or many: `jit` over a mesh, or `pmap`."""

import collections
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_flax.errors import UserError
from transformer_flax.training.loss import LossFn

AXIS = "data"
HOST_DEVICES = "xla_force_host_platform_device_count"
SMALL = 2**12  # elements; an array with fewer is not worth the gathering, and stays whole on each device

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Places a train state and batches on devices and compiles a step for them. Equal ones can share its programs.

    A step is one program over a mesh of all devices, which sees global batches; XLA inserts the sums.

    With `shard_params`, each device keeps its share of the parameters, and of all that has their shapes: moments and
    moving average (Rajbhandari et al., 2020, ZeRO, stage 3). A step gathers the parameters for its loss, scatters the
    sums of the gradients and updates every share where it is.

    Args:
      devices: of all processes.
      shard_params: as above.
      row_axis: of a batch's arrays.
    """

    devices: tuple[jax.Device, ...]
    shard_params: bool = False
    row_axis: int = 0
    axis_name: ClassVar[str | None] = None  # the mapped axis over which the step must sum; None if XLA inserts the sums

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        # Auto axes: XLA propagates the shardings, as make_mesh's Explicit default would not.
        return Mesh(np.array(self.devices), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.cached_property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def _by_rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*[None] * self.row_axis, AXIS))

    def _placement(self, tree: Any) -> Any:
        """The shardings of a state's arrays, which follow from their shapes alone."""

        def sharding(x):
            divided = [axis for axis, size in enumerate(x.shape) if size % self.num_devices == 0]
            if not self.shard_params or not divided or math.prod(x.shape) < SMALL:
                return self._replicated
            largest = max(divided, key=lambda axis: x.shape[axis])
            return NamedSharding(self.mesh, PartitionSpec(*[None] * largest, AXIS))

        return jax.tree.map(sharding, tree)

    def place(self, tree: Any) -> Any:
        """Puts a state, or parameters, of host or device arrays on the devices: a copy on each, or on each a shard."""
        if self._replicated.is_fully_addressable:
            return jax.device_put(tree, self._placement(tree))

        def put(x, sharding):  # each process on its own devices; device_put would compare the values of all first
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return x
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, tree, self._placement(tree))

    def unreplicate(self, tree: Any) -> Any:
        """Each array of what was placed, or computed from it, once, in the shape that it has on a single device."""
        return tree

    def local(self, tree: Any) -> Any:
        """Copies what was placed to one device of this process, for programs that run there alone."""

        def gather(x):  # and wait, so that the other devices never hold more than one array whole
            return jax.block_until_ready(jax.device_put(x, self._replicated)).addressable_data(0)

        return jax.tree.map(gather, tree)

    def gathering(self, loss_fn: LossFn) -> LossFn:
        """Wraps a loss so that it takes parameters as they are placed, and places its gradient likewise."""
        if not self.shard_params:
            return loss_fn

        # Left to itself, XLA gathers a batch that is smaller than the parameters, and each device computes them all.
        @jax.custom_vjp
        def gather(params):
            return jax.lax.with_sharding_constraint(params, self._replicated)

        def scatter(_, gradient):
            return (jax.lax.with_sharding_constraint(gradient, self._placement(gradient)),)

        gather.defvjp(lambda params: (gather(params), None), scatter)
        return lambda params, batch, key: loss_fn(gather(params), batch, key)

    def shard(self, batch: Any) -> Any:
        """Spreads the rows of a batch over the devices; with several hosts, each gives the rows of its own devices."""
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, self._by_rows), batch)

    def compile(self, function: Callable, *, donate_state: bool = False) -> Callable:
        """Compiles `function(state, batch)` of what was placed and spread; its results are placed as a state is."""

        def placed(state, batch):
            result = function(state, batch)
            return jax.lax.with_sharding_constraint(result, self._placement(result))

        return jax.jit(placed, in_shardings=(None, self._by_rows), donate_argnums=(0,) if donate_state else ())

    def behind_seeds(self) -> "Parallel":
        """Makes one for states and batches with a leading axis of seeds."""
        return dataclasses.replace(self, row_axis=1)


@dataclasses.dataclass(frozen=True)
class Pmap(Parallel):
    """A step is one program on each device, over its own rows, which sums over AXIS."""

    axis_name: ClassVar[str | None] = AXIS

    @functools.cached_property
    def _by_device(self) -> NamedSharding:
        # pmap wants a leading axis of devices, and each of its entries on its own.
        return NamedSharding(Mesh(np.array(self.devices), (AXIS,)), PartitionSpec(AXIS))

    def place(self, tree: Any) -> Any:
        def stack(x):
            return jnp.broadcast_to(x, (self.num_devices, *jnp.shape(x)))

        return jax.device_put(jax.tree.map(stack, tree), self._by_device)

    def unreplicate(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x[0], tree)

    def local(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.addressable_data(0)[0], tree)

    def shard(self, batch: Any) -> Any:
        return jax.device_put(
            jax.tree.map(lambda x: x.reshape(self.num_devices, -1, *x.shape[1:]), batch), self._by_device
        )

    def compile(self, function: Callable, *, donate_state: bool = False) -> Callable:
        return jax.pmap(
            function, axis_name=AXIS, devices=list(self.devices), donate_argnums=(0,) if donate_state else ()
        )


def divide_cpu(count: int) -> None:
    """Makes the cores of a CPU act as `count` devices, unless JAX was told their number before.

    It must come before the first use of a device.
    """
    told = jax.config.values["jax_num_cpu_devices"] >= 0 or HOST_DEVICES in os.environ.get("XLA_FLAGS", "")
    if count == 1 or told:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.default_backend() != "cpu":
            return
        logger.warning("config.parallel.cpu_devices is %d, but JAX uses the CPU as one device already", count)


def make_parallel(config, rows_multiple_of: int, accumulation_steps: int, loss_chunks: int = 1) -> Parallel:
    """Makes the devices of `config.parallel`.

    Raises:
      UserError: a mode that cannot shard parameters, more devices than there are, or rows that do not divide among
        devices and steps.
    """
    if config.shard_params and config.mode == "pmap":
        raise UserError(
            "config.parallel.shard_params is True and config.parallel.mode is 'pmap', which keeps a copy of the "
            "parameters on each device; set the mode to 'jit', or shard_params to False"
        )
    # Rows are shared among processes in their order, which the numbers of devices need not follow.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if jax.process_count() > 1:
        _check_processes(config, devices)
    if not 0 <= config.num_devices <= len(devices):
        raise UserError(
            f"config.parallel.num_devices is {config.num_devices}; this machine has {len(devices)} "
            f"({devices[0].device_kind}); 0 takes all"
        )
    devices = tuple(devices[: config.num_devices or None])
    parts = len(devices) * accumulation_steps * loss_chunks
    if rows_multiple_of % parts:
        chunks = f" x {loss_chunks} chunks of the loss" if loss_chunks > 1 else ""
        raise UserError(
            f"config.data.rows_multiple_of is {rows_multiple_of}, which does not divide among {len(devices)} devices x "
            f"{accumulation_steps} accumulation steps{chunks}; set it to a multiple of {parts}, or use fewer "
            "devices (config.parallel.num_devices), steps (config.accumulation_steps) or chunks (config.loss_chunks)"
        )
    return Pmap(devices) if config.mode == "pmap" else Parallel(devices, shard_params=config.shard_params)


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
