"""A run that takes seconds."""

import pathlib

from ml_collections import ConfigDict

from configs import numbers
from transformer_flax.data.pairs import load_pairs

PAIRS = {"train": 1_000, "valid": 20, "test": 20}


def small_config(**overrides) -> ConfigDict:
    """`numbers`, shrunk; overrides are {"model.dropout": 0.0, ...} with dots as double underscores."""
    config = numbers.get_config()
    config.steps = 6
    config.model.update(num_layers=1, d_model=16, d_ff=16, num_heads=2, d_k=8, d_v=8, dropout=0.2)
    config.data.update(source="folder", num_pairs=1_000, vocab_size=300, tokens_per_batch=512, num_buckets=1)
    config.decode.update(beam_size=2, max_extra_length=5, max_input_length=40)
    config.eval.update(every=3, sentences=4, final_average=1, test=False)
    config.checkpoint.update(every=3, keep=2)
    config.log.every = 2
    config.parallel.num_devices = 1
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


def write_text(folder: pathlib.Path) -> pathlib.Path:
    """Number words as a folder of text files, with few sentences to evaluate on."""
    config = small_config(data__source="numbers").data
    for split, count in PAIRS.items():
        pairs = load_pairs(config, split)
        sources, targets = zip(*(pairs[i] for i in range(count)), strict=True)
        (folder / f"{split}.en").write_text("\n".join(sources) + "\n")
        (folder / f"{split}.de").write_text("\n".join(targets) + "\n")
    return folder
