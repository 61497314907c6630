"""Which models there are: `config.model.kind` names one, and its config's type tells it from there on.

A model of whatever kind is a Linen module of a config, with `vocab_size`, `d_model` and `dtype` among its fields. One
that translates has the methods that training and search ask for: `features(source, target)`, and
`begin(source, hypotheses, length)` and `step(tokens, parents, position)`. One that classifies is called with the source
alone, and gives a logit for each class.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.errors import UserError, did_you_mean
from transformer_flax.model import transformer
from transformer_flax.model.config import TransformerConfig
from transformer_flax.relatives import classifier, convolutional, recurrent
from transformer_flax.relatives.classifier import ClassifierConfig
from transformer_flax.relatives.convolutional import ConvolutionalConfig
from transformer_flax.relatives.recurrent import RecurrentConfig

Config = TransformerConfig | ClassifierConfig | RecurrentConfig | ConvolutionalConfig


@dataclasses.dataclass(frozen=True)
class Kind:
    """What there is of a kind of model."""

    config: type[Config]
    module: type[nn.Module]
    attention_maps: Callable[..., dict[str, jax.Array]]
    reads: tuple[str, ...] = ("source", "target")  # sides of a batch that it is called with
    segments: bool = False  # keep several pairs in a row apart, where they are given


KINDS = {
    "transformer": Kind(TransformerConfig, transformer.Transformer, transformer.attention_maps, segments=True),
    "classifier": Kind(ClassifierConfig, classifier.Classifier, classifier.attention_maps, reads=("source",)),
    "recurrent": Kind(RecurrentConfig, recurrent.RecurrentTranslator, recurrent.attention_maps),
    "convolutional": Kind(ConvolutionalConfig, convolutional.ConvolutionalTranslator, convolutional.attention_maps),
}


def make_config(vocab_size: int, fields: Mapping[str, Any]) -> Config:
    """The config of a model from the fields of `config.model`, of which `kind` says which.

    Raises:
      UserError: there is no such kind, or it cannot have such a field or such a value.
    """
    kind = find_kind(fields["kind"])
    own = {name: value for name, value in fields.items() if name != "kind"}
    known = {field.name: field for field in dataclasses.fields(kind.config) if field.name != "vocab_size"}
    for name in sorted(own.keys() ^ known.keys()):
        if name in known and known[name].default is not dataclasses.MISSING:  # a run from before there was the field
            continue
        says = "lacks" if name in known else "has nothing for"
        hint = "" if name in known else did_you_mean(name, known)
        advice = hint or "start from the file of configs/ that is for this kind of model"
        raise UserError(f"config.model.kind is {fields['kind']!r}, whose config {says} config.model.{name}; {advice}")
    return kind.config(vocab_size=vocab_size, **own)


def find_kind(name: str) -> Kind:
    """The kind of that name.

    Raises:
      UserError: there is none.
    """
    if not isinstance(name, str) or name not in KINDS:
        raise UserError(f"config.model.kind is {name!r}; it must be one of {', '.join(KINDS)}")
    return KINDS[name]


def kind_of(config: Config) -> Kind:
    """The kind that a model's config is of."""
    return next(kind for kind in KINDS.values() if type(config) is kind.config)


def most_positions(config: Config) -> int | None:
    """How many positions a model has learned, beyond which it cannot go; None for one without a limit."""
    if isinstance(config, RecurrentConfig) or config.positions != "learned":
        return None
    return config.max_length


def make_model(config: Config) -> Any:
    """The module of a config."""
    return kind_of(config).module(config)


@functools.partial(jax.jit, static_argnums=0)  # op by op there would be hundreds of programs to compile
def init_params(config: Config, key: jax.Array) -> Any:
    """Fresh float32 parameters of `make_model(config)`."""
    tokens = jnp.ones((1, 1), jnp.int32)
    return make_model(config).init(key, *(tokens for _ in kind_of(config).reads))["params"]


def attention_maps(config: Config, params: Any, *sides: jax.Array) -> dict[str, jax.Array]:
    """The attention weights of one pass over what the model reads, in float32: source [B, S] and, teacher-forced,
    target [B, T].

    Returns:
      Those of "encoder" [N, B, H, S, S], "decoder" [N, B, H, T, T], "cross" [N, B, H, T, S] and "pooling"
      [1, B, H, 1, S] that this kind of model has, layer by layer.
    """
    return kind_of(config).attention_maps(config, params, *sides)
