"""Peak rates of accelerators, from their makers' data sheets."""

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
