"""Linear layers that sum the gradients of biases in float32, whatever type they compute in.

The gradient of a bias is a sum over all tokens of a batch. In bfloat16, which keeps 8 bits, such a sum stops growing
where a token adds less than 0.4 % of it.
"""

from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype


def _all_but_the_bias(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, *, dtype: Any) -> list[Any]:
    return [*promote_dtype(x, kernel, dtype=dtype), bias]


class Dense(nn.DenseGeneral):
    """x W + b, over the last axes of x, in `dtype`; b is added in float32."""

    promote_dtype: Any = _all_but_the_bias

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return super().__call__(inputs).astype(self.dtype)


class Conv(nn.Conv):
    """A convolution in `dtype`; its bias is added in float32."""

    promote_dtype: Any = _all_but_the_bias

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return super().__call__(inputs).astype(self.dtype)


def xavier(gain: float = 1.0) -> nn.initializers.Initializer:
    """Initial values of a matrix, uniform as in Glorot and Bengio (2010), times `gain`."""
    return nn.initializers.variance_scaling(gain**2, "fan_avg", "uniform")
