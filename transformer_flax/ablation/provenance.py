"""What a sweep was made with, as its results tell."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.training.fields import flatten

LIBRARIES = ("jax", "flax", "optax", "numpy", "tokenizers", "sacrebleu")
ROOT = pathlib.Path(__file__).parents[2]


def head(base: ConfigDict, command: str, hardware: str) -> dict[str, Any]:
    """The first line of results: what was swept, by which command, with what, on what."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "config": flatten(base.to_dict()),
        "name": base.name,
        "command": command,
        "versions": versions,
        "hardware": hardware,
        "commit": _commit(),
    }


def hardware() -> str:
    """The GPUs that are seen, or else the cores, without taking any."""
    if not os.environ.get("JAX_PLATFORMS", "").startswith("cpu") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
        if gpus:
            return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return f"{os.cpu_count()} x {model or platform.machine()}"


def _commit() -> str:
    """That of the clone, with a plus where it has been changed since; empty if it is none."""
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    return f"{commit}+" if commit and _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]) else commit


def _output(command: Sequence[str]) -> str:
    """What a program prints; empty where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
