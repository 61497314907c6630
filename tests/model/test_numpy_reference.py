"""The paper once more, in plain NumPy: sections 3.1 to 3.5 for one sentence pair, one equation a function.

It shares no code with the model but the parameters. Letters of shapes: S source positions, T target positions.
"""

import jax
import numpy as np

from tests.conftest import TINY
from tests.model.parameters import random_params
from transformer_flax.model.transformer import Transformer

PADDING, BEGIN = 0, 1


def softmax(x):
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attention(q, k, v, allowed):
    """softmax(Q K^T / sqrt(d_k)) V: equation 1. `allowed` [queries, keys] says which query may look at which key."""
    scores = q @ k.T / np.sqrt(k.shape[-1])
    return softmax(np.where(allowed, scores, -np.inf)) @ v


def multi_head_attention(x, memory, allowed, p):
    """Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V): section 3.2.2."""
    num_heads = p["query"]["kernel"].shape[1]
    heads = []
    for i in range(num_heads):
        w_q, w_k, w_v = (p[name]["kernel"][:, i, :] for name in ("query", "key", "value"))
        heads.append(attention(x @ w_q, memory @ w_k, memory @ w_v, allowed))
    w_o = np.concatenate(p["output"]["kernel"], axis=0)  # [h, d_v, d_model] -> [h d_v, d_model]
    return np.concatenate(heads, axis=-1) @ w_o


def feed_forward(x, p):
    """max(0, x W_1 + b_1) W_2 + b_2: equation 2."""
    hidden = np.maximum(0, x @ p["w_1"]["kernel"] + p["w_1"]["bias"])
    return hidden @ p["w_2"]["kernel"] + p["w_2"]["bias"]


def layer_norm(x, p):
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * p["norm"]["scale"] + p["norm"]["bias"]


def encoder_layer(x, allowed, p):
    """LayerNorm(x + Sublayer(x)) around either sub-layer: section 3.1."""
    x = layer_norm(x + multi_head_attention(x, x, allowed, p["self_attention"]), p["after_self_attention"])
    return layer_norm(x + feed_forward(x, p["feed_forward"]), p["after_feed_forward"])


def decoder_layer(y, allowed, memory, memory_allowed, p):
    y = layer_norm(y + multi_head_attention(y, y, allowed, p["self_attention"]), p["after_self_attention"])
    cross = multi_head_attention(y, memory, memory_allowed, p["cross_attention"])
    y = layer_norm(y + cross, p["after_cross_attention"])
    return layer_norm(y + feed_forward(y, p["feed_forward"]), p["after_feed_forward"])


def positional_encoding(length, d_model):
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(the same): section 3.5."""
    encoding = np.zeros((length, d_model))
    for pos in range(length):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            encoding[pos, 2 * i] = np.sin(angle)
            encoding[pos, 2 * i + 1] = np.cos(angle)
    return encoding


def embed(tokens, embedding):
    """Embeddings are multiplied by sqrt(d_model): section 3.4."""
    d_model = embedding.shape[1]
    return embedding[tokens] * np.sqrt(d_model) + positional_encoding(len(tokens), d_model)


def transformer(source, target, params):
    """Tokens [S] and [T] -> logits [T, V]: figure 1."""
    embedding = params["embedding"]["embedding"]  # one for both languages and for the output: section 3.4
    num_layers = sum(name.startswith("encoder_") for name in params)

    is_word = source != PADDING  # a column of keys: every query is kept from the same ones
    x = embed(source, embedding)
    for n in range(num_layers):
        x = encoder_layer(x, np.tile(is_word, (len(source), 1)), params[f"encoder_{n}"])

    position = np.arange(len(target))
    not_later = position[None, :] <= position[:, None]
    y = embed(np.array([BEGIN, *target[:-1]]), embedding)
    for n in range(num_layers):
        y = decoder_layer(y, not_later, x, np.tile(is_word, (len(target), 1)), params[f"decoder_{n}"])
    return y @ embedding.T


def test_model_is_what_the_papers_equations_say():
    source = np.array([[5, 9, 14, 3, 28, 11, 2], [17, 4, 8, 2, 0, 0, 0], [6, 2, 0, 0, 0, 0, 0]])
    target = np.array([[7, 7, 21, 2, 0], [12, 3, 19, 25, 2], [2, 0, 0, 0, 0]])
    params = random_params(TINY)
    logits = jax.jit(Transformer(TINY).apply)({"params": params}, source, target)

    in_float64 = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    for b in range(len(source)):
        expected = transformer(source[b], target[b], in_float64)
        np.testing.assert_allclose(logits[b], expected, rtol=1e-5, atol=1e-5, err_msg=f"sentence {b}")
