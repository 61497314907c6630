"""Starts a run from a trained model or from word vectors, and selects the parameters that are trained."""

import fnmatch
import pathlib
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from transformer_flax.data.normalisation import NORMALISATION
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.model.config import DEEP_STARTS, ModelConfig
from transformer_flax.relatives.vector_files import TOKENIZER, Vectors
from transformer_flax.training.config_fields import complete
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.trained_model import load_setup, parse_name

# Fields of a model that may differ, because they do not change what the parameters mean.
SAME_PARAMETERS = (
    "dropout",
    "attention_dropout",
    "ffn_dropout",
    "attention_implementation",
    "dtype",
    "remat",
    "scan_layers",
    "branch_init",
    "embedding_deviation",
)
EMBEDDINGS = ("embedding", "source_embedding", "target_embedding")  # names of word embeddings in models of all kinds


def complete_run(config: ConfigDict) -> ConfigDict:
    """Returns a run's config with the defaults of missing fields, and the tokenizer's fields of its `init_from`."""
    if "model" not in config:
        raise UserError(
            "the config has no section config.model; configs/vectors.py is for python -m transformer_flax.vectors train"
        )
    config = complete(config)
    if config.init_from:
        theirs, tokenizer, _ = initial_setup(config)
        config.data.update(tokenizer=theirs.data.tokenizer, vocab_size=tokenizer.vocab_size)
    return config


def require_alike(config: ConfigDict, model: ModelConfig) -> None:
    """Checks that a run's model matches the model it starts from, and that both normalise text in the same way."""
    their_config, _, theirs = initial_setup(config)
    if type(theirs) is not type(model):
        raise UserError(
            f"config.model.kind is {config.model.kind!r}, but the model of config.init_from is of another kind"
        )
    deciding, ours = _deciding(theirs), _deciding(model)
    flags = [
        f"--config.{'data' if name == 'vocab_size' else 'model'}.{name}={getattr(theirs, name)}"
        for name in deciding | ours
        if deciding.get(name) != ours.get(name)
    ]
    flags += [
        f"--config.data.{name}={their_config.data[name]}"
        for name in NORMALISATION
        if their_config.data[name] != config.data[name]
    ]
    if flags:
        raise UserError(f"the config is not that of config.init_from, {config.init_from}; set {' '.join(flags)}")


def _deciding(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields that decide what a model's parameters mean."""
    fields = {name: value for name, value in vars(model).items() if name not in SAME_PARAMETERS}
    if fields.get("start") not in DEEP_STARTS:  # the other starts only set initial values
        fields.pop("start", None)
    return fields


def initial_setup(config: ConfigDict) -> tuple[ConfigDict, Tokenizer, ModelConfig]:
    """Reads the config, the tokenizer and the model's config of the model that `config.init_from` names."""
    directory, _ = parse_name(config.init_from)
    try:
        return load_setup(RunDirectory(directory))
    except UserError as error:
        raise UserError(f"config.init_from={config.init_from}: {error}") from error


def load_embeddings(config: ConfigDict, tokenizer: Tokenizer | None) -> Vectors | None:
    """Loads the word vectors that `config.embedding_init` names. Returns None if the field is empty.

    The vectors must have the run's d_model. They must belong to its tokenizer, so they are refused if `tokenizer` is
    None: the config names no file, and a new tokenizer would be trained.
    """
    if not config.embedding_init:
        return None
    folder = pathlib.Path(config.embedding_init)
    vectors = Vectors.load(folder)
    if tokenizer is None or tokenizer.comparable() != vectors.tokenizer.comparable():
        ours = f"uses {config.data.tokenizer_file}" if tokenizer else "would train another one"
        raise UserError(
            f"the vectors of config.embedding_init={config.embedding_init} belong to their own tokenizer, and the run "
            f"{ours}: set --config.data.tokenizer_file={folder / TOKENIZER} "
            f"--config.data.vocab_size={vectors.tokenizer.vocab_size}"
        )
    d_model = vectors.vectors.shape[1]
    if d_model != config.model.d_model:
        raise UserError(
            f"config.model.d_model is {config.model.d_model}, and the vectors of config.embedding_init "
            f"{config.embedding_init} have {d_model} entries; change config.model.d_model, or train vectors with "
            f"--config.vectors.d_model={config.model.d_model}"
        )
    return vectors


def with_embeddings(params: Any, vectors: Vectors | None, scale: float = 1.0) -> Any:
    """Returns initial parameters whose word embeddings are replaced by `vectors`, times `scale`. None: no change.

    With untied embeddings, the matrix for the logits stays unchanged, because it is no word embedding.
    """
    if vectors is None:
        return params
    embedding = np.float32(scale) * vectors.vectors
    return params | {name: {**params[name], "embedding": embedding} for name in EMBEDDINGS if name in params}


def are_trained(patterns: str, params: Any) -> Any:
    """Returns a tree of booleans: whether each parameter is trained. `params` may be their shapes.

    `patterns` is `config.train_only`: prefixes of parameter names, such as "decoder,embedding" or "*.self_attention".
    Each must match a parameter.
    """
    names, trained = flatten_dict(params, sep="."), set()
    for pattern in patterns.split(","):
        found = fnmatch.filter(names, f"{pattern}*")
        if not found or (patterns and not pattern):  # nothing, such as behind a last comma, would match every name
            parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
            raise UserError(f"config.train_only: no parameter's name begins like {pattern!r}; there are {parts}")
        trained.update(found)
    return unflatten_dict({name: name in trained for name in names}, sep=".")
