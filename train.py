"""Trains a Transformer: python train.py --config=configs/base.py [--workdir=runs/base] [--config.FIELD=VALUE ...]."""

import pathlib

from absl import flags

from transformer_flax import cli

CONFIG = cli.define_config(pathlib.Path(__file__).parent / "configs/numbers.py")
WORKDIR = flags.DEFINE_string("workdir", None, "where the run lies, and is resumed from; default runs/<config.name>")


def main() -> None:
    from transformer_flax.training.loop import train  # not before the flags are checked: JAX takes seconds to load

    train(CONFIG.value, WORKDIR.value or f"runs/{CONFIG.value.name}")


if __name__ == "__main__":
    cli.run(main, afterwards="the same command goes on from the last checkpoint")
