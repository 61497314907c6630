"""The search that `decode.py` measures, by CTranslate2: its C++ inference of Transformers, given our parameters."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

# Read when the library loads: with threads that spin while they wait, it takes many times as long on a machine that is
# busy with anything else.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerSpec, common_spec

from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.layers import LAYER_NORM_EPSILON
from transformer_flax.model.positions import sinusoids
from transformer_flax.special_tokens import BEGIN_ID, END_ID, PAD_ID


def save(config: TransformerConfig, params: Any, folder: pathlib.Path) -> None:
    """Writes the paper's model (sinusoids, tied embeddings, no biases in attention) as CTranslate2 reads it."""
    c = config
    assert (c.positions, c.compatibility, c.tie_embeddings) == ("sinusoidal", "scaled_dot", True)
    assert (c.pre_norm, c.attention_bias, c.neighbourhood) == (False, False, 0)
    assert c.num_heads * c.d_k == c.num_heads * c.d_v == c.d_model, "CTranslate2 divides d_model among the heads"
    spec = TransformerSpec.from_config(
        c.num_layers, c.num_heads, pre_norm=False, activation=common_spec.Activation.RELU
    )
    # The unknown token is what `disable_unk` keeps out of the outputs: here, padding.
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = map(str, (PAD_ID, BEGIN_ID, END_ID))
    spec.config.decoder_start_token = str(BEGIN_ID)
    spec.config.layer_norm_epsilon = LAYER_NORM_EPSILON
    vocabulary = [str(token) for token in range(c.vocab_size)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)

    embedding = np.asarray(params["embedding"]["embedding"])
    for side, embeddings in (("encoder", spec.encoder.embeddings[0]), ("decoder", spec.decoder.embeddings)):
        stack = getattr(spec, side)
        embeddings.weight = embedding
        stack.position_encodings.encodings = sinusoids(c.max_length, c.d_model)
        for number, layer in enumerate(stack.layer):
            ours = params[f"{side}_{number}"]
            _set_self_attention(layer.self_attention, ours["self_attention"])
            _set_norm(layer.self_attention.layer_norm, ours["after_self_attention"])
            if side == "decoder":
                _set_cross_attention(layer.attention, ours["cross_attention"])
                _set_norm(layer.attention.layer_norm, ours["after_cross_attention"])
            _set_dense(layer.ffn.linear_0, ours["feed_forward"]["w_1"])
            _set_dense(layer.ffn.linear_1, ours["feed_forward"]["w_2"])
            _set_norm(layer.ffn.layer_norm, ours["after_feed_forward"])
    spec.decoder.projection.weight = embedding
    spec.validate()
    spec.optimize(quantization="float32")
    spec.save(str(folder))


def make_search(
    folder: pathlib.Path, source: np.ndarray, beam_size: int, length: int, *, threads: int, nbest: int = 1
) -> Callable[[], list[ctranslate2.TranslationResult]]:
    """A search of outputs of exactly so many tokens, none of them the end symbol.

    With one length there is nothing for a length penalty to rank, and scores are log P alone. Unlike ours, this P is
    over the tokens that are allowed: padding, the begin and the end symbol are masked before the softmax.
    """
    translator = ctranslate2.Translator(
        str(folder), compute_type="float32", inter_threads=1, intra_threads=threads, max_queued_batches=-1
    )
    sentences = [[str(token) for token in row if token != PAD_ID] for row in source]

    def search():
        return translator.translate_batch(
            sentences,
            beam_size=beam_size,
            num_hypotheses=nbest,
            length_penalty=0,
            min_decoding_length=length,
            max_decoding_length=length,
            max_input_length=0,
            disable_unk=True,
            suppress_sequences=[[str(BEGIN_ID)]],
            return_scores=True,
        )

    return search


def _matrix(kernel: Any, inputs: int = 1) -> np.ndarray:
    """A kernel whose first axes are the inputs, as CTranslate2 has it: [outputs, inputs]."""
    kernel = np.asarray(kernel)
    return kernel.reshape(np.prod(kernel.shape[:inputs]), -1).T


def _set_self_attention(spec, ours) -> None:
    spec.linear[0].weight = np.concatenate([_matrix(ours[name]["kernel"]) for name in ("query", "key", "value")])
    spec.linear[1].weight = _matrix(ours["output"]["kernel"], inputs=2)


def _set_cross_attention(spec, ours) -> None:
    spec.linear[0].weight = _matrix(ours["query"]["kernel"])
    spec.linear[1].weight = np.concatenate([_matrix(ours[name]["kernel"]) for name in ("key", "value")])
    spec.linear[2].weight = _matrix(ours["output"]["kernel"], inputs=2)


def _set_dense(spec, ours) -> None:
    spec.weight, spec.bias = _matrix(ours["kernel"]), np.asarray(ours["bias"])


def _set_norm(spec, ours) -> None:
    spec.gamma, spec.beta = np.asarray(ours["norm"]["scale"]), np.asarray(ours["norm"]["bias"])
