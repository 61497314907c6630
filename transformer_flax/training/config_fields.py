"""The fields of a config, section by section, with their types and ranges. `configs/base.py` explains each field.

A field's default is what runs did before the field existed: a saved config that lacks the field has this value. So a
new field needs a default, and no field is ever removed from these classes or given another meaning.
"""

import dataclasses
import itertools
import logging
import os
from collections.abc import Container, Mapping
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.checked_fields import TYPES, at_least, checked, one_of, positive, rate, requirement, size
from transformer_flax.decoding.settings import DecodeConfig
from transformer_flax.errors import UserError, did_you_mean
from transformer_flax.model.config import TransformerConfig

logger = logging.getLogger(__name__)

# Names, paths, and settings of the machine. None of them changes what is learned or measured, beyond random variation.
CHANGES_NOTHING = (
    "name",
    "loss_chunks",
    "max_skipped",
    "on_write_failure",
    "model.remat",
    "decode.batch_size",
    "decode.window",
    "data.path",
    "data.tokenizer_file",
    "data.cache_dir",
    "log.",
    "parallel.",
)
AUTO = "auto"  # config.model.dtype: use the dtype of the run in the working directory, or one that suits the device


def random_seed() -> Any:
    return size(least=0, most=2**32 - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: str
    num_pairs: int
    source_language: str
    target_language: str
    tokenizer: str
    tokenizer_file: str
    vocab_size: int
    tokenizer_sample: int = at_least(1)
    max_length: int = at_least(2)  # a token and the end symbol
    max_length_ratio: float = checked(lambda v: v == 0 or v >= 1, "0, or at least 1")
    drop_duplicates: bool
    tokens_per_batch: int = size()
    batching: str = one_of(("bucketed", "packed"))
    num_buckets: int = at_least(1)
    rows_multiple_of: int = at_least(1)
    seed: int = random_seed()
    cache_dir: str
    name: str = ""
    path: str = ""
    longest_trained: int = 6
    longest_tested: int = 6
    label_column: int = 0
    text_column: int = 1
    held_out: float = rate(default=0.0)
    length_multiple_of: int = at_least(1, default=1)
    lowercase: bool = False
    tokenized: bool = False
    bpe_dropout: float = rate(default=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    factor: float = positive()
    warmup_steps: int = at_least(1)
    b1: float = rate()
    b2: float = rate()
    eps: float = positive()
    clip_norm: float = at_least(0)
    name: str = one_of(("adam", "muon", "schedule_free"), default="adam")
    cooldown: float = rate(default=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    mode: str = one_of(("jit", "pmap"))
    num_devices: int = at_least(0)
    shard_params: bool
    cpu_devices: int = at_least(1, default=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int = at_least(0)
    sentences: int = at_least(0)
    average: int = at_least(1)
    final_average: int = at_least(1)
    test: bool
    final_sentences: int = at_least(0, default=0)
    patience: int = at_least(0, default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = at_least(1)
    keep: int = at_least(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: int = at_least(1)
    wandb: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    seed: int = random_seed()
    steps: int = at_least(1)
    accumulation_steps: int = at_least(1)
    loss_chunks: int = at_least(1)
    label_smoothing: float = rate()
    ema_decay: float = rate()
    max_skipped: int = at_least(1)
    on_write_failure: str = one_of(("stop", "go on"))
    deterministic: bool
    model: ConfigDict  # checked by the dataclass of the model's kind
    data: DataConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    decode: DecodeConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    embedding_init: str = ""
    init_from: str = ""
    train_only: str = ""
    r_drop: float = at_least(0, default=0.0)


def vector_run_config() -> type:
    """Returns a dataclass with the fields of configs/vectors.py."""
    from transformer_flax.relatives.word_vectors import VectorConfig  # here: it imports JAX, which takes seconds

    fields = [("name", str), ("seed", int, random_seed()), ("vectors", VectorConfig), ("data", DataConfig)]
    return dataclasses.make_dataclass("VectorRunConfig", fields, frozen=True)


def _fields_of(config: Container[str]) -> Any:
    """Returns the dataclass of a config, or of the names of a config's sections."""
    return vector_run_config() if "vectors" in config else RunConfig


def require_fields(section: ConfigDict, dataclass: Any = None, where: str = "config", *, saved: bool = False) -> None:
    """Checks the names, the types and the ranges of a config's fields, each field by itself.

    Unknown fields of a `saved` run's config are ignored with a warning, except those of config.decode, without which
    the search would not be the same. `make_config` checks the fields of config.model.
    """
    fields = {field.name: field for field in dataclasses.fields(dataclass or _fields_of(section))}
    for name in section:
        if name in fields:
            continue
        if saved and where != "config.decode":
            logger.warning("this version does not know %s.%s of the run's config, and ignores it", where, name)
        else:
            hint = did_you_mean(name, fields) or "configs/ lists the fields there are"
            raise UserError(f"{where}.{name} is an unknown field; {hint}")
    for name, field in fields.items():
        value: Any = section.get(name, field.default)
        if value is dataclasses.MISSING:
            raise UserError(f"{where}.{name} is missing; begin with a file of configs/, which has every field")
        if field.type in TYPES:
            must = requirement(field, value)
        else:
            must = None if isinstance(value, ConfigDict) else "a section of fields, a ConfigDict"
        if must:
            raise UserError(f"{where}.{name} is {value!r}; it must be {must}")
        if dataclasses.is_dataclass(field.type):
            require_fields(value, field.type, f"{where}.{name}", saved=saved)


def require_only(config: ConfigDict, values: Mapping[str, Any], where: str) -> None:
    """Checks fields that allow a single value under some condition.

    Args:
      values: the only allowed value of each field, by flat name; a field that the config lacks is not checked.
      where: the condition, as the message ends: "with several processes".
    """
    fields = flatten(config.to_dict())
    for name, only in values.items():
        if fields.get(name, only) != only:
            raise UserError(f"config.{name} is {fields[name]!r}; it must be {only!r} {where}")


def make_floats(config: ConfigDict) -> None:
    """Converts whole numbers in float fields, so that a dropout of 0 can be set to 0.1.

    Fields of models other than the Transformer, unless the Transformer has them too, are left as they are.
    """
    fields = _flat_fields(_fields_of(config)) | _flat_fields(TransformerConfig, "model.")
    for name, value in flatten(config.to_dict()).items():
        if type(value) is int and name in fields and fields[name].type is float:
            with config.ignore_type():
                config.update_from_flattened_dict({name: float(value)})


def complete(config: ConfigDict) -> ConfigDict:
    """Returns a copy of a config: missing fields get their defaults, if any, and field references are resolved."""
    config = config.copy_and_resolve_references()
    add_fields(config)
    return config


def add_fields(config: ConfigDict) -> None:
    """Adds the fields of `added_fields` to a config."""
    added = added_fields(flatten(config.to_dict()))
    with config.unlocked():
        for section in {_section(name) for name in added} - {"", *config}:
            config[section] = ConfigDict()
        config.update_from_flattened_dict(added)


def added_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a saved, flat config lacks because it is older than the fields, with their defaults.

    A section that the config lacks is left out, unless all its fields have defaults.
    """
    # Imported here, because commands check their configs before JAX is loaded.
    import transformer_flax.relatives  # noqa: F401 (registers its kinds)
    from transformer_flax.model.registry import KINDS

    sections = {_section(name) for name in config} | {""}
    kind = KINDS.get(config.get("model.kind", "transformer"))
    fields = _flat_fields(_fields_of(sections)) | (_flat_fields(kind.config, "model.") if kind else {})
    defaults = {name: field.default for name, field in fields.items()} | {"model.kind": "transformer"}
    added = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
    incomplete = {_section(name) for name in defaults.keys() - added.keys()} - sections
    return {name: value for name, value in added.items() if name not in config and _section(name) not in incomplete}


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], free: tuple[str, ...]) -> list[str]:
    """Lists the differences between a saved and a current flat config, one per line. A missing field has its default.

    The fields in `free` may differ. An entry that ends in a dot frees all fields of its section.
    """
    theirs, ours = ({**added_fields(config), **config} for config in (theirs, ours))
    sections = tuple(each for each in free if each.endswith("."))
    for config, name in itertools.product((theirs, ours), ("init_from", "embedding_init")):
        if config.get(name):
            config[name] = os.path.abspath(config[name])  # a slash at the end changes nothing, for example
    return [
        f"config.{name}: {theirs.get(name)!r} there, {ours.get(name)!r} now"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name) and name not in free and not name.startswith(sections)
        if not (name == "model.dtype" and AUTO in (theirs.get(name), ours.get(name)))
        if not (name == "data.tokenizer" and ours.get("init_from"))  # a run has the tokenizer of its init_from
    ]


def needs_bfloat16(config: ConfigDict) -> bool:
    """Returns whether config.model.dtype "auto" means bfloat16 on any device: cuDNN's attention takes no other type."""
    return config.model.get("attention_implementation") == "cudnn"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a config's fields by their flag names: {"model": {"dropout": 0.1}} -> {"model.dropout": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _section(name: str) -> str:
    """Returns the section of a field, by flag names: "model.dropout" -> "model"; "" outside of any section."""
    return name.rpartition(".")[0]


def _flat_fields(dataclass: Any, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Returns the fields of a dataclass by their flag names, as `flatten` does with their values."""
    flat: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(dataclass):
        name = f"{prefix}{field.name}"
        flat |= _flat_fields(field.type, f"{name}.") if dataclasses.is_dataclass(field.type) else {name: field}
    return flat
