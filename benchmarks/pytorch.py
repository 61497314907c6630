"""PyTorch's training step, which `train.py` measures: `nn.Transformer` with its own places of dropout, and Adam."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.positions import sinusoids
from transformer_flax.special_tokens import BEGIN_ID, PAD_ID


class Translator(nn.Module):
    """Input embeddings tied with the output's, sinusoids and PyTorch's layers."""

    def __init__(self, config: TransformerConfig, length: int):
        super().__init__()
        c = config
        self.scale = math.sqrt(c.d_model)
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        nn.init.normal_(self.embedding.weight, std=c.d_model**-0.5)
        self.register_buffer("positions", torch.tensor(sinusoids(length, c.d_model)))
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(length))
        self.dropout = nn.Dropout(c.dropout)
        self.transformer = nn.Transformer(
            c.d_model, c.num_heads, c.num_layers, c.num_layers, c.d_ff, c.dropout, batch_first=True
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """source [B, L], the decoder's input [B, L] -> logits [B, L, V]."""
        x, y = (self.dropout(self.embedding(ids) * self.scale + self.positions) for ids in (source, target))
        padding = source == PAD_ID
        y = self.transformer(
            x,
            y,
            tgt_mask=self.causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return functional.linear(y, self.embedding.weight)


def make_step(
    config: TransformerConfig, batch: dict[str, np.ndarray], *, label_smoothing: float, compiled: bool
) -> Callable[[], Any]:
    """Returns a function that makes one update and returns its loss."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True  # as XLA's default precision
    source, target = (torch.tensor(batch[side].astype(np.int64), device=device) for side in ("source", "target"))
    model = Translator(config, source.shape[1]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    inputs = functional.pad(target[:, :-1], (1, 0), value=BEGIN_ID)

    def loss_of(source, inputs, target):
        with torch.autocast(device, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            logits = model(source, inputs)
        return functional.cross_entropy(
            logits.float().flatten(0, 1), target.flatten(), ignore_index=PAD_ID, label_smoothing=label_smoothing
        )

    if compiled:
        loss_of = torch.compile(loss_of)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(source, inputs, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
