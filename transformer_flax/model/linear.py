"""Matrix products that suit the device and the type, and linear layers that sum gradients of biases in float32.

The gradient of a bias is a sum over all tokens of a batch. bfloat16 keeps 8 bits, so a sum in bfloat16 stops growing
when a token adds less than 0.4 % of the sum.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype


def _all_but_the_bias(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, *, dtype: Any) -> list[Any]:
    return [*promote_dtype(x, kernel, dtype=dtype), bias]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, precision: Any = None) -> jax.Array:
    """Computes x W, over the last axes of x and the first axes of W.

    It takes the first four arguments of `jax.lax.dot_general`, which it replaces in `Dense`. It has no forward-mode
    derivative (`jax.jvp`), so no model has one.

    The gradient of W is written as x^T dy. On a CPU, x or dy is first copied in transposed order. Otherwise XLA would
    transpose dy element by element, draw dy's dropout again, and multiply at a fifth of the usual rate. The narrower of
    x and dy is copied, because a wide copy takes longer than the product.
    """
    return jax.lax.dot_general(x, kernel, dimension_numbers, precision)


def _forward(x, kernel, dimension_numbers, precision):
    # Not `product`, as remat="products" knows the products that it keeps by their primitive.
    return jax.lax.dot_general(x, kernel, dimension_numbers, precision), (x, kernel)


def _backward(dimension_numbers, precision, residuals, gradient):
    x, kernel = residuals
    inputs = math.prod(kernel.shape[: len(dimension_numbers[0][0])])
    flat_x, matrix = x.reshape(-1, inputs), kernel.reshape(inputs, -1)
    gradient = gradient.reshape(-1, matrix.shape[1])
    dot, copy = functools.partial(jax.lax.dot, precision=precision), jax.lax.optimization_barrier

    def of_kernel_on_cpu(x, y):
        if x.shape[1] > y.shape[1]:
            return of_kernel_on_cpu(y, x).T
        x, y = copy((x, y))
        return copy(dot(copy(x.T), y))

    kernel_gradient = jax.lax.platform_dependent(
        flat_x, gradient, cpu=of_kernel_on_cpu, default=lambda x, y: dot(x.T, y)
    )
    return dot(gradient, matrix.T).reshape(x.shape), kernel_gradient.reshape(kernel.shape)


product.defvjp(_forward, _backward)


def wide_einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` of two arrays in float32, so that the sums are not rounded to a narrower type.

    The gradient has the result's type, float32, and JAX would multiply it in float32. On a GPU, this has half the rate
    of bfloat16. Here the gradient is first rounded to the operands' type. On a TPU it is not: a TPU rounds inside the
    product, so rounding first would gain nothing.
    """
    if x.dtype == y.dtype == jnp.float32:  # forward-mode differentiation works here, unlike in `product`
        return jnp.einsum(equation, x, y)
    return _wide_einsum(equation, x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide_einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _wide_forward(equation, x, y):
    return _wide_einsum(equation, x, y), (x, y)


def _wide_backward(equation, operands, gradient):
    def transposed(gradient, x, y, result):
        multiply = functools.partial(jnp.einsum, equation, preferred_element_type=result)
        gradient = gradient.astype(result)
        [of_x] = jax.linear_transpose(lambda x: multiply(x, y), x)(gradient)
        [of_y] = jax.linear_transpose(lambda y: multiply(x, y), y)(gradient)
        return of_x, of_y

    narrow, wide = (functools.partial(transposed, result=result) for result in (operands[0].dtype, jnp.float32))
    return jax.lax.platform_dependent(gradient, *operands, tpu=wide, default=narrow)


_wide_einsum.defvjp(_wide_forward, _wide_backward)


def product_of_few_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes the matrix products x y of a decoding step, K rows: [B, H, K, D], [B, H, D, M] -> float32 [B, H, K, M].

    On a CPU, several rows use sums of products. A matrix product of a few rows would first repack all of y, which takes
    several times as long (docs/log.md, "Following a beam's ancestors"). A single row uses the product of a vector and a
    matrix, which repacks nothing and is several times as fast as the sums. Other devices use matrix products, because
    the sums would write y in float32.
    """

    def multiply(x, y):
        return jnp.einsum("bhkd,bhdm->bhkm", x.astype(y.dtype), y, preferred_element_type=jnp.float32)

    def sum_products(x, y):
        return jnp.sum(x[..., None].astype(jnp.float32) * y[:, :, None], axis=-2)  # [B, H, K, D, M] -> [B, H, K, M]

    return multiply(x, y) if x.shape[2] == 1 else jax.lax.platform_dependent(x, y, cpu=sum_products, default=multiply)


class Dense(nn.DenseGeneral):
    """A linear layer x W + b, over the last axes of x, in `dtype`; b is added in float32."""

    promote_dtype: Any = _all_but_the_bias
    dot_general: Any = product

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return super().__call__(inputs).astype(self.dtype)


class Conv(nn.Conv):
    """A convolution in `dtype`; its bias is added in float32."""

    promote_dtype: Any = _all_but_the_bias

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return super().__call__(inputs).astype(self.dtype)


def xavier(gain: float = 1.0) -> nn.initializers.Initializer:
    """Returns Xavier's initializer of a matrix, uniform as in Glorot and Bengio (2010), times `gain`."""
    return nn.initializers.variance_scaling(gain**2, "fan_avg", "uniform")
