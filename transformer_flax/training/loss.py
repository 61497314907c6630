"""Label-smoothed cross-entropy and perplexity: the one definition of each (section 5.4)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.special_tokens import PAD_ID

Sums = dict[str, jax.Array]
LossFn = Callable[[Any, Any, jax.Array | None], tuple[Sums, Sums]]


def smoothed_cross_entropy(logits: jax.Array, target: jax.Array, smoothing: float) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy against q' = (1 - smoothing) [v = target] + smoothing u(v), and the unsmoothed one.

    u is uniform over the V - 1 ids that can be predicted: all but padding (Szegedy et al., 2016, section 7, where u is
    uniform over the labels). With log Z the log-sum-exp of the logits, both follow without log-probabilities of all V:

        -log p(target) = log Z - logit(target)      -E_u[log p] = log Z - mean of the logits under u

    Args:
      logits: [..., V].
      target: int [...].
      smoothing: epsilon_ls.

    Returns:
      (smoothed, unsmoothed), both float32 [...].
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nll = log_z - jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    if smoothing == 0:
        return nll, nll
    mean_logit = (jnp.sum(logits, axis=-1) - logits[..., PAD_ID]) / (logits.shape[-1] - 1)
    return (1 - smoothing) * nll + smoothing * (log_z - mean_logit), nll


def perplexity(nll_sum: float, tokens: float) -> float:
    """exp of the unsmoothed negative log-likelihood per token (word-piece)."""
    return float(jnp.exp(nll_sum / tokens))


def translation_loss(model: nn.Module, label_smoothing: float) -> LossFn:
    """The task of translating: `loss_fn(params, batch, key) -> (sums, counts)` over the target tokens of a batch.

    Without a key there is no dropout. sums and counts have the same names: "loss" (what training minimises), "nll"
    (unsmoothed), "accuracy" (of the teacher-forced next token); padding counts nowhere.
    """

    def loss_fn(params, batch, key):
        rngs = None if key is None else {"dropout": key}
        logits: Any = model.apply({"params": params}, batch["source"], batch["target"], rngs=rngs)
        loss, nll = smoothed_cross_entropy(logits, batch["target"], label_smoothing)
        real = batch["target"] != PAD_ID
        correct = jnp.argmax(logits, axis=-1) == batch["target"]
        values = {"loss": loss, "nll": nll, "accuracy": correct}
        tokens = jnp.sum(real, dtype=jnp.float32)
        sums = {name: jnp.sum(jnp.where(real, value, 0), dtype=jnp.float32) for name, value in values.items()}
        return sums, dict.fromkeys(values, tokens)

    return loss_fn
