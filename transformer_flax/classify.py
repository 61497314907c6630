"""Classifies lines of text: python -m transformer_flax.classify --workdir=runs/trec [FILE ...] < in.txt > labels.txt.

One label out for each line in, in order. On a terminal it is a prompt. With --probabilities the label is followed by a
tab and, parted by tabs, the name and the probability of each class. Files may be plain, .gz or .xz.
"""

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from transformer_flax import cli
from transformer_flax.line_io import Streams, prompt

if TYPE_CHECKING:
    import numpy as np

RESTORE = cli.define_run(("max_input_length", "batch_size", "window"))
STREAMS = Streams()
PROBABILITIES = flags.DEFINE_bool("probabilities", False, "put the probability of each class behind the label")


def main(*files: str) -> None:
    with contextlib.ExitStack() as stack:
        inputs = STREAMS.open_inputs(stack, files)
        at_prompt = not files and sys.stdin.isatty()
        lines = prompt() if at_prompt else STREAMS.read(inputs)
        out = STREAMS.open_output(stack, inputs)

        run, settings = RESTORE()
        print(f"{run.config.name}: {run.parameters}", file=sys.stderr)
        one_by_one = {"batch_size": 1, "window": 1} if at_prompt else {}
        labeller = run.labeller(**one_by_one | settings, refuse_long=STREAMS.refuse_long)
        STREAMS.begin(out)
        progress = (lambda done: None) if at_prompt else STREAMS.watch(stack, lines, inputs)
        found = labeller.log_probabilities(lines, progress=progress)
        rate = STREAMS.put_out(out, (_show(log_probs, labeller.classes) for log_probs in found))
    if not at_prompt:
        from transformer_flax.console import counted

        print(f"{rate}; {counted(labeller.compilations, 'compilation')}", file=sys.stderr)


def _show(log_probs: "np.ndarray", classes: Sequence[str]) -> str:
    label = classes[int(log_probs.argmax())]
    if not PROBABILITIES.value:
        return label
    return "\t".join([label, *(f"{name} {math.exp(x):.4f}" for name, x in zip(classes, log_probs, strict=True))])


if __name__ == "__main__":
    cli.run(main, takes_files=True)
