"""Classifies lines of text: python -m transformer_flax.classify --workdir=runs/trec [FILE ...] < in.txt > labels.txt.

Each input line gives one label, in order. On a terminal, the command prompts for lines. With --probabilities, each
class adds a tab, its name, a blank and its probability to the line. Files may be plain, .gz or .xz.
"""

import math
from collections.abc import Sequence

import numpy as np
from absl import flags

from transformer_flax import cli
from transformer_flax.line_io import LineIO

RESTORE = cli.define_run(("max_input_length", "batch_size", "window"))
IO = LineIO()
PROBABILITIES = flags.DEFINE_bool("probabilities", False, "print the probability of each class after the label")


def main(*files: str) -> None:
    with IO.opened(files):
        run, settings = RESTORE()
        predictor = run.predictor(**IO.settings | settings)
        with IO.writing(predictor) as (write, progress):
            for log_probs in predictor.log_probabilities(IO, progress=progress):
                write(_show(log_probs, predictor.classes))


def _show(log_probs: np.ndarray, classes: Sequence[str]) -> str:
    label = classes[int(log_probs.argmax())]
    if not PROBABILITIES.value:
        return label
    return "\t".join([label, *(f"{name} {math.exp(x):.4f}" for name, x in zip(classes, log_probs, strict=True))])


if __name__ == "__main__":
    cli.run(main)
