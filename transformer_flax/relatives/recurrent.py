"""A recurrent translator, the first rival of the Transformer in the paper's table 1.

The encoder is bidirectional. The decoder attends to the encoder's states (Bahdanau et al., 2015), but only after its
own recurrence (Luong et al., 2015): its states do not depend on attention. So only the cells run in a scan, and the
attention of a whole sentence is one product. Without attention, the decoder knows of the source only the last states of
the encoder's layers (Sutskever et al., 2014; Cho et al., 2014).

Letters of shapes: B batch, S source positions, T target positions, K hypotheses of a search, L longest output,
V vocabulary.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.checked_fields import one_of
from transformer_flax.model.config import SCORES
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.layers import to_logits
from transformer_flax.model.linear import Dense
from transformer_flax.model.registry import Kind, register
from transformer_flax.model.scores import Additive, Dot
from transformer_flax.model.transformer import shift_right
from transformer_flax.relatives.seq2seq import Memory, Seq2Seq, Seq2SeqConfig, one_head_weights
from transformer_flax.special_tokens import PAD_ID

CELLS = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Seq2SeqConfig):
    """The fields of a recurrent translator. `configs/recurrent.py` explains each field."""

    cell: str = one_of(tuple(CELLS))
    attention: str = one_of((*SCORES, "none"))

    def __post_init__(self):
        super().__post_init__()
        self.require("d_model", self.d_model % 2 == 0, "even: each direction of the encoder has half of it")


class OneHeadAttention(nn.Module):
    """Attention with one head: softmax(score(s, h)) h, for the decoder's states s, over the encoder's states h.

    The score is v^T tanh(W s + U h) if "additive" (Bahdanau et al., 2015), s^T h if "dot" (Luong et al., 2015), and
    s^T h / sqrt(d_model) if "scaled_dot".
    """

    config: RecurrentConfig

    def setup(self):
        c = self.config
        if c.attention == "additive":
            self.query, self.key = (_dense(c, use_bias=False) for _ in range(2))
            self.score = Additive(self.param("v", nn.initializers.normal(c.d_model**-0.5), (1, c.d_model)))
        else:
            self.query = self.key = lambda x: x
            self.score = Dot(scaled=c.attention == "scaled_dot")

    def keys(self, x: jax.Array) -> jax.Array:
        """Returns the keys U h, or h itself, of the encoder's states [B, S, d_model]."""
        return self.key(x)

    def __call__(self, y: jax.Array, memory: Memory) -> jax.Array:
        """y [B, T, d_model] attends to the memory -> [B, T, d_model]."""
        if self.config.attention == "none":
            return jnp.broadcast_to(memory.values, y.shape)
        weights = one_head_weights(self, self.query(y), memory, self.score)
        return jnp.einsum("bts,bsd->btd", weights.astype(memory.values.dtype), memory.values)


class RecurrentTranslator(Seq2Seq):
    """A translator of N layers of GRUs (Cho et al., 2014) or LSTMs on each side (the paper's table 1).

    Dropout acts on the embeddings, after each layer, and on the features that the logits are computed from.
    """

    config: RecurrentConfig  # pyrefly: ignore (which is never set anew)

    def setup(self):
        super().setup()
        c = self.config
        cell = CELLS[c.cell]
        half = c.d_model // 2  # width of each direction, so that both together have d_model
        self.encoder = [
            nn.Bidirectional(nn.RNN(cell(half, dtype=c.dtype)), nn.RNN(cell(half, dtype=c.dtype)), return_carry=True)
            for _ in range(c.num_layers)
        ]
        self.decoder = [cell(c.d_model, dtype=c.dtype) for _ in range(c.num_layers)]
        self.decoder_over_time = [nn.RNN(cell) for cell in self.decoder]
        self.attention = OneHeadAttention(c)
        self.output = _dense(c)
        self.dropout = Dropout(c.dropout)

    def features(self, source: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        memory, states = self.encode(source)
        y = self._embed(self.target_embedding, shift_right(target))
        for layer, state in zip(self.decoder_over_time, states, strict=True):
            y = self._after(layer(y, initial_carry=state))  # pyrefly: ignore
        return self._features(y, memory)

    def encode(self, source: jax.Array) -> tuple[Memory, list[Any]]:
        """Encodes source [B, S] -> the memory, and the initial states [B, d_model] of the decoder's layers.

        The initial states are the last states of the encoder's layers, both directions concatenated. Without attention,
        the memory is the last state of the encoder's last layer.
        """
        mask = source != PAD_ID
        lengths = jnp.maximum(jnp.sum(mask, axis=1), 1)  # 1 for empty rows, which fill up a batch
        x = self._embed(self.source_embedding, source)
        states = []
        for layer in self.encoder:
            ends, x = layer(x, seq_lengths=lengths)
            states.append(jax.tree.map(lambda *both: jnp.concatenate(both, axis=-1), *ends))
            x = self._after(x)
        if self.config.attention == "none":
            last = jax.tree.leaves(states[-1])[-1][:, None].astype(x.dtype)  # h, also where an LSTM's state is (c, h)
            return Memory(last, last, jnp.ones((len(source), 1, 1), bool)), states
        return Memory(self.attention.keys(x), x, mask[:, None]), states

    def init_cache(self, source: jax.Array, hypotheses: int, length: int) -> None:
        """Encodes source [B, S] for K hypotheses of each sentence. The cache's size does not depend on the length L.

        Fills the collections "memory" (of the source sentence) and "cache" (of the output tokens so far). B is the
        first axis of every array.
        """
        memory, states = self.encode(source)
        self.put_variable("memory", "memory", memory)
        self.put_variable("cache", "states", jax.tree.map(lambda x: jnp.repeat(x[:, None], hypotheses, axis=1), states))

    def decode_step(self, tokens: jax.Array, parents: jax.Array, position: jax.Array) -> jax.Array:
        """Does the same as `Transformer.decode_step`."""
        y = self._embed(self.target_embedding, tokens)
        states = []
        for cell, state in zip(self.decoder, self.get_variable("cache", "states"), strict=True):
            state = jax.tree.map(lambda x: jnp.take_along_axis(x, parents[:, :, None], axis=1), state)
            state, y = cell(state, y)
            y = self._after(y)
            states.append(state)
        self.put_variable("cache", "states", states)
        return to_logits(*self._features(y, self.get_variable("memory", "memory")))

    def _after(self, x: jax.Array) -> jax.Array:
        # Only the states are kept in float32 from step to step.
        return self.dropout(x.astype(self.config.dtype))

    def _features(self, y: jax.Array, memory: Memory) -> tuple[jax.Array, jax.Array]:
        """Computes tanh(W [c; s]), for the context c and the decoder's state s (Luong et al., 2015, equation 5)."""
        joined = jnp.concatenate([self.attention(y, memory), y], axis=-1)
        return self.dropout(nn.tanh(self.output(joined))), self.output_embedding.embedding


def _dense(config: RecurrentConfig, *, use_bias: bool = True) -> Dense:
    return Dense(config.d_model, use_bias=use_bias, dtype=config.dtype, kernel_init=nn.initializers.xavier_uniform())


register("recurrent", Kind(RecurrentConfig, RecurrentTranslator, attention={"cross": "attention"}))
