"""Sizes and choices of models, in the paper's symbols. All model changes of table 3 are fields here.

A field that is added later needs a default, because saved runs lack the field. The default must be the behaviour before
the field existed.
"""

import dataclasses
import sys
from typing import Any, ClassVar

from transformer_flax.checked_fields import CheckedConfig, checked, one_of, positive, rate, size

SINUSOIDS = ("sinusoidal", "sinusoidal_concatenated")  # added to the embeddings, as learned positions are
DISTANCES = ("relative", "rotary")  # used inside self-attention instead
POSITIONS = (*SINUSOIDS, "learned", *DISTANCES)
SCORES = ("scaled_dot", "dot", "additive")
REMAT = ("none", "products", "layers")
DEEP_STARTS = ("deepnorm", "t_fixup", "admin")  # these change residuals or LayerNorm, too, for many layers
STARTS = ("xavier", "fairseq", *DEEP_STARTS)
IMPLEMENTATIONS = ("plain", "cudnn")
DTYPES = ("float32", "bfloat16")
MOST_LAYERS = 1_000  # more would be a typing error, and JAX would trace such a model for hours before it fails


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedConfig):
    """The fields that models of every kind have."""

    section: ClassVar[str] = "model"

    vocab_size: int = size()  # V
    num_layers: int = size(most=MOST_LAYERS)  # N
    d_model: int = size()
    dropout: float = rate()
    dtype: str = checked(lambda v: v in DTYPES, "float32 or bfloat16; or auto, in the config of a run")

    @property
    def most_positions(self) -> int:
        """The number of learned positions, which limits the length of every sequence. `sys.maxsize`: no limit."""
        return getattr(self, "max_length", sys.maxsize) if getattr(self, "positions", "") == "learned" else sys.maxsize

    def changed(self, **fields: Any) -> "ModelConfig":
        """Returns a copy with other values of these fields, without those that this kind of model lacks."""
        return dataclasses.replace(self, **{name: value for name, value in fields.items() if name in vars(self)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig(ModelConfig):
    """The fields of the layers in figure 1 (section 3.1). `configs/base.py` explains each field."""

    d_ff: int = size()
    num_heads: int = size()  # h
    d_k: int = size()
    d_v: int = size()
    positions: str = one_of(POSITIONS)
    max_length: int = size()
    # In the paper's models, the following fields are off or have their default.
    attention_dropout: float = rate()
    ffn_dropout: float = rate()
    pre_norm: bool
    attention_bias: bool
    scan_layers: bool
    remat: str = one_of(REMAT)
    compatibility: str = one_of(SCORES, default="scaled_dot")
    clip_distance: int = size(default=16)
    neighbourhood: int = size(least=0, default=0)  # r
    branch_init: float = positive(default=1.0)
    start: str = one_of(STARTS, default="xavier")
    attention_implementation: str = one_of(IMPLEMENTATIONS, default="plain")

    def __post_init__(self):
        super().__post_init__()
        if self.positions in SINUSOIDS:
            self.require("d_model", self.d_model % 2 == 0, "even: sinusoids come in pairs of a sine and a cosine")
        if self.start in DEEP_STARTS:
            self.require("pre_norm", not self.pre_norm, f"False with start={self.start}, which has its own residuals")
        if self.positions == "rotary":
            self.require("d_k", self.d_k % 2 == 0, "even: rotary positions turn features in pairs")
            self.require(
                "compatibility",
                self.compatibility != "additive",
                "scaled_dot or dot with rotary positions, as only products depend on the distance alone",
            )
        if self.attention_implementation == "cudnn":
            here, half = "for cuDNN's attention", self.neighbourhood // 2
            self.require("dtype", self.dtype == "bfloat16", f"bfloat16 {here}")
            self.require("attention_dropout", self.attention_dropout == 0, f"0 {here}, which keeps no weights")
            self.require("compatibility", self.compatibility != "additive", f"scaled_dot or dot {here}")
            self.require("positions", self.positions != "relative", f"anything but relative {here}")
            self.require("d_k", self.d_k % 8 == 0 and self.d_k <= 256, f"a multiple of 8 up to 256 {here}")
            blocks = f"0, or at least 4 with an even half, {here}, which takes no blocks of odd width"
            self.require("neighbourhood", self.neighbourhood == 0 or (half >= 2 and half % 2 == 0), blocks)
            self.require("d_v", self.d_v == self.d_k, f"{self.d_k}, d_k, {here}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(LayerConfig):
    """The fields of the whole Transformer (section 3)."""

    tie_embeddings: bool

    @property
    def embedding_deviation(self) -> float:
        """The initial standard deviation of embeddings times sqrt(d_model), before positions are added."""
        return (9 * self.num_layers) ** -0.25 if self.start == "t_fixup" else 1.0  # Huang et al., 2020, section 3.3
