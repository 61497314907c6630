"""Label-smoothed cross-entropy and perplexity (section 5.4), each defined only here, and the loss of each task."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from transformer_flax.model.layers import to_logits
from transformer_flax.model.registry import kind_of
from transformer_flax.special_tokens import NUM_SPECIAL, PAD_ID

Sums = dict[str, jax.Array]
LossFn = Callable[[Any, Any, jax.Array | None], tuple[Sums, Sums]]


class TokenLosses(NamedTuple):
    """Losses per target token, or per label: float32 [...]."""

    loss: jax.Array  # label-smoothed cross-entropy
    nll: jax.Array  # unsmoothed: -log p(target)
    correct: jax.Array  # bool: no other token is likelier


def cross_entropy(logits: jax.Array, target: jax.Array, smoothing: float, *, padding: bool = True) -> TokenLosses:
    """Returns the losses of each target.

    `loss` is the cross-entropy -sum_v q'(v) log p(v), where q'(v) = (1 - smoothing) [v = target] + smoothing u(v). The
    logits are [..., V] and the target is int [...]; `smoothing` is epsilon_ls. u is uniform over the labels
    (Szegedy et al., 2016, section 7). The labels are all V ids, without id 0 if it is `padding`, as in a vocabulary.
    Because q' sums to 1, the loss is log Z - sum_v q'(v) logit(v), where log Z is the log-sum-exp of the logits.

    The gradient is written out as softmax(logits) - q'. A gradient derived by JAX would come in parts, each an array
    [tokens, V], and would be several times as slow.
    """
    return _cross_entropy(logits.astype(jnp.float32), target, smoothing, padding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(logits: jax.Array, target: jax.Array, smoothing: float, padding: bool) -> TokenLosses:
    return _forward(logits, target, smoothing, padding)[0]


def in_two_passes(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the maximum, the log-sum-exp and the sum of logits [..., V]."""
    best = jnp.max(logits, axis=-1)
    return best, best + jnp.log(jnp.sum(jnp.exp(logits - best[..., None]), axis=-1)), jnp.sum(logits, axis=-1)


def in_one_pass(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the same as `in_two_passes`, but reads the logits only once.

    The sum of exponentials is scaled whenever a larger maximum is found. A GPU waits for the logits, not for the
    additional exponentials. A CPU does not wait for the logits.
    """

    def join(a, b):
        best = jnp.maximum(a[0], b[0])
        return best, a[1] * jnp.exp(a[0] - best) + b[1] * jnp.exp(b[0] - best), a[2] + b[2]

    nothing = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0), jnp.float32(0)
    best, z, total = jax.lax.reduce((logits, jnp.ones_like(logits), logits), nothing, join, (logits.ndim - 1,))
    return best, best + jnp.log(z), total


def _forward(logits, target, smoothing, padding):
    best, log_z, total = jax.lax.platform_dependent(logits, cuda=in_one_pass, default=in_two_passes)
    target_logit = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    mean = (total - logits[..., PAD_ID]) / (logits.shape[-1] - 1) if padding else total / logits.shape[-1]  # under u
    losses = TokenLosses(
        loss=log_z - (1 - smoothing) * target_logit - smoothing * mean,
        nll=log_z - target_logit,
        correct=target_logit >= best,
    )
    return losses, (logits, target, log_z)


def _backward(smoothing, padding, residuals, gradients):
    logits, target, log_z = residuals
    ids = jnp.arange(logits.shape[-1])
    u = (ids != PAD_ID) / (logits.shape[-1] - 1) if padding else 1 / logits.shape[-1]
    p = jnp.exp(logits - log_z[..., None])
    is_target = ids == target[..., None]
    spread = smoothing * gradients.loss[..., None]
    both = (gradients.loss + gradients.nll)[..., None]
    # gradients.loss (p - q') + gradients.nll (p - [v = target])
    return both * p - (both - spread) * is_target - spread * u, None


_cross_entropy.defvjp(_forward, _backward)


def perplexity(nll_sum: float, tokens: float) -> float:
    """Returns exp of the unsmoothed negative log-likelihood per token."""
    return float(jnp.exp(nll_sum / tokens))


def passes(config: ConfigDict) -> int:
    """Returns how often a training step computes each row of its batch."""
    return 2 if config.r_drop else 1


def make_loss(config: ConfigDict, model: nn.Module) -> LossFn:
    """Returns the loss function of a run's task."""
    if kind_of(model.config).classifies:
        return classification_loss(model, config.label_smoothing)
    return translation_loss(model, config.label_smoothing, config.loss_chunks, r_drop=config.r_drop)


def translation_loss(model: nn.Module, label_smoothing: float, chunks: int = 1, *, r_drop: float = 0.0) -> LossFn:
    """Returns the loss function of translation: `loss_fn(params, batch, key) -> (sums, counts)`.

    The sums are over the target tokens of a batch, without padding. Without a key there is no dropout. sums and counts
    have the same names: "loss" (which training minimises), "nll" (unsmoothed), "accuracy" (of the teacher-forced next
    token) and, in a call with a key and R-Drop, "divergence". The model must have a method `features`; `to_logits`
    makes the logits from its results.

    A batch is split into `chunks` parts, whose logits are computed one after another. `chunks` must divide the rows.
    With several chunks, only "loss" has a gradient.

    With R-Drop (Liang et al., 2021), a call with a key makes two passes with different dropout. The sums are the means
    of both passes. "divergence" is the mean of both Kullback-Leibler divergences. The value of "loss" leaves it out, so
    that losses with and without R-Drop can be compared. The gradient of "loss" includes it: it is the gradient of
    loss + r_drop / 2 * divergence. This is half of that paper's equation 4, so gradients are clipped as without R-Drop.
    `r_drop` is that paper's alpha; 0 for one pass.
    """

    def sums_of(y, embedding, target):
        return _sums(cross_entropy(to_logits(y, embedding), target, label_smoothing), target != PAD_ID)

    def sums_of_two(y, embedding, target):
        """Returns the mean over both passes of the sums, for y [B, 2, T, d_model] and target [B, T]."""
        logits, there = to_logits(y, embedding), target != PAD_ID
        both = jnp.broadcast_to(target[:, None], y.shape[:-1])
        sums = _sums(cross_entropy(logits, both, label_smoothing), both != PAD_ID)
        sums["divergence"] = jnp.sum(jnp.where(there, symmetric_divergence(logits[:, 0], logits[:, 1]), 0))
        sums = jax.tree.map(lambda total: total / 2, sums)
        penalty = r_drop / 2 * sums["divergence"]
        return sums | {"loss": sums["loss"] + (penalty - jax.lax.stop_gradient(penalty))}

    def loss_fn(params, batch, key):
        two = r_drop > 0 and key is not None
        rngs = None if key is None else {"dropout": key}
        # Each row beside its copy, so that both are on one device and in one chunk.
        rows = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), batch) if two else batch
        y, embedding = model.apply({"params": params}, **rows, rngs=rngs, method="features")  # pyrefly: ignore
        target, make_sums = batch["target"], sums_of
        if two:
            y, make_sums = y.reshape(-1, 2, *y.shape[1:]), sums_of_two
        if chunks == 1:
            sums = make_sums(y, embedding, target)
        else:
            sums = _sums_by_chunks(make_sums, split_rows(y, chunks), embedding, split_rows(target, chunks))
        return sums, dict.fromkeys(sums, jnp.sum(target != PAD_ID, dtype=jnp.float32))

    return loss_fn


def symmetric_divergence(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns KL(p || q) + KL(q || p) = sum_v (p - q) (log p - log q): [..., V] -> [...].

    p and q are the softmax of the logits a and b. Both sum to 1, so the logits can replace the logarithms.
    """
    return jnp.sum((jax.nn.softmax(a) - jax.nn.softmax(b)) * (a - b), axis=-1)


def classification_loss(model: nn.Module, label_smoothing: float) -> LossFn:
    """Returns the loss function of classification: `loss_fn(params, batch, key) -> (sums, counts)`.

    The model makes logits [B, C] of a source [B, S]. The sums are over the rows of a batch. A row's label is the first
    token of its target; class c is the token NUM_SPECIAL + c. An empty row has no label and is not counted. Without a
    key there is no dropout. sums and counts have the same names as in `translation_loss`.
    """

    def loss_fn(params, batch, key):
        rngs = None if key is None else {"dropout": key}
        logits: Any = model.apply({"params": params}, batch["source"], rngs=rngs)
        label = batch["target"][:, 0]
        there = label != PAD_ID
        losses = cross_entropy(logits, jnp.maximum(label - NUM_SPECIAL, 0), label_smoothing, padding=False)
        sums = _sums(losses, there)
        return sums, dict.fromkeys(sums, jnp.sum(there, dtype=jnp.float32))

    return loss_fn


def _sums(losses: TokenLosses, there: jax.Array) -> Sums:
    """Returns the sums over all positions where `there` is true, by the names that a run reports."""
    values = {"loss": losses.loss, "nll": losses.nll, "accuracy": losses.correct}
    return {name: jnp.sum(jnp.where(there, value, 0), dtype=jnp.float32) for name, value in values.items()}


def split_rows(x: jax.Array, parts: int) -> jax.Array:
    """Splits rows into parts, [rows, ...] -> [parts, rows / parts, ...]: part i takes every parts-th row from row i.

    So each row stays on its device.
    """
    return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums_by_chunks(sums_of: Callable, y: jax.Array, embedding: jax.Array, target: jax.Array) -> Sums:
    """Returns the sums of `sums_of(y, embedding, target)` over the first axis of y and target.

    The loss is a sum, so the gradient of a chunk can be computed together with the chunk's logits. No logits are kept
    for a backward pass or computed twice. Without a backward pass, JAX compiles no gradients.
    """
    return _sums_and_gradients(sums_of, y, embedding, target)[0]


def _sums_and_gradients(sums_of, y, embedding, target):
    def add(total, chunk):
        y, target = chunk

        def loss(y, embedding):
            sums = sums_of(y, embedding, target)
            return sums["loss"], sums

        (_, sums), (y_gradient, gradient) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(y, embedding)
        return jax.tree.map(jnp.add, total, (sums, gradient)), y_gradient

    sums = jax.eval_shape(sums_of, y[0], embedding, target[0])
    zeros = jax.tree.map(jnp.zeros_like, (sums, embedding))
    (sums, gradient), y_gradient = jax.lax.scan(add, zeros, (y, target))
    return sums, (y_gradient, gradient)


def _scale_gradients(sums_of, gradients, cotangents):
    y_gradient, gradient = gradients
    scale = cotangents["loss"]
    return scale.astype(y_gradient.dtype) * y_gradient, scale * gradient, None


_sums_by_chunks.defvjp(_sums_and_gradients, _scale_gradients)
