"""Trains a Transformer: python train.py --config=configs/base.py [--workdir=runs/base] [--config.FIELD=VALUE ...]."""

import pathlib

from absl import flags
from ml_collections import config_flags

from transformer_flax import cli

CONFIG = config_flags.DEFINE_config_file(
    "config",
    default=str(pathlib.Path(__file__).parent / "configs/numbers.py"),
    help_string="a file of configs/; any of its fields can be set, as in --config.model.num_heads=16",
)
WORKDIR = flags.DEFINE_string("workdir", None, "where the run lies, and is resumed from; default runs/<config.name>")


def main() -> None:
    from transformer_flax.training.loop import train  # after the flags: JAX takes seconds to load

    train(CONFIG.value, WORKDIR.value or f"runs/{CONFIG.value.name}")


if __name__ == "__main__":
    cli.run(main, __doc__)
