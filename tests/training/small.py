"""A run that takes seconds."""

import json
import pathlib
import shutil

import jax
from ml_collections import ConfigDict

from configs import numbers
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.text_files import write_pairs
from transformer_flax.model.registry import init_params
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.loop import train
from transformer_flax.training.optimizer import keeps_average, make_optimizer
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.step import TrainState, init_key

PAIRS = {"train": 1_000, "valid": 15, "test": 15}  # the evaluated ones have 19 to 32 tokens: one shape of a search


def small_config(**overrides) -> ConfigDict:
    """`numbers`, shrunk; overrides are {"model.dropout": 0.0, ...} with dots as double underscores."""
    config = numbers.get_config()
    config.steps = 6
    config.model.update(num_layers=1, d_model=16, d_ff=16, num_heads=2, d_k=8, d_v=8, dropout=0.2, dtype="float32")
    config.data.update(source="folder", num_pairs=0, vocab_size=300, tokens_per_batch=512, num_buckets=1)
    # Few and many lines have batches of 8, which do not shrink (decoding/search.py): a search is traced once.
    config.decode.update(beam_size=2, max_extra_length=5, max_input_length=40, batch_size=8)
    config.eval.update(every=3, sentences=4, final_average=1, test=False)
    config.checkpoint.update(every=3, keep=2)
    config.log.every = 2
    config.parallel.num_devices = 1
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


def write_text(folder: pathlib.Path) -> pathlib.Path:
    """Number words as a folder of text files, with few sentences to evaluate on."""
    config = small_config(data__source="numbers", data__num_pairs=1_000).data
    pairs = {split: load_pairs(config, split) for split in PAIRS}
    write_pairs(folder, {split: pairs[split].read(range(count)) for split, count in PAIRS.items()})
    return folder


def learn(folder: pathlib.Path) -> pathlib.Path:
    """Trains until translations depend on what is translated, some of them right; the working directory.

    From German, so that the other side has the four words in a row that BLEU wants.
    """
    text = folder / "text"
    text.mkdir()
    write_text(text)
    for language in ("en", "de"):
        known = (text / f"train.{language}").read_text().splitlines()
        for split, first in (("valid", 100), ("test", 500)):
            (text / f"{split}.{language}").write_text("\n".join(known[first : first + PAIRS[split]]) + "\n")
        with (text / f"valid.{language}").open("a") as file:
            file.write(" ".join(known[200:220]) + "\n")  # longer than config.decode.max_input_length
    config = small_config(
        steps=200,
        data__path=str(text),
        data__cache_dir=str(folder / "cache"),
        data__source_language="de",
        data__target_language="en",
        model__dropout=0.0,
        optimizer__factor=1.0,
        optimizer__warmup_steps=50,
        eval__every=0,
        eval__test=True,
        eval__final_average=2,
        checkpoint__every=50,
        log__every=200,
    )
    train(config, folder / "run")
    return folder / "run"


def copied(run: pathlib.Path, folder: pathlib.Path, **data) -> pathlib.Path:
    """Returns a copy of a run's working directory whose config has other fields of the data."""
    shutil.copytree(run, folder)
    kept = json.loads((folder / "config.json").read_text())
    del kept["crc32"]
    kept["config"]["data"] |= data
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def final_state(path: pathlib.Path, step: int) -> TrainState:
    """The state of the last checkpoint of a run, which must be of that step."""
    workdir = RunDirectory(path)
    config = workdir.load_config()
    model = model_config(config, workdir.load_tokenizer().vocab_size)
    optimizer = make_optimizer(config)
    like = jax.eval_shape(
        lambda: TrainState.create(
            config.seed, init_params(model, init_key(config.seed)), optimizer, keep_ema=keeps_average(config)
        )
    )
    checkpoints = Checkpoints(workdir.checkpoints, every=config.checkpoint.every, keep=2, seed=config.seed)
    assert checkpoints.steps()[-1] == step
    state = jax.device_get(checkpoints.restore(like, step)[0])
    checkpoints.close()
    return state


def timeless(lines: list[dict]) -> list[dict]:
    """Lines of metrics without what the clock has to do with."""
    return [
        {name: value for name, value in line.items() if "second" not in name and "mfu" not in name} for line in lines
    ]
