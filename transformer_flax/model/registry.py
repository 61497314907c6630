"""The kinds of models. `config.model.kind` names one of them.

A kind is a dataclass of fields and a Linen module whose config is that dataclass. `register` adds a kind. The package
`relatives` has all kinds but the Transformer. A module that translates has the methods

    __call__(source, target)                 logits [B, T, V], teacher-forced
    features(source, target)                 the factors of these logits: [B, T, d_model] and [V, d_model]
    init_cache(source, hypotheses, length)   starts a search
    decode_step(tokens, parents, position)   logits [B, K, V] of the next tokens

A module that classifies has `__call__(source)`, logits [B, C].
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from transformer_flax.errors import UserError, did_you_mean, look_up
from transformer_flax.model.config import MOST_LAYERS, ModelConfig, TransformerConfig
from transformer_flax.model.residuals import init_admin
from transformer_flax.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model."""

    config: type[ModelConfig]
    module: type[nn.Module]
    # For each attention map, by name, the modules that sow its "weights" [B, H, Q, M]; * stands for a layer's number.
    attention: Mapping[str, str]
    classifies: bool = False  # False: the model translates
    segments: bool = False  # the model can keep several pairs in a row apart

    @property
    def reads(self) -> tuple[str, ...]:
        """The sides of a batch that the model is called with."""
        return ("source",) if self.classifies else ("source", "target")


KINDS: dict[str, Kind] = {}


def register(name: str, kind: Kind) -> None:
    """Makes a kind of model available as `config.model.kind`.

    Raises:
      UserError: the kind's config belongs to a kind of another name. The class of a config identifies its kind.
    """
    for other, its in KINDS.items():
        if its.config is kind.config and other != name:
            own = f"give it a subclass of {its.config.__name__} of its own"
            raise UserError(f"kind {name!r} has the config of kind {other!r}: {own}")
    KINDS[name] = kind


register(
    "transformer",
    Kind(
        TransformerConfig,
        Transformer,
        attention={
            "encoder": "encoder_*/self_attention",
            "decoder": "decoder_*/self_attention",
            "cross": "decoder_*/cross_attention",
        },
        segments=True,
    ),
)


def make_config(vocab_size: int, fields: Mapping[str, Any]) -> ModelConfig:
    """Returns the model's config, made of the fields of `config.model`."""
    kind = find_kind(fields["kind"])
    own = {name: value for name, value in fields.items() if name != "kind"}
    known = {field.name: field for field in dataclasses.fields(kind.config) if field.name != "vocab_size"}
    of, hint = f"kind {fields['kind']!r}", f"its fields are {', '.join(known)}"
    for name, field in known.items():  # a run from before a field existed has its default
        if name not in own and field.default is dataclasses.MISSING:
            raise UserError(f"config.model.{name} is missing for {of}; {hint}; start from a config file of this kind")
    for name in own:
        if name not in known:
            raise UserError(f"config.model.{name} is not a field of {of}; {did_you_mean(name, known) or hint}")
    return kind.config(vocab_size=vocab_size, **own)


def find_kind(name: str) -> Kind:
    """Returns the kind of that name."""
    return look_up("config.model.kind", name, KINDS)


def kind_of(config: ModelConfig) -> Kind:
    """Returns the kind that a model's config belongs to."""
    return next(kind for kind in KINDS.values() if type(config) is kind.config)


def make_model(config: ModelConfig) -> Any:
    """Returns the Linen module for a model's config."""
    return kind_of(config).module(config)


def init_params(config: ModelConfig, key: jax.Array) -> Any:
    """Returns initial float32 parameters of `make_model(config)`."""
    return _init(make_model(config), key)


def param_shapes(config: ModelConfig) -> Any:
    """Returns the shapes and dtypes of a model's parameters, and computes nothing."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


@functools.partial(jax.jit, static_argnums=0)  # without jit, JAX would compile hundreds of small programs
def _init(model: Any, key: jax.Array) -> Any:
    # The static argument is the model, not its config: a notebook may register another module for that config.
    config, sides = model.config, kind_of(model.config).reads
    if getattr(config, "start", None) == "admin":
        params = init_admin(model, key, len(sides))
    else:
        params = model.init(key, *[jnp.ones((1, 1), jnp.int32)] * len(sides))["params"]
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)  # with jax_enable_x64, some would be float64


def attention_maps(config: ModelConfig, params: Any, *sides: jax.Array) -> dict[str, jax.Array]:
    """Computes the attention weights of one pass over source [B, S] and, teacher-forced, target [B, T], in float32.

    Returns the maps that this kind of model has, layer by layer: "encoder" [N, B, H, S, S], "decoder" [N, B, H, T, T],
    "cross" [N, B, H, T, S] (N = 1 for a recurrent translator) and "pooling" [1, B, H, 1, S].
    """
    config = config.changed(scan_layers=False)  # scanned layers sow nothing
    _, sown = make_model(config).apply({"params": params}, *sides, mutable=["intermediates"])
    weights: dict[str, Any] = flatten_dict(sown.get("intermediates", {}), sep="/")
    maps = {}
    for name, module in kind_of(config).attention.items():
        places = (f"{module.replace('*', str(n))}/weights" for n in range(MOST_LAYERS if "*" in module else 1))
        if layers := [each for place in places for each in weights.get(place, ())]:  # a layer may be applied repeatedly
            maps[name] = jnp.stack(layers)
    return maps
