"""Trains a Transformer: python train.py --config=configs/base.py [--workdir=runs/base] [--config.FIELD=VALUE ...]."""

import contextlib
import pathlib

from absl import flags
from ml_collections import config_flags

from transformer_flax import cli
from transformer_flax.errors import UserError

CONFIG = cli.define_config(pathlib.Path(__file__).parent / "configs/numbers.py")
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes that train together; the same command starts each of them"
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of the first process; default: as the cluster says")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "how many processes; default: as the cluster says", 1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "which of them this is, from 0; default: as the cluster says", 0)
PROFILE = flags.DEFINE_bool("profile", False, "record some steps in the working directory, for TensorBoard or Perfetto")
SEEDS = flags.DEFINE_list(
    "seeds", None, "train with each of these seeds, as 0,1,2, in one program; the runs lie in <workdir>/seed0 and so on"
)
WORKDIR = flags.DEFINE_string("workdir", None, "where the run lies, and is resumed from; default runs/<config.name>")


def main() -> None:
    place = COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
    if not DISTRIBUTED.value and any(value is not None for value in place):
        raise UserError("--coordinator, --num_processes and --process_id are for --distributed, which is not given")
    seeds = SEEDS.value or []
    if not all(seed.isdecimal() for seed in seeds):
        raise UserError(f"--seeds={','.join(seeds)}: seeds are whole numbers, such as 0,1,2")
    if seeds and "seed" in config_flags.get_override_values(flags.FLAGS["config"]):
        raise UserError("--config.seed does nothing beside --seeds, which names them all: leave one of them out")
    # Not before the flags are checked: JAX takes seconds to load.
    from transformer_flax.training.loop import train
    from transformer_flax.training.multihost import joined
    from transformer_flax.training.seeds import train_seeds

    config = CONFIG()
    workdir = WORKDIR.value or f"runs/{config.name}"
    with joined(*place) if DISTRIBUTED.value else contextlib.nullcontext():
        if SEEDS.value is None:
            train(config, workdir, profile=PROFILE.value)
        else:
            train_seeds(config, [int(seed) for seed in seeds], workdir, profile=PROFILE.value)


if __name__ == "__main__":
    cli.run(main, afterwards="the same command goes on from the last checkpoint")
