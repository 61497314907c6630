"""The fields of a config, section by section, with their types; `configs/base.py` explains each."""

import dataclasses
from typing import Any, cast

from ml_collections import ConfigDict

from transformer_flax.errors import UserError, did_you_mean
from transformer_flax.word_vectors.config import VectorConfig

TYPES: dict[Any, str] = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Fields with a default are read for some sources only, so a config may lack them."""

    source: str
    num_pairs: int
    source_language: str
    target_language: str
    tokenizer: str
    tokenizer_file: str
    vocab_size: int
    tokenizer_sample: int
    max_length: int
    max_length_ratio: float
    drop_duplicates: bool
    tokens_per_batch: int
    batching: str
    num_buckets: int
    rows_multiple_of: int
    seed: int
    cache_dir: str
    name: str = ""
    path: str = ""
    longest_trained: int = 6
    longest_tested: int = 6
    label_column: int = 0
    text_column: int = 1
    held_out: float = 0.0


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    factor: float
    warmup_steps: int
    b1: float
    b2: float
    eps: float
    clip_norm: float


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    mode: str
    num_devices: int
    shard_params: bool


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    beam_size: int
    length_penalty: str
    alpha: float
    min_length: int
    max_extra_length: int
    max_input_length: int
    batch_size: int
    window: int


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int
    sentences: int
    average: int
    final_average: int
    test: bool
    patience: int = 0


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int


@dataclasses.dataclass(frozen=True)
class LogConfig:
    every: int


@dataclasses.dataclass(frozen=True)
class RunConfig:
    name: str
    seed: int
    embedding_init: str
    steps: int
    accumulation_steps: int
    loss_chunks: int
    label_smoothing: float
    ema_decay: float
    max_skipped: int
    on_write_failure: str
    deterministic: bool
    model: ConfigDict  # the dataclass of its kind checks it
    data: DataConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    decode: DecodeConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    log: LogConfig


@dataclasses.dataclass(frozen=True)
class VectorRunConfig:
    """The fields of configs/vectors.py."""

    name: str
    seed: int
    vectors: VectorConfig
    data: DataConfig


def require_fields(config: ConfigDict) -> None:
    """Checks which fields a config has, and their types.

    Raises:
      UserError: a field is unknown, missing or of another type.
    """
    _require_fields(config, VectorRunConfig if "vectors" in config else RunConfig, "config")


def _require_fields(section: ConfigDict, dataclass: type, where: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(dataclass)}
    for name in section:
        if name not in fields:
            hint = did_you_mean(name, fields) or "configs/ lists the fields there are"
            raise UserError(f"{where}.{name} is an unknown field; {hint}")
    for name, field in fields.items():
        if name not in section:
            if field.default is dataclasses.MISSING:
                raise UserError(f"{where}.{name} is missing; configs/ says what it means")
            continue
        value, wanted = section[name], cast(Any, field.type)  # a dataclass where it is a section
        is_section = wanted not in TYPES
        if not isinstance(value, ConfigDict) if is_section else not _is_of(wanted, value):
            must = "a section of fields, a ConfigDict" if is_section else TYPES[wanted]
            raise UserError(f"{where}.{name} is {value!r}; it must be {must}")
        if is_section and wanted is not ConfigDict:
            _require_fields(value, wanted, f"{where}.{name}")


def _is_of(wanted: Any, value: Any) -> bool:
    return type(value) is wanted or (wanted is float and type(value) is int)
