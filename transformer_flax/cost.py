"""Computes the cost of a config: python -m transformer_flax.cost --config=configs/big.py [--config.FIELD=VALUE ...].

Prints the parameters, the floating-point operations of a step, the memory, and the training time on devices of a given
peak rate and utilisation. Trains nothing and reads no text: the vocabulary has the size that the config names (or
the one of the model of config.init_from), and all sentences have --length tokens. --json prints exact numbers.
"""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from absl import flags

from transformer_flax import cli
from transformer_flax.arguments import define_config
from transformer_flax.console import Progress, duration
from transformer_flax.training.config_fields import AUTO, complete, flatten, needs_bfloat16
from transformer_flax.training.peak_flops import PEAKS, Peak

if TYPE_CHECKING:
    from transformer_flax.analysis.run_cost import Cost

CONFIG = define_config("base.py")
# TFLOP/s of devices without bfloat16: the sustained rates that the paper's table 2 assumes, and the peaks in float32 of
# a V100 and a T4.
OLDER = {"K80": 2.8, "K40": 3.7, "M40": 6.0, "P100": 9.5, "V100": 15.7, "T4": 8.1}
DEVICES = {**{name: Peak(name, rate * 1e12, rate * 1e12) for name, rate in OLDER.items()}, **PEAKS}
DEVICE = flags.DEFINE_enum(
    "device",
    "P100",
    [*DEVICES],
    "device to train on; for another one, set --peak_tflops instead; the paper used 8 P100",
)
NUM_DEVICES = flags.DEFINE_integer("num_devices", 8, "number of devices", 1)
PEAK = flags.DEFINE_float(
    "peak_tflops", None, "TFLOP/s of a device that --device does not list; it is taken to compute in bfloat16", 0.001
)
UTILISATION = flags.DEFINE_float(
    "utilisation", 0.3, "share of the peak that the model's products reach (MFU)", 0.001, 1.0
)
LENGTH = flags.DEFINE_integer("length", 30, "tokens of each source and target sentence, end symbol included", 2)
JSON = flags.DEFINE_bool("json", False, "print JSON instead of tables")


def _show(name: str, cost: "Cost") -> None:
    seconds = cost.days * 86_400
    with Progress() as progress:
        total = sum(cost.parameters.values())
        rows = [[module, f"{count:,}", f"{count / total:.1%}"] for module, count in cost.parameters.items() if count]
        progress.table(f"{name}: parameters", ["module", "parameters", ""], [*rows, ["all", f"{total:,}", ""]])
        forward = sum(cost.forward_flops.values())
        per_token = {**cost.forward_flops, "forward": forward, "backward": cost.step_flops - forward}
        per_token["forward and backward"] = cost.step_flops
        rows = [
            [module, f"{flops / cost.tokens_per_step / 1e6:,.2f}", f"{flops / 1e9:,.2f}"]
            for module, flops in per_token.items()
        ]
        title = f"floating-point operations, {cost.tokens_per_step:,} source and target tokens a step"
        progress.table(title, ["", "MFLOP a token", "GFLOP a step"], rows)
        memory = {**cost.memory, "all": sum(cost.memory.values())}
        rows = [[what, f"{count / 1e6:,.1f}"] for what, count in memory.items() if count]
        progress.table("memory on one device that holds all", ["", "MB"], rows)
        rows = [
            ["time", f"{seconds / 86_400:,.2f} days" if seconds > 86_400 else duration(seconds)],
            ["a step", f"{1000 * seconds / cost.steps:,.3g} ms"],
            ["tokens a second", f"{cost.tokens_per_second:,.0f}"],
            ["training, counted from the model", f"{cost.training_flops:.2g} FLOP"],
            ["training, as table 2 counts it (base 3.3e18, big 2.3e19)", f"{cost.table2_flops:.2g} FLOP"],
        ]
        progress.table(f"{cost.steps:,} steps on {cost.device}", ["", ""], rows)


def main() -> None:
    if PEAK.value is None:
        device, peak = DEVICE.value, DEVICES[DEVICE.value]
    else:
        cli.refuse_idle(["device"], "with --peak_tflops")
        device, peak = "device", Peak("device", PEAK.value * 1e12, PEAK.value * 1e12)
    config = complete(CONFIG())
    dtype = flatten(config.to_dict()).get("model.dtype")
    if dtype == AUTO:
        config.model.dtype = dtype = "bfloat16" if device not in OLDER or needs_bfloat16(config) else "float32"
    from transformer_flax.analysis.run_cost import cost_of  # after the flags are checked: JAX takes seconds to import

    cost = cost_of(
        config,
        device=device,
        peak=peak.bfloat16 if dtype == "bfloat16" else peak.float32,
        num_devices=NUM_DEVICES.value,
        utilisation=UTILISATION.value,
        length=LENGTH.value,
    )
    if JSON.value:
        json.dump({"config": config.name, **dataclasses.asdict(cost)}, sys.stdout, indent=2)
        print()
    else:
        _show(config.name, cost)


if __name__ == "__main__":
    cli.run(main)
