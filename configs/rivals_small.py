"""The rivals on a laptop: each kind of translator with 0.9 million parameters, and the same batches for all.

    python -m transformer_flax.sweep --config=configs/rivals_small.py:transformer --config.data.path=FOLDER \\
      --rows=base --seeds=3
    python -m transformer_flax.sweep --config=configs/rivals_small.py:recurrent --config.data.path=FOLDER \\
      --rows=base --seeds=3 --grid model.attention=additive,none
    python -m transformer_flax.sweep --config=configs/rivals_small.py:convolutional --config.data.path=FOLDER \\
      --rows=base --seeds=3

FOLDER holds Multi30k. A run takes a quarter of an hour of one core; docs/rivals.md has the results.
"""

from ml_collections import ConfigDict

from configs import convolutional, multi30k, recurrent
from transformer_flax.errors import look_up

KINDS = {"transformer": multi30k, "recurrent": recurrent, "convolutional": convolutional}
OWN = {  # values of model and optimizer; docs/rivals.md explains how rates and dropout were chosen
    "transformer": {
        "model": {"d_model": 96, "d_ff": 256, "d_k": 24, "d_v": 24, "dropout": 0.1},
        "optimizer": {"factor": 1.0, "warmup_steps": 400, "cooldown": 0.0},
    },
    "recurrent": {"model": {"d_model": 140, "dropout": 0.1}, "optimizer": {"factor": 1.0}},
    "convolutional": {"model": {"d_model": 92, "dropout": 0.1}, "optimizer": {"factor": 1.0}},
}


def get_config(kind: str = "transformer") -> ConfigDict:
    config = look_up("the kind behind the colon", kind, KINDS).get_config()
    config.name = f"rivals_small-{kind}"
    config.steps = 7_500  # 10.6 epochs
    config.update(OWN[kind])
    config.data.update(vocab_size=3_000, tokens_per_batch=1024, num_buckets=6)
    config.decode.update(length_penalty="gnmt", alpha=0.6)
    config.eval.update(every=750, sentences=500)
    config.parallel.cpu_devices = 1  # a sweep gives each run a core
    return config
