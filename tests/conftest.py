"""Eight devices on any machine, and small models for all tests."""

import dataclasses
import fcntl
import functools
import gc
import os
import pathlib
import signal
import sys

import hypothesis
import jax
import pytest

from transformer_flax.model.config import TransformerConfig

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for configs/, which is not part of the package

# Most of the time of the tests is compilation, of programs that run once. The older way to fuse takes half of it.
QUICK = ["backend_optimization_level=0", "cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):  # whose successors end at flags that they do not know, such as this one
    QUICK.append("cpu_use_fusion_emitters=false")
PLATFORMS = os.environ.get("JAX_PLATFORMS", "cpu")  # empty: those there are, as benchmarks/accelerator.sh wants it
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *(f"--xla_{flag}" for flag in QUICK)])
for name, value in {
    "platforms": PLATFORMS,
    "num_cpu_devices": 8,  # to XLA, fake CPU devices are real ones: shardings, collectives and deadlocks come out
    # What one process that tests start has compiled, no other needs to compile again.
    "compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax")),
    "persistent_cache_min_compile_time_secs": 0.1,
}.items():
    jax.config.update(f"jax_{name}", value)
    os.environ[f"JAX_{name.upper()}"] = str(value)  # for processes that tests start
os.environ["TRANSFORMER_FLAX_ALLOCATOR"] = "system"  # one arena for all threads would slow down compilation
# JAX keeps millions of objects, which Python would look through again and again: a fifth of the time of the tests.
gc.set_threshold(200_000, 20, 100)
os.environ["TOKENIZERS_PARALLELISM"] = "true"
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
# A shell has what it starts in the background ignore Ctrl-C, and nohup the end of its terminal. Processes that tests
# start would inherit this. A handler is not inherited, and pytest itself still survives the terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
    signal.signal(signal.SIGHUP, lambda *_: None)

long = functools.partial(pytest.param, marks=pytest.mark.long)  # a case of the long form of the tests

# The paper's model with all sizes different from each other, so that no two axes are taken for one another. A new field
# has its default here.
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
    clip_distance=3,
    attention_dropout=0.0,
    ffn_dropout=0.0,
    pre_norm=False,
    tie_embeddings=True,
    attention_bias=False,
    scan_layers=False,
    remat="none",
    dtype="float32",
)
ONE_LAYER = dataclasses.replace(TINY, num_layers=1)
VARIANTS = {  # a choice is the same in every layer, and the paper's model has two
    "paper": TINY,
    "learned": dataclasses.replace(ONE_LAYER, positions="learned"),
    "concatenated": dataclasses.replace(ONE_LAYER, positions="sinusoidal_concatenated"),
    "relative, dot": dataclasses.replace(ONE_LAYER, positions="relative", compatibility="dot"),
    "relative, additive": dataclasses.replace(ONE_LAYER, positions="relative", compatibility="additive"),
    "rotary": dataclasses.replace(ONE_LAYER, positions="rotary", d_k=6),
    "pre_norm": dataclasses.replace(ONE_LAYER, pre_norm=True),
    "untied": dataclasses.replace(ONE_LAYER, tie_embeddings=False),
    "attention_bias": dataclasses.replace(ONE_LAYER, attention_bias=True),
    "t_fixup": dataclasses.replace(ONE_LAYER, start="t_fixup"),
    "admin": dataclasses.replace(ONE_LAYER, start="admin"),
}


def pytest_configure() -> None:
    """Lets pytest's own processes only read compiled programs: to write one takes half as long as to compile it."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))


def pytest_sessionfinish() -> None:
    """Hides what is left from the collector, to which pytest turns five times at the end."""
    gc.freeze()


@pytest.fixture(params=VARIANTS)
def variant(request) -> TransformerConfig:
    """Every choice of the model, one at a time."""
    return VARIANTS[request.param]


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> pathlib.Path:
    """The working directory of a run of 200 steps, with checkpoints at 150 and 200; not to be changed.

    The first worker of pytest-xdist that needs it trains it for all.
    """
    from tests.training.small import learn  # configs/ is found only now

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    folder = folder / "finished"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "workdir.txt").exists():
            (folder / "workdir.txt").write_text(str(learn(folder)))
    return pathlib.Path((folder / "workdir.txt").read_text())
