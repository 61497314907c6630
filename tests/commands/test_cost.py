"""`python -m transformer_flax.cost` as a user meets it."""

import json

import pytest

from tests.commands.process import refused, succeeds

NUMBERS = "--config=configs/numbers.py"


def cost(*arguments) -> dict:
    return json.loads(succeeds("cost", "--json", *arguments).stdout)


def test_the_base_model_costs_about_what_the_paper_says():
    base = cost("--config=configs/base.py")
    assert base["config"] == "base"
    assert sum(base["parameters"].values()) == 63_045_632
    assert base["steps"] == 100_000
    # 12 hours, 3.3e18 FLOP: at 30 % of what table 2 takes a P100 to sustain, the model's own come to it.
    assert base["days"] == pytest.approx(0.5, rel=0.05)
    assert base["table2_flops"] == pytest.approx(3.3e18, rel=0.05)
    assert base["training_flops"] == pytest.approx(0.3 * base["table2_flops"])
    assert base["step_flops"] == 3 * sum(base["forward_flops"].values())
    assert base["memory"]["Adam's two moments"] == 8 * 63_045_632
    assert base["memory"]["moving average"] == 0


def test_time_follows_from_the_devices_and_memory_from_the_run():
    usual = cost(NUMBERS)
    other = cost(NUMBERS, "--peak_tflops=19", "--num_devices=2", "--utilisation=0.6", "--config.ema_decay=0.9")
    assert other["days"] == pytest.approx(usual["days"])
    assert "2 x device, 19 TFLOP/s each, of which 60% are reached" in other["device"]
    assert other["memory"]["moving average"] == other["memory"]["parameters"]
    halved = cost(NUMBERS, "--config.accumulation_steps=2", "--device=H100", "--length=16")
    assert halved["memory"]["activations"] < 0.6 * usual["memory"]["activations"]
    assert halved["tokens_per_step"] == 2 * 2048


def test_tables_are_for_people():
    shown = succeeds("cost", NUMBERS).stdout
    for part in ("decoder cross-attention", "logits", "backward", "Adam's two moments", "days", "as table 2 counts it"):
        assert part in shown


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--length=65", "config.data.max_length is 64"),
        ("--utilisation=0", "--utilisation is 0.0; it must be above 0"),
        ("--device=abacus", "abacus"),
        ("--config.model.d_model=0", "config.model.d_model is 0"),
    ],
)
def test_what_cannot_be_counted_is_refused(argument, message):
    assert message in refused("cost", NUMBERS, argument)


def test_a_device_is_named_once():
    assert "leave one of them out" in refused("cost", NUMBERS, "--device=A100", "--peak_tflops=3")
