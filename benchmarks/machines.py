"""Absent accelerators to compile for: their data sheets, and their descriptions for XLA."""

import contextlib
import dataclasses
from unittest import mock

from transformer_flax.training.peak_flops import data_sheet_flops

# Properties of both H100 and H200, from NVIDIA's tables of compute capability 9.0.
HOPPER = """
gpu_device_info {{
  name: "{name}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 ecc_enabled: true
  device_memory_size: {memory} memory_bandwidth: {bandwidth} l2_cache_size: 52428800 device_address_bits: 64
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device by its data sheet. Sizes are in bytes, rates in bytes or FLOPs a second."""

    name: str
    bandwidth: float  # of its memory
    link: float  # to its neighbours, in one direction
    memory: int
    clock: float = 0.0  # of a TPU, in whose cycles XLA estimates its kernels

    def flops(self, kind: str) -> float:
        """Returns the peak rate of products of operands of a type."""
        return data_sheet_flops(self.name, "bfloat16" if kind == "bf16" else "float32")

    @property
    def description(self) -> str:
        """The GPU as XLA's `GpuTargetConfigProto`, in text."""
        return HOPPER.format(name=self.name, memory=self.memory, bandwidth=int(self.bandwidth))


MACHINES = {
    "h100": Machine("NVIDIA H100 80GB HBM3", 3.352e12, 450e9, 84_942_979_072),
    "h200": Machine("NVIDIA H200", 4.8e12, 450e9, 151_397_597_184),
    "v5e": Machine("TPU v5 lite", 819e9, 50e9, 17_179_869_184, clock=1.5e9),
}


def cudnn_is_there() -> contextlib.AbstractContextManager:
    """Returns a context in which checks of the GPU's cuDNN answer as on a Hopper."""
    asked = "jax._src.cudnn.fused_attention_stablehlo"
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch("transformer_flax.model.attention.has_cudnn", return_value=True))
    stack.enter_context(mock.patch(f"{asked}.check_cudnn_version", return_value=91200))
    stack.enter_context(mock.patch(f"{asked}.check_compute_capability", lambda least: float(least) <= 9.0))
    stack.enter_context(mock.patch(f"{asked}.is_cuda_compute_capability_equal", lambda version: version == "9.0"))
    return stack
