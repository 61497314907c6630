"""Models on the local devices, which share the sentences of a batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_flax.decoding.inputs import require_at_least

ROWS = "rows"


class OnDevices:
    """Models whose parameters are on every device; each device computes rows of its own, at its own pace.

    Args:
      params: of each model.
      num_devices: local devices, at most; 0: all.

    Raises:
      UserError: `num_devices` is negative.
    """

    def __init__(self, params: Sequence[Any], num_devices: int):
        require_at_least(0, num_devices=num_devices)
        devices = jax.local_devices()[: num_devices or None]
        self.num_devices, self._mesh = len(devices), Mesh(np.array(devices), (ROWS,))
        self._programs: list[tuple[_Program, int]] = []  # each with how often it had been traced before
        on_all = NamedSharding(self._mesh, PartitionSpec())
        self.params = jax.device_put(params, on_all) if self.num_devices > 1 else params

    @property
    def compilations(self) -> int:
        """The number of programs compiled for these models. Programs compiled before them do not count."""
        return sum(program.traced - before for program, before in self._programs)

    def _compile(self, function: Callable) -> Callable:
        """Compiles `function(params, *arrays)`, which computes each row by itself. Equal functions share programs."""
        program = _programs(function, self._mesh)
        self._programs.append((program, program.traced))
        return program


class _Program:
    """A function of rows, compiled for devices."""

    def __init__(self, function: Callable, mesh: Mesh):
        self.traced = 0

        def counted(params, *arrays):
            self.traced += 1  # executed only while tracing, once for each shape
            if mesh.size == 1:
                return function(params, *arrays)
            # Without check_vma, a loop may begin with values that are the same on all devices.
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
