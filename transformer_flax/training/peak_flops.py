"""The peak FLOPs per second of a device: from its data sheet, and measured with a large matrix product."""

import functools
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Peak(NamedTuple):
    """FLOPs per second of dense matrix products, by the dtype of the operands."""

    device_kind: str  # how the device's name in JAX begins
    bfloat16: float
    float32: float  # XLA multiplies with default precision: TF32 on a GPU, bfloat16 on a TPU


PEAKS = {
    "A100": Peak("NVIDIA A100", 312e12, 156e12),
    "H100": Peak("NVIDIA H100 80GB HBM3", 989e12, 494e12),
    "H200": Peak("NVIDIA H200", 989e12, 494e12),
    "TPUv4": Peak("TPU v4", 275e12, 275e12),
    "TPUv5e": Peak("TPU v5 lite", 197e12, 197e12),
    "TPUv5p": Peak("TPU v5", 459e12, 459e12),
    "TPUv6e": Peak("TPU v6 lite", 918e12, 918e12),
}


def data_sheet_flops(device_kind: str, dtype: str) -> float | None:
    """Returns the data sheet's peak, or None for an unknown device. Matrix products reach only a part of the peak."""
    # "TPU v5 lite" also begins with "TPU v5", so it comes first in the table.
    return next((getattr(peak, dtype) for peak in PEAKS.values() if device_kind.startswith(peak.device_kind)), None)


def large_product(dtype: str, repeats: int) -> tuple[Callable[[], Any], int]:
    """Returns a function that computes a large matrix product `repeats` times, and the FLOPs of one call."""
    import jax  # here, because the import takes seconds and --help needs only the table

    device = jax.local_devices()[0]
    size = 2048 if device.platform == "cpu" else 8192
    # Random, because a GPU multiplies a constant matrix faster: it needs less power.
    matrix = np.random.default_rng(0).standard_normal((size, size), np.float32)
    matrix = jax.device_put(matrix, device).astype(dtype)
    product = jax.jit(lambda x: x @ x)
    return lambda: [product(matrix) for _ in range(repeats)][-1], 2 * size**3 * repeats


@functools.cache
def measured_flops(dtype: str) -> float:
    """Measures the FLOPs per second of a large matrix product, on one device or on all cores of a CPU.

    Other processes may take the cores for a moment, so the fastest of three products counts.
    """
    import jax

    product, flops = large_product(dtype, repeats=1 if jax.default_backend() == "cpu" else 3)
    jax.block_until_ready(product())  # compiles
    return flops / min(timeit.repeat(lambda: jax.block_until_ready(product()), number=1, repeat=3))
