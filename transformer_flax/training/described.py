"""What the run in a working directory is, checked: whoever wrote it need not be trusted, nor be of this version."""

import dataclasses
import inspect
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.data.pairs import MADE
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError
from transformer_flax.model.kinds import Config, find_kind
from transformer_flax.training.fields import TYPES
from transformer_flax.training.prepare import model_config
from transformer_flax.training.workdir import Workdir

# What config.data must say besides, by its source.
TSV = {"label_column": int, "text_column": int, "held_out": float, "seed": int}
MADE_TEXT = dict.fromkeys(("seed", "longest_trained", "longest_tested"), int)


def load_described(place: Workdir) -> tuple[ConfigDict, Tokenizer, Config]:
    """What a run is, checked: its config, its tokenizer and its model, without parameters.

    Raises:
      UserError: there is no run, or one that cannot be read.
    """
    config, tokenizer = place.load_config(), place.load_tokenizer()
    _require_fields(config, place)
    return config, tokenizer, model_config(config, tokenizer.vocab_size)


def _require_fields(config: ConfigDict, place: Workdir) -> None:
    """Refuses the config of another version or of another type, rather than to guess what it would have said."""
    arguments = inspect.signature(Translator).parameters.values()
    needed: dict[str, dict[str, Any]] = {
        "": {"name": str, "seed": int, "ema_decay": float},
        "eval": {"final_average": int},
        "checkpoint": {"every": int},
        "data": {
            **dict.fromkeys(("source", "name", "path", "source_language", "target_language", "cache_dir"), str),
            "num_pairs": int,
        },
        "decode": {a.name: a.annotation for a in arguments if a.kind is a.KEYWORD_ONLY and a.default is a.empty},
        "model": {"kind": str},
    }
    data, model = (config.get(name, {}) for name in ("data", "model"))
    if isinstance(data, (ConfigDict, dict)):
        source = data.get("source")
        needed["data"] |= TSV if source == "tsv" else MADE_TEXT if source in [*MADE] else {}  # a list takes anything
    kind = model.get("kind", "") if isinstance(model, (ConfigDict, dict)) else ""
    if isinstance(kind, str) and kind:
        try:
            fields = dataclasses.fields(find_kind(kind).config)
        except UserError as error:
            raise UserError(f"{place.config_file}: {error}") from error
        needed["model"] |= {field.name: field.type for field in fields}
        del needed["model"]["vocab_size"]  # which the tokenizer knows
    for section, fields in needed.items():
        there: Any = config.get(section, {}) if section else config
        where = ".".join(filter(None, ("config", section)))
        if not isinstance(there, (ConfigDict, dict)):
            raise UserError(f"{place.config_file}: {where} is {there!r}; it must be an object of fields")
        for field, wanted in fields.items():
            if field not in there:
                raise UserError(
                    f"{place.config_file} lacks {where}.{field}, as a run of another version of this package; add it "
                    "there (configs/ says what it means)"
                )
            value = there[field]
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise UserError(f"{place.config_file}: {where}.{field} is {value!r}; it must be {TYPES[wanted]}")
        if section in ("decode", "model") and (unknown := sorted(there.keys() - fields.keys())):
            raise UserError(
                f"{place.config_file} has {where}.{unknown[0]}, which this version of the package does not know, and "
                "what it does to the model neither; use the version that made the run"
            )
    for name in ("eval.final_average", "checkpoint.every"):
        section, field = name.split(".")
        if config[section][field] < 1:
            raise UserError(f"{place.config_file}: config.{name} is {config[section][field]}; it must be at least 1")
