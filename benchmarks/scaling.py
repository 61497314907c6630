"""Effects of scaling products (section 3.2.1): python benchmarks/scaling.py [--d_k=4,64,512 --picture=scaling.png].

Compares the scale 1 / sqrt(d_k) with no scale for growing d_k. First measures the softmax of queries and keys whose
features are independent with variance 1, as the paper assumes: its largest weight, and how far it moves when its logits
do. Then trains a small model on number words, also with an additive score. Measures the gradient of its W^Q and W^K
before the first update, and its loss after some updates.
"""

import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import rich.console
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from configs import numbers
from transformer_flax import cli
from transformer_flax.console import Progress
from transformer_flax.model.attention import attention_weights
from transformer_flax.model.config import SCORES
from transformer_flax.model.registry import init_params, make_model
from transformer_flax.model.scores import Dot, ScoreFunction
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.loss import translation_loss
from transformer_flax.training.optimizer import make_optimizer
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import PreparedRun, prepare_run
from transformer_flax.training.step import TrainState, init_key, make_train_step

D_K = flags.DEFINE_list("d_k", ["4", "16", "64", "256", "512"], "d_k of each head")
KEYS = flags.DEFINE_integer("keys", 32, "keys of each query in the first part", 2)
STEPS = flags.DEFINE_integer("steps", 120, "updates of the model", 10)
SEEDS = flags.DEFINE_integer("seeds", 2, "models of each score and d_k", 1)
PICTURE = flags.DEFINE_string("picture", None, "draw all figures into this file")
JSON = flags.DEFINE_string("json", None, "write the figures to this file")
QUERIES = 1_000
COLOURS = dict(zip(SCORES, ("#3b82c4", "#d9822b", "#2a9d6f"), strict=True))
DOTS = {"scaled_dot": Dot(), "dot": Dot(scaled=False)}


def softmax_of(score: ScoreFunction, d_k: int, keys: int) -> dict[str, float]:
    """Returns the mean largest weight and the median derivative of the softmax, for queries and keys from N(0, 1).

    The derivative is the Frobenius norm of the weights' Jacobian with respect to the logits, diag(p) - p p^T.
    """
    query, key = (jax.random.normal(jax.random.key(i), (1, n, 1, d_k)) for i, n in enumerate((QUERIES, keys)))
    p = attention_weights(query, key, jnp.ones((1, 1, 1, keys), bool), score)[0, 0]
    squares = (p**2).sum(-1)
    derivative = jnp.sqrt(jnp.maximum(squares - 2 * (p**3).sum(-1) + squares**2, 0))
    return {"largest weight": float(p.max(-1).mean()), "softmax's derivative": float(jnp.median(derivative))}


def learn(config, run: PreparedRun, compatibility: str, d_k: int) -> dict[str, list[float]]:
    """Trains a small model with each seed.

    Returns for each seed the norm of the loss's gradient with respect to all W^Q and W^K before the first update, and
    the loss in nats a token over the last tenth of the updates.
    """
    config = config.copy_and_resolve_references()
    config.model.update(compatibility=compatibility, d_k=d_k)
    model = model_config(config, run.tokenizer.vocab_size)
    optimizer = make_optimizer(config)
    loss_fn = translation_loss(make_model(model), config.label_smoothing)
    train_step = jax.jit(make_train_step(loss_fn, optimizer), donate_argnums=0)
    found: dict[str, list[float]] = {"gradient of W^Q and W^K": [], "loss": []}
    for seed in range(SEEDS.value):
        state = TrainState.create(seed, init_params(model, init_key(seed)), optimizer)
        nll = tokens = 0.0
        for step in range(STEPS.value):
            state, metrics = train_step(state, run.train[step])
            if step == 0:  # Adam's first moment is now 1 - b1 times the gradient
                moments = jax.tree_util.tree_leaves_with_path(state.opt_state.mu)
                squares = [jnp.sum(mu**2) for path, mu in moments if {part.key for part in path} & {"query", "key"}]
                found["gradient of W^Q and W^K"].append(float(sum(squares)) ** 0.5 / (1 - config.optimizer.b1))
            if step >= STEPS.value - STEPS.value // 10:
                nll, tokens = nll + metrics.sums["nll"], tokens + metrics.counts["nll"]
        found["loss"].append(float(nll / tokens))
    return found


def small_config(folder: str):
    config = numbers.get_config()
    # One head, with d_model of the order of d_k: Glorot's matrices then give queries and keys a variance of about 1.
    config.model.update(num_layers=1, d_model=256, d_ff=256, num_heads=1, d_v=64, dropout=0.0)
    config.data.update(num_pairs=5_000, tokens_per_batch=512, num_buckets=1, cache_dir=folder)
    config.optimizer.update(factor=0.3, warmup_steps=50)
    config.eval.test = False
    return config


def measure(d_ks: Sequence[int]) -> dict[str, dict[str, list[list[float]]]]:
    """Measures each quantity of each kind of score: a value for each d_k and seed."""
    figures: dict[str, dict[str, list[list[float]]]] = {}

    def note(quantity: str, kind: str, values: list[float]) -> None:
        figures.setdefault(quantity, {}).setdefault(kind, []).append(values)

    with tempfile.TemporaryDirectory() as folder:
        config = small_config(folder)
        run = prepare_run(config, RunDirectory(pathlib.Path(folder) / "run"), Progress(quiet=True))
        for d_k in d_ks:
            for kind, dot in DOTS.items():
                for quantity, value in softmax_of(dot, d_k, KEYS.value).items():
                    note(quantity, kind, [value])
            for kind in SCORES:
                for quantity, values in learn(config, run, kind, d_k).items():
                    note(quantity, kind, values)
    return figures


def draw(figures: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], d_ks: Sequence[int], file: str) -> None:
    figure = matplotlib.figure.Figure(figsize=(12, 3.2), layout="constrained")
    for axes, (quantity, kinds) in zip(figure.subplots(1, len(figures)), figures.items(), strict=True):
        for kind, values in kinds.items():
            means = [statistics.mean(each) for each in values]
            axes.plot(d_ks, means, color=COLOURS[kind], marker="o", markersize=3, label=kind)
            axes.fill_between(
                d_ks, *zip(*((min(v), max(v)) for v in values), strict=True), color=COLOURS[kind], alpha=0.2
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(d_ks, [str(d_k) for d_k in d_ks])
        if quantity not in ("largest weight", "loss"):
            axes.set_yscale("log")
        axes.set(xlabel="d_k", title=quantity)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    d_ks = [int(d_k) for d_k in D_K.value]
    figures = measure(d_ks)
    console = rich.console.Console(width=160)
    about = f"{STEPS.value} updates, {SEEDS.value} seeds, float32, {jax.devices()[0].device_kind}"
    console.print(about)
    for quantity, kinds in figures.items():
        table = rich.table.Table(quantity, *(f"d_k = {d_k}" for d_k in d_ks))
        for kind, values in kinds.items():
            table.add_row(
                kind, *(f"{np.mean(v):.3g}" + (f" ± {np.ptp(v) / 2:.1g}" if len(v) > 1 else "") for v in values)
            )
        console.print(table)
    if PICTURE.value:
        draw(figures, d_ks, PICTURE.value)
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps({"about": about, "d_k": d_ks, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)
