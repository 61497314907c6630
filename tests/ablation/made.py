"""Results as a sweep leaves them, made up for tests: the paper's effects, larger, with the noise of seeds."""

import math

import numpy as np

from transformer_flax.ablation import comparison, table3
from transformer_flax.ablation.results import Result

CONFIG = {**table3.PAPER_BASE, "steps": 3_000, "model.d_model": 192, "data.source": "folder", "data.path": "a|b `c`"}
SESSION = {
    "command": "python -m transformer_flax.sweep --config=configs/table3_small.py --rows=all --seeds=3",
    "versions": {"jax": "0.10.2", "flax": "0.12.8"},
    "hardware": "2 cores",
    "commit": "0123abc",
}
BASE = {"name": "multi30k", "config": CONFIG, "sessions": [SESSION]}


def compare(results, **fields) -> comparison.Comparison:
    """On the paper's base, but for fields with dots as double underscores."""
    return comparison.compare(results, CONFIG | {name.replace("__", "."): value for name, value in fields.items()})


def result(
    variant: str = "base", seed: int = 0, *, row: str = "", perplexity=6.0, bleu=34.0, exact_match=0.05, **other
):
    """A finished run, whose curve ends at its scores and at a source gain of 3."""
    fields = {
        "changes": table3.find(row or variant).changes,
        "status": "finished",
        "error": "",
        "parameters": 3_476_736,
        "flops": 1.234e14,
        "steps": 3_000,
        "seconds": 1200.0 + seed,
        "signature": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0",
        "curve": [
            point(step, perplexity * math.exp(900 / step), bleu * share, exact_match * share, source_gain=3 * share)
            for step in range(300, 3_001, 300)
            for share in [1 - math.exp(-step / 600)]
        ],
    } | other
    scores = {"loss": 2.0, "accuracy": 0.6, "perplexity": perplexity, "bleu": bleu, "exact_match": exact_match}
    return Result(variant=variant, row=row or variant, seed=seed, scores={"valid": scores, "test": scores}, **fields)


def point(step: int, perplexity: float, bleu: float, exact_match: float = 0.1, **more: float) -> dict[str, float]:
    """A point of a translator's curve."""
    scores = {"perplexity": perplexity, "bleu": bleu, "exact_match": exact_match}
    return {"step": step, "seconds": step / 2.5, **scores, **more}


def failed(variant: str, seed: int, error: str) -> Result:
    made = result(variant, seed)
    return Result(**vars(made) | {"status": "failed", "error": error, "scores": {}, "curve": [], "seconds": 0.0})


def sweep(rows=table3.ROWS, seeds=range(3), *, effect: float = 2.0, words: bool = False, **fields) -> list[Result]:
    """Rows by seeds.

    Args:
      effect: how many times the paper's.
      words: score by exact matches, as one word has no BLEU.
      **fields: other values than `result` gives to all.
    """
    noise = np.random.default_rng(0)
    base = table3.ROWS["base"]
    made = []
    for row in (table3.ROWS[name] for name in rows):
        for seed in seeds:
            ppl = 6.2 * (row.perplexity / base.perplexity) ** effect * math.exp(noise.normal(0, 0.01))
            score = 34 + effect * (row.bleu - base.bleu) + noise.normal(0, 0.25)
            scores = {"bleu": 0.0, "exact_match": score / 42} if words else {"bleu": score}
            made.append(result(row.name, seed, perplexity=ppl, **scores, **fields))
    return made
