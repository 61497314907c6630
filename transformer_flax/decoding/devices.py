"""Models on the local devices. Each device computes a part of the batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_flax.decoding.inputs import require_at_least

ROWS = "rows"


class OnDevices:
    """Models whose parameters are on every device. Each device computes its own rows, without waiting for the others.

    Args:
      params: each model's parameters.
      num_devices: maximum number of local devices; 0: all.

    Raises:
      UserError: `num_devices` is negative.
    """

    def __init__(self, params: Sequence[Any], num_devices: int):
        require_at_least(0, num_devices=num_devices)
        devices = jax.local_devices()[: num_devices or None]
        self.num_devices, self._mesh = len(devices), Mesh(np.array(devices), (ROWS,))
        self._programs: list[tuple[_Program, int]] = []  # (program, number of its traces before)
        on_all = NamedSharding(self._mesh, PartitionSpec())
        self.params = jax.device_put(params, on_all) if self.num_devices > 1 else params

    @property
    def compilations(self) -> int:
        """The number of programs compiled for these models. Programs that were compiled earlier do not count."""
        return sum(program.traced - before for program, before in self._programs)

    def _compile(self, function: Callable) -> Callable:
        """Compiles `function(params, *arrays)`, whose rows must be independent. Equal functions share programs."""
        program = _programs(function, self._mesh)
        self._programs.append((program, program.traced))
        return program


class _Program:
    """A function of rows, compiled for the devices of a mesh."""

    def __init__(self, function: Callable, mesh: Mesh):
        self.traced = 0

        def counted(params, *arrays):
            self.traced += 1  # executed only during tracing, once for each shape
            if mesh.size == 1:
                return function(params, *arrays)
            # With check_vma=False, a loop may begin with values that are the same on all devices.
            spread = jax.shard_map(
                lambda params, arrays: function(params, *arrays),
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec(ROWS)),
                out_specs=PartitionSpec(ROWS),
                check_vma=False,
            )
            return spread(params, arrays)

        self._compiled = jax.jit(counted)

    def __call__(self, params: Any, *arrays: Any) -> Any:
        return self._compiled(params, *arrays)


_programs = functools.lru_cache(maxsize=16)(_Program)
