"""The highest rate of a device: of its data sheet, and of a large matrix product."""

import functools
import time
from collections.abc import Callable
from typing import Any

# FLOPs a second of dense products, by the beginning of the device's name in JAX and the type of the operands. In
# float32, XLA multiplies with default precision: TF32 on a GPU, bfloat16 on a TPU.
PEAKS = {
    "NVIDIA A100": {"bfloat16": 312e12, "float32": 156e12},
    "NVIDIA H100 80GB HBM3": {"bfloat16": 989e12, "float32": 494e12},
    "NVIDIA H200": {"bfloat16": 989e12, "float32": 494e12},
    "TPU v4": {"bfloat16": 275e12, "float32": 275e12},
    "TPU v5 lite": {"bfloat16": 197e12, "float32": 197e12},
    "TPU v5": {"bfloat16": 459e12, "float32": 459e12},
    "TPU v6 lite": {"bfloat16": 918e12, "float32": 918e12},
}


def data_sheet_flops(device_kind: str, dtype: str) -> float | None:
    """Returns the peak of a device, of which products reach a part; None for an unknown one."""
    # "TPU v5 lite" begins with "TPU v5", too, and comes first.
    return next((peaks[dtype] for name, peaks in PEAKS.items() if device_kind.startswith(name)), None)


def large_product(dtype: str, repeats: int) -> tuple[Callable[[], Any], int]:
    """A large matrix product on a device, made `repeats` times a call, and the floating-point operations of a call."""
    import jax  # here, as it takes seconds: the table is for --help, too

    device = jax.local_devices()[0]
    size = 2048 if device.platform == "cpu" else 8192
    matrix = jax.device_put(jax.numpy.full((size, size), 1 / size, dtype), device)
    product = jax.jit(lambda x: x @ x)
    return lambda: [product(matrix) for _ in range(repeats)][-1], 2 * size**3 * repeats


@functools.cache
def measured_flops(dtype: str) -> float:
    """Floating-point operations a second of a large matrix product, measured: of one device, or of all cores."""
    import jax

    product, flops = large_product(dtype, repeats=1 if jax.default_backend() == "cpu" else 3)
    jax.block_until_ready(product())
    started = time.perf_counter()
    jax.block_until_ready(product())
    return flops / (time.perf_counter() - started)
