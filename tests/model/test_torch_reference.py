"""PyTorch's nn.Transformer with the same weights: another team's reading of the paper."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.conftest import TINY
from tests.model.parameters import random_params
from transformer_flax.model.layers import LAYER_NORM_EPSILON
from transformer_flax.model.positions import sinusoids
from transformer_flax.model.transformer import Transformer, shift_right

torch = pytest.importorskip("torch", reason='PyTorch is not installed: pip install -e ".[compare]"')

POST_NORM = dataclasses.replace(TINY, num_heads=2, d_k=8, d_v=8)  # PyTorch has d_k = d_v = d_model / h only
CONFIGS = {
    "paper": POST_NORM,
    "pre_norm": dataclasses.replace(POST_NORM, pre_norm=True),
    "attention_bias": dataclasses.replace(POST_NORM, attention_bias=True),
}


def attention_weights(prefix, p):
    """Our kernels are [d_model, h, d_k] and [h, d_v, d_model]; PyTorch's are transposed, the heads side by side."""
    d_model = p["query"]["kernel"].shape[0]
    no_bias = np.zeros(d_model)
    inputs = [p[name] for name in ("query", "key", "value")]
    return {
        f"{prefix}.in_proj_weight": np.concatenate([i["kernel"].reshape(d_model, d_model).T for i in inputs]),
        f"{prefix}.in_proj_bias": np.concatenate([i.get("bias", no_bias).reshape(d_model) for i in inputs]),
        f"{prefix}.out_proj.weight": p["output"]["kernel"].reshape(d_model, d_model).T,
        f"{prefix}.out_proj.bias": p["output"].get("bias", no_bias),
    }


def norm_weights(prefix, p):
    return {f"{prefix}.weight": p["scale"], f"{prefix}.bias": p["bias"]}


def torch_weights(config, params):
    weights = {}
    for side, attentions in (("encoder", ["self"]), ("decoder", ["self", "cross"])):
        for n in range(config.num_layers):
            p, prefix = params[f"{side}_{n}"], f"{side}.layers.{n}"
            for attention in attentions:
                name = {"self": "self_attn", "cross": "multihead_attn"}[attention]
                weights |= attention_weights(f"{prefix}.{name}", p[f"{attention}_attention"])
            for i, layer in enumerate(("w_1", "w_2"), start=1):
                weights[f"{prefix}.linear{i}.weight"] = p["feed_forward"][layer]["kernel"].T
                weights[f"{prefix}.linear{i}.bias"] = p["feed_forward"][layer]["bias"]
            sublayers = [*(f"after_{attention}_attention" for attention in attentions), "after_feed_forward"]
            for i, sublayer in enumerate(sublayers, start=1):
                weights |= norm_weights(f"{prefix}.norm{i}", p[sublayer]["norm"])
        if config.pre_norm:
            weights |= norm_weights(f"{side}.norm", params[f"{side}_norm"])
    return {name: torch.tensor(np.asarray(w), dtype=torch.float64) for name, w in weights.items()}


def torch_transformer(config, params):
    model = torch.nn.Transformer(
        d_model=config.d_model,
        nhead=config.num_heads,
        num_encoder_layers=config.num_layers,
        num_decoder_layers=config.num_layers,
        dim_feedforward=config.d_ff,
        dropout=0.0,
        activation="relu",
        layer_norm_eps=LAYER_NORM_EPSILON,
        batch_first=True,
        norm_first=config.pre_norm,
        dtype=torch.float64,
    )
    if not config.pre_norm:  # PyTorch normalises once more behind each stack; the paper's post-norm does not
        model.encoder.norm = model.decoder.norm = None
    model.load_state_dict(torch_weights(config, params))  # strict: refuses a missing or an unknown name
    return model


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_pytorchs_transformer_agrees(config):
    source = np.array([[5, 9, 14, 3, 28, 11, 2], [17, 4, 8, 2, 0, 0, 0], [6, 2, 0, 0, 0, 0, 0]])
    target = np.array([[7, 7, 21, 2, 0], [12, 3, 19, 25, 2], [2, 0, 0, 0, 0]])
    params = random_params(config)
    logits = jax.jit(Transformer(config).apply)({"params": params}, source, target)

    embedding = params["embedding"]["embedding"].astype(np.float64)

    def embed(tokens):
        x = embedding[tokens] * np.sqrt(config.d_model) + sinusoids(tokens.shape[1], config.d_model)
        return torch.tensor(x)

    is_padding = torch.tensor(source == 0)  # True is what PyTorch keeps out
    y = torch_transformer(config, params)(
        embed(source),
        embed(np.asarray(shift_right(target))),
        src_key_padding_mask=is_padding,
        memory_key_padding_mask=is_padding,
        tgt_mask=torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1),
    )
    np.testing.assert_allclose(logits, y.detach().numpy() @ embedding.T, rtol=1e-5, atol=1e-5)
