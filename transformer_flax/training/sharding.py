"""Runs a step on one device or many: `jit` over a mesh, or `pmap`."""

import collections
import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_flax.errors import UserError
from transformer_flax.training.loss import LossFn

AXIS = "data"
HOST_DEVICES = "xla_force_host_platform_device_count"
SMALL = 2**12  # elements; a smaller array is not worth gathering, so each device keeps a copy

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The devices of a run. Places the train state and batches on the devices, and compiles steps for them.

    Equal objects can share compiled programs. A step is one program over a mesh of all devices. It sees global batches,
    and XLA inserts the sums over devices.

    With `shard_params`, each device keeps a shard of the parameters, of the optimizer's moments and of the moving
    average (Rajbhandari et al., 2020, ZeRO, stage 3). A step gathers the parameters to compute the loss, scatters the
    sums of the gradients, and updates each shard on its device.
    """

    devices: tuple[jax.Device, ...]  # of all processes
    shard_params: bool = False
    row_axis: int = 0  # the axis of a batch's arrays that counts the rows
    axis_name: ClassVar[str | None] = None  # the mapped axis over which the step must sum; None if XLA inserts the sums

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        # With Auto axes, XLA propagates the shardings. With Explicit axes, the default of make_mesh, it would not.
        return Mesh(np.array(self.devices), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.cached_property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def _by_rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*[None] * self.row_axis, AXIS))

    def _placement(self, tree: Any) -> Any:
        """Returns the shardings of a state's arrays, which depend only on the shapes."""

        def sharding(x):
            divided = [axis for axis, size in enumerate(x.shape) if size % self.num_devices == 0]
            if not self.shard_params or not divided or x.size < SMALL:
                return self._replicated
            largest = max(divided, key=lambda axis: x.shape[axis])
            return NamedSharding(self.mesh, PartitionSpec(*[None] * largest, AXIS))

        return jax.tree.map(sharding, tree)

    def place(self, tree: Any) -> Any:
        """Places a state, or parameters, of host or device arrays on the devices: each gets a copy, or a shard.

        An array that is on these devices already is not copied. A step that donates its state then deletes the array.
        """
        if self._replicated.is_fully_addressable:
            return jax.device_put(tree, self._placement(tree))

        def put(x, sharding):  # each process fills its own devices; device_put would first compare the values of all
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return x
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, tree, self._placement(tree))

    def local(self, tree: Any) -> Any:
        """Returns placed arrays, whole, on one device of this process, for programs that run on that device alone.

        As in `place`, an array that is there already is not copied.
        """

        def gather(x):  # waits, so that the other devices never hold more than one whole array
            return jax.block_until_ready(jax.device_put(x, self._replicated)).addressable_data(0)

        return jax.tree.map(gather, tree)

    def gathering(self, loss_fn: LossFn) -> LossFn:
        """Wraps a loss function so that it takes placed parameters. Its gradient is placed like the parameters."""
        if not self.shard_params:
            return loss_fn

        # Otherwise, XLA gathers the batch if it is smaller than the parameters, and each device computes all rows.
        @jax.custom_vjp
        def gather(params):
            return jax.lax.with_sharding_constraint(params, self._replicated)

        def scatter(_, gradient):
            return (jax.lax.with_sharding_constraint(gradient, self._placement(gradient)),)

        gather.defvjp(lambda params: (gather(params), None), scatter)
        return lambda params, batch, key: loss_fn(gather(params), batch, key)

    def shard(self, batch: Any) -> Any:
        """Shards the rows of a batch over the devices. Each of several processes gives the rows of its own devices."""
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, self._by_rows), batch)

    def compile(self, function: Callable, *, donate_state: bool = False) -> jax.stages.Wrapped:
        """Compiles `function(state, batch)` for a placed state and a sharded batch. Places its results like a state."""

        def placed(state, batch):
            result = function(state, batch)
            return jax.lax.with_sharding_constraint(result, self._placement(result))

        return jax.jit(placed, in_shardings=(None, self._by_rows), donate_argnums=(0,) if donate_state else ())

    def behind_seeds(self) -> "Parallel":
        """Returns a `Parallel` for states and batches with a leading axis of seeds."""
        return dataclasses.replace(self, row_axis=1)


@dataclasses.dataclass(frozen=True)
class Pmap(Parallel):
    """The devices of a run under `pmap`. A step is one program per device, over its own rows, and sums over AXIS."""

    axis_name: ClassVar[str | None] = AXIS

    def compile(self, function: Callable, *, donate_state: bool = False) -> jax.stages.Wrapped:
        # As `jax.pmap` does, but with states and batches that are placed as for `jit`. The results are summed over
        # AXIS, so they are the same on all devices.
        specs = {"in_specs": (PartitionSpec(), PartitionSpec(AXIS)), "out_specs": PartitionSpec()}
        mapped = jax.shard_map(function, mesh=self.mesh, **specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=(0,) if donate_state else ())


def divide_cpu(count: int) -> None:
    """Makes JAX treat a CPU as `count` devices, unless the number of CPU devices was set before.

    Must be called before the first use of a device.
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
    """Returns the devices that `config.parallel` specifies.

    `rows_multiple_of` must divide among the devices, the accumulation steps and the chunks of the loss.
    """
    # Rows are divided among the processes in order of the process index, which the device ids need not follow.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    counts = collections.Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"process {index}: {count}" for index, count in counts.items())
        raise UserError(f"the processes have different numbers of devices ({listed}); they must have the same")
    least = len(devices) if len(counts) > 1 else 1
    if config.num_devices and not least <= config.num_devices <= len(devices):
        kind = devices[0].device_kind
        more = kind == "cpu" and config.num_devices > len(devices)
        divide = "; config.parallel.cpu_devices divides a CPU into more" if more else ""
        raise UserError(
            f"config.parallel.num_devices is {config.num_devices}; there are {len(devices)} ({kind}); 0 takes all, as "
            f"several processes must{divide}"
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
