"""Models on the local devices. Each device computes a part of the batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_flax.decoding.search import combine
from transformer_flax.errors import UserError

ROWS = "rows"


class OnDevices:
    """Models whose parameters are on every device. Each device computes its own rows, without waiting for the others.

    `num_devices` is the maximum number of local devices; 0 stands for all.
    """

    def __init__(self, params: Sequence[Any], num_devices: int):
        self._mesh = _mesh(num_devices)
        self.num_devices = self._mesh.size
        self._traced: list[tuple[list[None], int]] = []  # (a program's compilations, number of them before)
        self.params = on_devices(params, num_devices)

    @property
    def compilations(self) -> int:
        """The number of programs compiled for these models. Programs that were compiled earlier do not count."""
        return sum(len(traced) - before for traced, before in self._traced)

    def _compile(self, function: Callable) -> Callable:
        """Compiles `function(params, *arrays)`, whose rows must be independent. Equal functions share programs."""
        program, traced = _program(function, self._mesh)
        self._traced.append((traced, len(traced)))
        return program


def on_devices(params: Any, num_devices: int) -> Any:
    """Returns parameters on every device. Those that are there already are not copied."""
    mesh = _mesh(num_devices)
    return jax.device_put(params, NamedSharding(mesh, PartitionSpec())) if mesh.size > 1 else params


def _mesh(num_devices: int) -> Mesh:
    if num_devices < 0:
        raise UserError(f"num_devices is {num_devices}; it must be at least 0, which stands for all")
    return Mesh(np.array(jax.local_devices()[: num_devices or None]), (ROWS,))


@functools.lru_cache(maxsize=16)
def _program(function: Callable, mesh: Mesh) -> tuple[Callable, list[None]]:
    """Compiles a function of rows for the devices of a mesh. The list gets an entry for each shape that is compiled."""
    traced: list[None] = []

    def counted(params, *arrays):
        traced.append(None)  # executed only during tracing
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

    return jax.jit(counted), traced


@dataclasses.dataclass(frozen=True)
class LogProbs:
    """The log of the models' mean probabilities for the sides of a batch: [rows, ...] -> [rows, ..., V]."""

    models: tuple[nn.Module, ...]

    def __call__(self, params: Sequence[Any], *sides: jax.Array) -> jax.Array:
        logits = [model.apply({"params": own}, *sides) for model, own in zip(self.models, params, strict=True)]
        return jax.nn.log_softmax(combine(logits))
