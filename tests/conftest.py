"""Eight devices on any machine, and small models for all tests."""

import dataclasses
import os
import pathlib
import sys

import jax
import pytest

from transformer_flax.model.config import TransformerConfig

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for configs/, which is not part of the package

# Most of the time of the tests is compilation, of programs that run once.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
# To XLA, fake CPU devices are real ones: shardings, collectives and deadlocks come out.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
os.environ["TOKENIZERS_PARALLELISM"] = "true"

TINY = TransformerConfig(
    vocab_size=29,
    num_layers=2,
    d_model=16,
    d_ff=24,
    num_heads=3,
    d_k=5,
    d_v=7,
    dropout=0.1,
    positions="sinusoidal",
    max_length=32,
    attention_dropout=0.0,
    ffn_dropout=0.0,
    pre_norm=False,
    tie_embeddings=True,
    attention_bias=False,
    dtype="float32",
)
VARIANTS = {
    "paper": TINY,
    "learned": dataclasses.replace(TINY, positions="learned"),
    "concatenated": dataclasses.replace(TINY, positions="sinusoidal_concatenated"),
    "pre_norm": dataclasses.replace(TINY, pre_norm=True),
    "untied": dataclasses.replace(TINY, tie_embeddings=False),
    "attention_bias": dataclasses.replace(TINY, attention_bias=True),
}


@pytest.fixture(params=VARIANTS)
def variant(request) -> TransformerConfig:
    """Every choice of the model, one at a time."""
    return VARIANTS[request.param]


@pytest.fixture
def tiny() -> TransformerConfig:
    """The paper's model with all sizes different from each other, so that no two axes are taken for one another."""
    return TINY


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> pathlib.Path:
    """The working directory of a run of 200 steps, with checkpoints at 150 and 200."""
    from tests.training.small import learn  # configs/ is found only now

    return learn(tmp_path_factory.mktemp("finished"))
