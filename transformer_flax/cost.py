"""What a config costs to train: python -m transformer_flax.cost --config=configs/big.py [--config.FIELD=VALUE ...].

Its parameters, the floating-point operations of a step, the memory, and the time of the whole training on devices of a
given peak rate, of which a given share is reached. Nothing is run and no text is read: the vocabulary is as large as
the config says, and all sentences are as long as --length says. `--json` puts out the numbers, exactly.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np
from absl import flags

from transformer_flax import cli
from transformer_flax.errors import UserError

CONFIG = cli.define_config(pathlib.Path("configs/base.py"))
# TFLOP/s. Of NVIDIA's P100 and those before it, what the paper's table 2 takes for sustained; of those after, and of
# TPUs, the makers' peaks of dense products in 16 bits.
DEVICES = {
    "K80": 2.8,
    "K40": 3.7,
    "M40": 6.0,
    "P100": 9.5,
    "V100": 125.0,
    "A100": 312.0,
    "H100": 989.0,
    "TPUv4": 275.0,
    "TPUv5e": 197.0,
    "TPUv5p": 459.0,
}
DEVICE = flags.DEFINE_enum("device", "P100", DEVICES, "what to train on; the paper had 8 P100")
NUM_DEVICES = flags.DEFINE_integer("num_devices", 8, "how many of them", 1)
PEAK = flags.DEFINE_float("peak_tflops", None, "TFLOP/s of one device, for one that --device does not know")
UTILISATION = flags.DEFINE_float(
    "utilisation", 0.3, "share of the peak that the model's products reach (MFU)", 0.0, 1.0
)
LENGTH = flags.DEFINE_integer("length", 30, "tokens of each sentence, the end symbol included, on both sides", 2)
JSON = flags.DEFINE_bool("json", False, "put out JSON instead of tables")


@dataclasses.dataclass(frozen=True)
class Cost:
    """All that is told, in bytes, seconds and floating-point operations."""

    parameters: dict[str, int]  # by module
    tokens_per_step: int  # source and target, of full batches
    forward_flops: dict[str, int]  # of a step, by module
    step_flops: int  # forward and backward
    memory: dict[str, int]  # bytes, on one device that held all
    steps: int
    training_flops: int  # of the whole training, as the model counts them
    table2_flops: float  # as the paper's table 2 counts: time x devices x the rate that a device can sustain
    device: str
    tokens_per_second: float
    days: float

    @property
    def backward_flops(self) -> int:
        return self.step_flops - sum(self.forward_flops.values())


def cost_of(config: Any, *, device: str, peak: float, num_devices: int, utilisation: float, length: int) -> Cost:
    """The cost of a run's config.

    Args:
      config: the run's.
      device: what it is trained on, in words.
      peak: floating-point operations a second of one device.
      num_devices: how many there are.
      utilisation: the share of the peak that the model's products reach, above 0.
      length: tokens of every sentence.

    Raises:
      UserError: about the config, or a length that no batch can have.
    """
    from transformer_flax.model.cost import activation_bytes, count_modules, forward_flops, training_flops
    from transformer_flax.training.prepare import check, model_config

    check(config)
    model, data = model_config(config, config.data.vocab_size), config.data
    rows = data.tokens_per_batch // length // data.rows_multiple_of * data.rows_multiple_of
    if length > data.max_length or rows == 0:
        raise UserError(
            f"--length is {length}; config.data.max_length is {data.max_length} and a batch has tokens_per_batch="
            f"{data.tokens_per_batch} slots a side, in rows by {data.rows_multiple_of}"
        )
    lengths = np.full(rows, length)
    parameters = count_modules(model)
    step_flops = training_flops(model, lengths, lengths)
    total = 4 * sum(parameters.values())  # float32
    step_seconds = step_flops / (num_devices * peak * utilisation)
    return Cost(
        parameters=parameters,
        tokens_per_step=2 * rows * length,
        forward_flops=forward_flops(model, lengths, lengths),
        step_flops=step_flops,
        memory={
            "parameters": total,
            "gradient": total,
            "Adam's two moments": 2 * total,
            "moving average": total if config.ema_decay else 0,
            "activations": activation_bytes(
                model, rows // config.accumulation_steps, length, length, loss_chunks=config.loss_chunks
            ),
        },
        steps=config.steps,
        training_flops=config.steps * step_flops,
        table2_flops=config.steps * step_seconds * num_devices * peak,
        device=f"{num_devices} x {device}, {peak / 1e12:g} TFLOP/s each, of which {utilisation:.0%} are reached",
        tokens_per_second=2 * rows * length / step_seconds,
        days=config.steps * step_seconds / 86_400,
    )


def _show(name: str, cost: Cost) -> None:
    from transformer_flax.training.progress import Progress

    with Progress() as progress:
        total = sum(cost.parameters.values())
        rows = [[module, f"{count:,}", f"{count / total:.1%}"] for module, count in cost.parameters.items() if count]
        progress.table(f"{name}: parameters", ["module", "parameters", ""], [*rows, ["all", f"{total:,}", ""]])
        per_token = {**cost.forward_flops, "forward": cost.step_flops - cost.backward_flops}
        per_token |= {"backward": cost.backward_flops, "forward and backward": cost.step_flops}
        progress.table(
            f"floating-point operations, {cost.tokens_per_step:,} tokens a step",
            ["", "MFLOP a token", "TFLOP a step"],
            [
                [module, f"{flops / cost.tokens_per_step / 1e6:,.2f}", f"{flops / 1e12:,.4f}"]
                for module, flops in per_token.items()
            ],
        )
        memory = {**cost.memory, "all": sum(cost.memory.values())}
        progress.table(
            "memory on one device that holds all",
            ["", "MB"],
            [[what, f"{count / 1e6:,.1f}"] for what, count in memory.items() if count],
        )
        progress.table(
            f"{cost.steps:,} steps on {cost.device}",
            ["", ""],
            [
                ["time", f"{cost.days:,.2f} days"],
                ["a step", f"{cost.days * 86_400 / cost.steps:.3f} s"],
                ["tokens a second, source and target", f"{cost.tokens_per_second:,.0f}"],
                ["training, counted from the model", f"{cost.training_flops:.2g} FLOP"],
                ["training, as table 2 counts it (base 3.3e18, big 2.3e19)", f"{cost.table2_flops:.2g} FLOP"],
            ],
        )


def main() -> None:
    for name, value in (("utilisation", UTILISATION.value), ("peak_tflops", PEAK.value)):
        if value is not None and not value > 0:
            raise UserError(f"--{name} is {value}; it must be above 0")
    if PEAK.value is not None and flags.FLAGS["device"].present:
        raise UserError("--peak_tflops is for a device that --device does not know: leave one of them out")
    cost = cost_of(
        CONFIG.value,
        device="device" if PEAK.value else DEVICE.value,
        peak=1e12 * (PEAK.value or DEVICES[DEVICE.value]),
        num_devices=NUM_DEVICES.value,
        utilisation=UTILISATION.value,
        length=LENGTH.value,
    )
    if JSON.value:
        json.dump({"config": CONFIG.value.name, **dataclasses.asdict(cost)}, sys.stdout, indent=2)
        print()
    else:
        _show(CONFIG.value.name, cost)


if __name__ == "__main__":
    cli.run(main)
