"""Trains a model: python -m transformer_flax.train --config=configs/base.py [--workdir=runs/base] [--config.X=Y ...]"""

import contextlib

from absl import flags
from ml_collections import config_flags

from transformer_flax import cli
from transformer_flax.arguments import SeedsParser, define_config
from transformer_flax.errors import UserError

CONFIG = define_config("numbers.py")
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "this is one of several processes that train together; start each with the same command"
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0; default: as the cluster says")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "number of processes; default: as the cluster says", 1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "number of this process, from 0; default: as the cluster says", 0)
PROFILE = flags.DEFINE_bool("profile", False, "profile five steps, for TensorBoard or Perfetto")
SEEDS = flags.DEFINE(
    SeedsParser(), "seeds", None, "seeds to train with in one program; run k is written to <workdir>/seed<k>"
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "directory of the run; an existing run is resumed; default runs/<config.name>"
)


def main() -> None:
    place = COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
    if not DISTRIBUTED.value:
        cli.refuse_idle(("coordinator", "num_processes", "process_id"), "without --distributed")
    if SEEDS.value and "seed" in config_flags.get_override_values(flags.FLAGS["config"]):
        raise UserError("--config.seed has no effect with --seeds: leave one of them out")
    from transformer_flax.training.loop import train
    from transformer_flax.training.multihost import joined
    from transformer_flax.training.vectorized_seeds import train_seeds

    config = CONFIG()
    workdir = WORKDIR.value or f"runs/{config.name}"
    with joined(*place) if DISTRIBUTED.value else contextlib.nullcontext():
        if SEEDS.value:
            train_seeds(config, SEEDS.value, workdir, profile=PROFILE.value)
        else:
            train(config, workdir, profile=PROFILE.value)


if __name__ == "__main__":
    cli.run(main, afterwards="the same command resumes from the last checkpoint")
