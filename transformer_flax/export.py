"""Writes a trained model into one folder, to share it: python -m transformer_flax.export --workdir=runs/base OUTPUT.

With --format=safetensors, OUTPUT holds the parameters, the config and the tokenizer. Every command that uses a trained
run takes OUTPUT as --workdir. Training cannot be resumed from OUTPUT, but --config.init_from=OUTPUT starts a new run
from it. With --format=ctranslate2, OUTPUT holds a model of CTranslate2 and the tokenizer.
"""

import os
import pathlib
import sys

from absl import flags

from transformer_flax import cli
from transformer_flax.errors import UserError

RESTORE = cli.define_run(names=())
FORMAT = flags.DEFINE_enum("format", "safetensors", ["safetensors", "ctranslate2"], "what OUTPUT is to be")


def main(*outputs: str) -> None:
    if len(outputs) != 1:
        raise UserError("name one folder to write: python -m transformer_flax.export --workdir=runs/NAME OUTPUT")
    output = pathlib.Path(outputs[0])
    run, _ = RESTORE()
    run.export(output, FORMAT.value)
    size = sum(file.stat().st_size for file in output.iterdir())
    print(f"{output}: {', '.join(sorted(os.listdir(output)))}; {size / 1e6:,.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
