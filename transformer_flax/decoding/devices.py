"""Models on the local devices, which share the sentences of a batch."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_flax.decoding.inputs import require_at_least

ROWS = "rows"


class OnDevices:
    """Models whose parameters are on every device; each device computes rows of its own, at its own pace.

    Args:
      models: Linen modules.
      params: of each model. May be replaced at any time without recompiling; None until they are known.
      num_devices: local devices, at most; 0: all, but only one CPU, as JAX's CPU devices share the cores.

    Raises:
      UserError: `num_devices` is negative.
    """

    def __init__(self, models: Sequence[nn.Module], params: Sequence[Any] | None, num_devices: int):
        require_at_least(0, num_devices=num_devices)
        devices = jax.local_devices()
        devices = devices[: num_devices or (1 if devices[0].platform == "cpu" else None)]
        self.num_devices, self._mesh = len(devices), Mesh(np.array(devices), (ROWS,))
        self.models, self.compilations = list(models), 0
        self.params = params

    @property
    def params(self) -> Any:
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        several = self.num_devices > 1
        self._params = jax.device_put(params, NamedSharding(self._mesh, PartitionSpec())) if several else params

    def _compile(self, function: Callable) -> Callable:
        """Compiles `function(params, *arrays)`, which maps rows to rows, each for itself."""

        def counted(params, *arrays):
            self.compilations += 1  # executed only while tracing, once for each shape
            if self.num_devices == 1:
                return function(params, *arrays)
            # Without check_vma, a loop may begin with values that are the same on all devices.
            spread = jax.shard_map(
                lambda params, arrays: function(params, *arrays),
                mesh=self._mesh,
                in_specs=(PartitionSpec(), PartitionSpec(ROWS)),
                out_specs=PartitionSpec(ROWS),
                check_vma=False,
            )
            return spread(params, arrays)

        return jax.jit(counted)
