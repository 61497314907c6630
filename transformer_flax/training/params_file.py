"""Parameters as one file of safetensors, which other programs read too."""

import pathlib
import zlib
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_flax.errors import UserError
from transformer_flax.files import write_whole


def save_params(file: pathlib.Path, params: Any, origin: str) -> None:
    """Writes parameters in float32, named as in "encoder_0.self_attention.query.kernel".

    Args:
      file: to write.
      params: the parameters.
      origin: says which checkpoints they are from; the file's metadata hold it, and a checksum.

    Raises:
      OSError: the file cannot be written.
    """
    arrays = _arrays(params)
    metadata = {"parameters": origin, "crc32": str(_checksum(arrays))}
    write_whole(file, safetensors.numpy.save(arrays, metadata))


def load_params_file(file: pathlib.Path, like: Any) -> tuple[Any, str]:
    """Reads what `save_params` wrote: the parameters, and which checkpoints they are from.

    Args:
      file: of safetensors.
      like: a tree of the shapes of the model's parameters.

    Raises:
      UserError: the file is damaged or of another model.
    """
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            metadata = opened.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {error}") from error
    known: dict[str, Any] = flatten_dict(like, sep=".")
    for name in sorted(arrays.keys() | known.keys()):
        theirs, ours = (str(tree[name].shape) if name in tree else "missing" for tree in (arrays, known))
        if theirs != ours:
            raise UserError(f"{file} is of another model: {name} is {theirs} there, and {ours} in the config beside it")
    if metadata.get("crc32", str(_checksum(arrays))) != str(_checksum(arrays)):
        raise UserError(f"{file} is damaged: its parameters do not match their checksum; export them once more")
    return unflatten_dict(arrays, sep="."), metadata.get("parameters", f"the parameters of {file}")


def checksum(params: Any) -> int:
    """A CRC-32 of parameters and their names."""
    return _checksum(_arrays(params))


def _arrays(params: Any) -> dict[str, np.ndarray]:
    flat: dict[str, Any] = flatten_dict(jax.device_get(params), sep=".")
    return {name: np.ascontiguousarray(array, np.float32) for name, array in flat.items()}


def _checksum(arrays: dict[str, np.ndarray]) -> int:
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(arrays[name].tobytes(), zlib.crc32(name.encode(), checksum))
    return checksum
