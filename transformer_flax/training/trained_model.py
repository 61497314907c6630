"""Loads a trained model from a run's checkpoints, or from an exported folder, which has one safetensors file."""

import dataclasses
import os
import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from transformer_flax.data.classes import Classes
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.files import write_whole
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.registry import make_config, make_model, param_shapes
from transformer_flax.training.averaging import choose, mean
from transformer_flax.training.checkpoint_files import UnreadableError, load_params, saved_steps
from transformer_flax.training.config_fields import require_fields
from transformer_flax.training.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model with everything that is needed to use it."""

    config: ConfigDict
    tokenizer: Tokenizer
    model: nn.Module
    params: Any  # `load_model` returns them on the host, `restore` on the device
    params_from: str  # which checkpoints `params` are from
    fingerprints: dict[str, str]  # the fingerprints of the run's data, by name
    classes: Classes | None = None  # None for a model that translates


def parse_name(name: str) -> tuple[str, list[int] | None]:
    """Splits DIRECTORY@STEP,STEP,... into the directory and the steps. None: a name without steps."""
    directory, _, steps = name.rpartition("@")
    if directory and not pathlib.Path(name).is_dir() and re.fullmatch(r"\d+(,\d+)*", steps):
        return directory, [int(step) for step in steps.split(",")]
    return name, None


def load_model(
    workdir: str | os.PathLike[str], *, average: int | str | None = None, steps: int | Sequence[int] | None = None
) -> TrainedModel:
    """Loads the model of a run or of an exported folder. Nothing in the folder is executed or unpickled.

    `average` and `steps` say which checkpoints of a run to use (`choose` in `averaging`). Without them, they are those
    of the run's final evaluation.

    Raises:
      UserError: the run or a checkpoint does not exist or cannot be read.
    """
    place = RunDirectory(workdir)
    config, tokenizer, model = load_setup(place)
    like = param_shapes(model)
    if place.params_file.exists():
        if average is not None or steps is not None:
            raise UserError(f"{workdir} is an exported model with one set of parameters: name no average and no steps")
        params, params_from = load_params_file(place.params_file, like)
    else:
        params, params_from = _load_chosen(place, config, like, average=average, steps=steps)
    fingerprints, classes = place.load_fingerprints(), place.load_classes()
    if jax.default_backend() == "cpu":  # float32 was faster there (docs/training.md)
        model = model.changed(dtype="float32", attention_implementation="plain")
    return TrainedModel(config, tokenizer, make_model(model), params, params_from, fingerprints, classes)


def _load_chosen(place: RunDirectory, config: ConfigDict, like: Any, **which: Any) -> tuple[Any, str]:
    """Returns the parameters that `choose` chooses, and what they are."""
    while True:
        choice = choose(place.checkpoints, config, **which)
        read = (load_params(place.checkpoints, step, like, seed=config.seed, kind=choice.kind) for step in choice.steps)
        try:
            return mean(read), str(choice)
        except UnreadableError as error:
            if error.step in saved_steps(place.checkpoints):
                raise  # else a run that is still training has deleted it since


def load_setup(place: RunDirectory) -> tuple[ConfigDict, Tokenizer, ModelConfig]:
    """Reads the config, the tokenizer and the model's config of a run, and checks them."""
    config, tokenizer = place.load_config(), place.load_tokenizer()
    try:
        require_fields(config, saved=True)
        model = make_config(tokenizer.vocab_size, config.model)
    except UserError as error:
        raise UserError(
            f"{place.config_file}: {error}; a run of a newer version needs that version, and a kind of your own "
            "must be registered first"
        ) from error
    return config, tokenizer, model


def save_params(file: pathlib.Path, params: Any, origin: str) -> None:
    """Writes parameters in float32, with names such as "encoder_0.self_attention.query.kernel".

    The file's metadata contain a checksum and `origin`: which checkpoints the parameters are from.
    """
    arrays = _arrays(params)
    metadata = {"parameters": origin, "crc32": str(checksum(arrays))}
    write_whole(file, safetensors.numpy.save(arrays, metadata))


def load_params_file(file: pathlib.Path, like: Any) -> tuple[Any, str]:
    """Reads a file of `save_params`: the parameters, and which checkpoints they are from.

    `like` is a tree of the shapes of the model's parameters.
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
    if metadata.get("crc32") not in (None, str(checksum(arrays))):
        raise UserError(f"{file} is damaged: its parameters do not match their checksum; export them once more")
    return unflatten_dict(arrays, sep="."), metadata.get("parameters", f"the parameters of {file}")


def checksum(params: Any) -> int:
    """Returns a CRC-32 of parameters, a tree or a flat dict, and their names."""
    crc = 0
    for name, array in sorted(_arrays(params).items()):
        crc = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), crc))
    return crc


def _arrays(params: Any) -> dict[str, np.ndarray]:
    flat: dict[str, Any] = flatten_dict(jax.device_get(params), sep=".")
    return {name: np.ascontiguousarray(array, np.float32) for name, array in flat.items()}
