"""A recurrent translator, the rival that the paper's table 1 begins with.

A bidirectional encoder and a decoder that attends to it (Bahdanau et al., 2015), one after the other as Luong et al.
(2015) have it: the decoder's states depend on the words alone, and attention joins them at the end. So nothing but the
cells lies within a scan, and a sentence's attention is one product. Without attention, all that the decoder knows of
the source is the state that the encoder ends in (Sutskever et al., 2014; Cho et al., 2014).

Letters of shapes: B batch, S source positions, T target positions, K hypotheses of a search, L longest output,
V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.attention import attention_weights
from transformer_flax.model.config import COMPATIBILITIES, require, require_one_of
from transformer_flax.model.dense import Dense
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.scores import Additive, Dot
from transformer_flax.model.transformer import embed, shift_right, to_logits
from transformer_flax.relatives.seq2seq import Embedded, EmbeddedConfig
from transformer_flax.special_tokens import PAD_ID

CELLS = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}
ATTENTION = (*COMPATIBILITIES, "none")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(EmbeddedConfig):
    """Sizes and choices of a recurrent translator; `configs/recurrent.py` explains each."""

    cell: str
    attention: str

    def __post_init__(self):
        super().__post_init__()
        require(self, "d_model", lambda v: v % 2 == 0, "even: each direction of the encoder has a half of it")
        require_one_of(self, "cell", tuple(CELLS))
        require_one_of(self, "attention", ATTENTION)


class Memory(NamedTuple):
    """What the decoder looks up: the encoder's states, or the last one alone where there is no attention."""

    keys: jax.Array  # [B, S | 1, d_model], what the decoder's states are compared with
    values: jax.Array  # [B, S | 1, d_model]
    mask: jax.Array  # bool [B, 1, S | 1], False at padding


class Attention(nn.Module):
    """softmax(score(s, h)) h over the encoder's states h, for the decoder's states s, with one head. The score is

    "additive": v^T tanh(W s + U h) (Bahdanau et al., 2015); "dot": s^T h (Luong et al., 2015); "scaled_dot":
    s^T h / sqrt(d_model). The weights can be had by making the collection "intermediates" mutable.
    """

    config: RecurrentConfig

    def setup(self):
        c = self.config
        if c.attention == "additive":
            self.query, self.key = (_dense(c, c.d_model, use_bias=False) for _ in range(2))
            self.compatibility = Additive(self.param("v", nn.initializers.normal(c.d_model**-0.5), (1, c.d_model)))
        else:
            self.compatibility = Dot(scaled=c.attention == "scaled_dot")

    def keys(self, states: jax.Array) -> jax.Array:
        """What of the encoder's states [B, S, d_model] does not depend on the decoder's -> [B, S, d_model]."""
        return self.key(states) if self.config.attention == "additive" else states

    def __call__(self, y: jax.Array, memory: Memory) -> jax.Array:
        """From y [B, T, d_model] to the memory -> [B, T, d_model]."""
        if self.config.attention == "none":
            return jnp.broadcast_to(memory.values, y.shape)
        query = self.query(y) if self.config.attention == "additive" else y
        one_head = query[:, :, None], memory.keys[:, :, None], memory.mask[:, None]
        weights = attention_weights(*one_head, self.compatibility)[:, 0]
        self.sow("intermediates", "weights", weights)
        return jnp.einsum("bts,bsd->btd", weights.astype(memory.values.dtype), memory.values)


class RecurrentTranslator(Embedded):
    """The whole model: token ids in, next-token logits out. Dropout is active when a "dropout" key is given.

    Layers of GRUs (Cho et al., 2014) or LSTMs, N on each side; dropout on the embeddings, behind each layer, and on
    what the logits are made of.
    """

    config: RecurrentConfig  # pyrefly: ignore (which is never set anew)

    def setup(self):
        super().setup()
        c = self.config
        cell = CELLS[c.cell]
        half = c.d_model // 2  # of each direction, so that both together have d_model
        self.encoder = [
            nn.Bidirectional(nn.RNN(cell(half, dtype=c.dtype)), nn.RNN(cell(half, dtype=c.dtype)), return_carry=True)
            for _ in range(c.num_layers)
        ]
        self.decoder = [cell(c.d_model, dtype=c.dtype) for _ in range(c.num_layers)]
        self.decoder_over_time = [nn.RNN(cell) for cell in self.decoder]
        self.attention = Attention(c)
        self.output = _dense(c, c.d_model)
        self.dropout = Dropout(c.dropout)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """source [B, S], target [B, T] -> logits [B, T, V] in float32; those at t see the target before t only."""
        return to_logits(*self.features(source, target))

    def features(self, source: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the logits are the product of: the decoder's output [B, T, d_model] and the embedding [V, d_model]."""
        memory, states = self.encode(source)
        y = self._embed(self.target_embedding, shift_right(target))
        for layer, state in zip(self.decoder_over_time, states, strict=True):
            y = self._after(layer(y, initial_carry=state))  # pyrefly: ignore
        return self._features(y, memory)

    def encode(self, source: jax.Array) -> tuple[Memory, list[Any]]:
        """source [B, S] -> its memory, and the states, of [B, d_model], that the decoder's layers start from.

        They are those that the encoder's layers end in, both directions side by side.
        """
        mask = source != PAD_ID
        lengths = jnp.maximum(jnp.sum(mask, axis=1), 1)  # a row of only padding fills up a batch, and has an end too
        x = self._embed(self.source_embedding, source)
        states = []
        for layer in self.encoder:
            ends, x = layer(x, seq_lengths=lengths)
            states.append(jax.tree.map(lambda *both: jnp.concatenate(both, axis=-1), *ends))
            x = self._after(x)
        if self.config.attention == "none":
            last = jax.tree.leaves(states[-1])[-1][:, None].astype(x.dtype)  # h, of an LSTM's (c, h) too
            return Memory(last, last, jnp.ones((len(source), 1, 1), bool)), states
        return Memory(self.attention.keys(x), x, mask[:, None]), states

    def begin(self, source: jax.Array, hypotheses: int, length: int) -> None:
        """Encodes source [B, S] for K hypotheses of each sentence, of at most L tokens, which takes no room of its own.

        Fills the collections "memory" (of the sentence) and "cache" (of the outputs so far), each with B in front.
        """
        memory, states = self.encode(source)
        self.put_variable("memory", "memory", memory)
        self.put_variable("cache", "states", jax.tree.map(lambda x: jnp.repeat(x[:, None], hypotheses, axis=1), states))

    def step(self, tokens: jax.Array, parents: jax.Array, position: jax.Array) -> jax.Array:
        """One more token for each hypothesis -> the logits [B, K, V] of the next.

        Args:
          tokens: [B, K], at `position`.
          parents: [B, K], the hypotheses of the step before that these continue.
          position: counts from 0, the begin symbol's.
        """
        y = self._embed(self.target_embedding, tokens)
        states = []
        for cell, state in zip(self.decoder, self.get_variable("cache", "states"), strict=True):
            state = jax.tree.map(lambda x: jnp.take_along_axis(x, parents[:, :, None], axis=1), state)
            state, y = cell(state, y)
            y = self._after(y)
            states.append(state)
        self.put_variable("cache", "states", states)
        return to_logits(*self._features(y, self.get_variable("memory", "memory")))

    def _embed(self, embedding: nn.Embed, tokens: jax.Array) -> jax.Array:
        return self.embedding_dropout(embed(embedding, tokens).astype(self.config.dtype))

    def _after(self, x: jax.Array) -> jax.Array:
        # States stay float32 from step to step; what is made of them need not be.
        return self.dropout(x.astype(self.config.dtype))

    def _features(self, y: jax.Array, memory: Memory) -> tuple[jax.Array, jax.Array]:
        """tanh(W [c; s]) of the context c and the decoder's state s (Luong et al., 2015, equation 5)."""
        joined = jnp.concatenate([self.attention(y, memory), y], axis=-1)
        return self.dropout(nn.tanh(self.output(joined))), self.output_embedding.embedding


def _dense(config: RecurrentConfig, features: int, *, use_bias: bool = True) -> Dense:
    return Dense(features, use_bias=use_bias, dtype=config.dtype, kernel_init=nn.initializers.xavier_uniform())


def attention_maps(config: RecurrentConfig, params: Any, source: jax.Array, target: jax.Array) -> dict[str, jax.Array]:
    """The attention weights of one teacher-forced pass over source [B, S] and target [B, T], in float32.

    Returns:
      {"cross": [1, B, 1, T, S]}, or nothing for a model without attention.
    """
    if config.attention == "none":
        return {}
    _, sown = RecurrentTranslator(config).apply({"params": params}, source, target, mutable=["intermediates"])
    weights: Any = sown["intermediates"]
    return {"cross": weights["attention"]["weights"][0][None, :, None]}
