"""`python -m transformer_flax.cost` as a user meets it."""

import json

import pytest

from configs import classifier, numbers
from tests.commands.process import refused, succeeds
from tests.training.small import small_config
from transformer_flax.analysis.run_cost import cost_of
from transformer_flax.errors import UserError
from transformer_flax.model.flops import activation_bytes
from transformer_flax.training.config_checks import model_config

NUMBERS = "--config=configs/numbers.py", "--config.model.num_layers=1"


def cost(peak=9.5e12, num_devices=8, utilisation=0.3, length=30, **changes):
    config = numbers.get_config()
    config.model.num_layers = 1
    config.update(changes)
    return cost_of(config, device="abacus", peak=peak, num_devices=num_devices, utilisation=utilisation, length=length)


def test_the_base_model_costs_about_what_the_paper_says():
    base = json.loads(succeeds("cost", "--json").stdout)  # of configs/base.py, unless another is named
    assert base["config"] == "base"
    assert sum(base["parameters"].values()) == 63_045_632
    assert base["steps"] == 100_000
    # 12 hours, 3.3e18 FLOP: at 30 % of what table 2 takes a P100 to sustain, the model's own come to it.
    assert base["device"] == "8 x P100, 9.5 TFLOP/s each, of which 30% are reached"
    assert base["days"] == pytest.approx(0.5, rel=0.05)
    assert base["table2_flops"] == pytest.approx(3.3e18, rel=0.05)
    assert base["training_flops"] == pytest.approx(0.3 * base["table2_flops"])
    assert base["step_flops"] == 3 * sum(base["forward_flops"].values())
    assert base["memory"]["optimizer"] == 8 * 63_045_632
    assert base["memory"]["moving average"] == 0


def test_memory_and_peak_are_those_of_the_type_that_suits_the_device_or_is_given():
    on_h100 = json.loads(succeeds("cost", *NUMBERS, "--json", "--device=H100").stdout)
    assert on_h100["memory"]["activations"] < 0.8 * cost().memory["activations"]
    unlisted, on_v100, in_float32 = (
        json.loads(succeeds("cost", *NUMBERS, "--json", *flags).stdout)
        for flags in (["--peak_tflops=989"], ["--device=V100"], ["--device=H100", "--config.model.dtype=float32"])
    )
    assert unlisted["memory"] == on_h100["memory"]
    assert "989 TFLOP/s each" in on_h100["device"]
    assert "494 TFLOP/s each" in in_float32["device"]
    assert on_v100["memory"]["activations"] == cost().memory["activations"]
    assert "15.7 TFLOP/s each" in on_v100["device"]


def test_tables_are_for_people():
    shown = succeeds("cost", *NUMBERS, "--peak_tflops=19", "--num_devices=2", "--utilisation=0.6").stdout
    for part in ("decoder/cross_attention", "logits", "backward", "optimizer", "as table 2 counts it"):
        assert part in shown
    made = cost(19e12, 2, 0.6)
    for number in (
        f"{made.step_flops / made.tokens_per_step / 1e6:,.2f}",
        f"{made.days * 86_400_000 / made.steps:,.3g} ms",
    ):
        assert number in shown
    assert "1,000 steps on 2 x device, 19 TFLOP/s each, of which 60% are reached" in shown


def test_time_follows_from_the_devices_and_memory_from_the_run():
    usual, other = cost(), cost(19e12, 2, 0.6, ema_decay=0.9)
    assert other.days == pytest.approx(usual.days)
    assert other.tokens_per_second == pytest.approx(usual.tokens_per_second)
    assert other.memory["moving average"] == other.memory["parameters"] == 4 * sum(usual.parameters.values())
    muon, schedule_free = (cost(optimizer={"name": name}).memory for name in ("muon", "schedule_free"))
    matrices = sum(count for module, count in usual.parameters.items() if module != "embedding") * 4
    moments = 2 * usual.memory["parameters"] - muon["optimizer"]  # one less for each matrix
    assert moments == pytest.approx(matrices, rel=0.02)
    assert schedule_free["moving average"] == usual.memory["parameters"]
    halved = cost(length=16, accumulation_steps=2)
    assert halved.memory["activations"] < 0.6 * usual.memory["activations"]
    assert halved.memory["gradient"] == usual.memory["gradient"]  # a micro-batch's fits where its activations were
    small = cost(length=16, accumulation_steps=8, data={"tokens_per_batch": 256}).memory
    assert small["gradient"] == 2 * usual.memory["gradient"] - small["activations"] > usual.memory["gradient"]
    assert halved.tokens_per_step == 2 * 2048  # 16 divides the slots of a batch, 30 does not
    assert usual.tokens_per_step == 2 * 64 * 30
    twice = cost(r_drop=5.0)
    assert (twice.step_flops, twice.tokens_per_step) == (2 * usual.step_flops, usual.tokens_per_step)
    assert twice.memory["activations"] == pytest.approx(2 * usual.memory["activations"], rel=0.1)
    alone = cost(length=2, data={"tokens_per_batch": 16}).memory  # fewer activations than parameters, and no sum
    assert alone["gradient"] == alone["parameters"] > alone["activations"]
    in_chunks = cost(loss_chunks=4).memory["activations"]
    logits = 4 * 64 * 30 * numbers.get_config().data.vocab_size
    assert usual.memory["activations"] - in_chunks == 3 / 4 * logits
    packed, bucketed = cost(data={"batching": "packed", "max_length": 64}), cost(length=64)
    assert packed.memory == bucketed.memory
    assert packed.step_flops == usual.step_flops


def test_a_run_that_starts_from_another_has_its_vocabulary(finished):
    config = small_config(init_from=str(finished), data__vocab_size=290)
    made = cost_of(config, device="abacus", peak=9.5e12, num_devices=1, utilisation=0.3, length=8)
    assert made.parameters["embedding"] == 300 * 16


def test_a_length_that_no_batch_has_is_refused():
    with pytest.raises(UserError, match="--length is 65; it must be at most 64, "):
        cost(length=65)
    with pytest.raises(UserError, match="--length is 33; it must be at most 32, "):  # of 256 tokens, for 8 rows
        cost(length=33, data={"tokens_per_batch": 256})


def test_a_text_that_is_classified_has_one_side_and_no_logits_of_words():
    config = classifier.get_config()
    made = cost_of(config, device="abacus", peak=9.5e12, num_devices=8, utilisation=0.3, length=32)
    assert made.tokens_per_step == config.data.tokens_per_batch
    model = model_config(config, config.data.vocab_size)
    rows = config.data.tokens_per_batch // 32
    assert made.memory["activations"] == activation_bytes(model, rows, 32, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--utilisation=0"], "--utilisation=0: it must be a number in the range [0.001, 1.0]"),
        (["--peak_tflops=0"], "--peak_tflops=0: it must be number >= 0.001"),
        (
            ["--device=abacus"],
            "--device=abacus: it must be one of K80, K40, M40, P100, V100, T4, A100, H100, H200, TPUv4, TPUv5e, "
            "TPUv5p, TPUv6e",
        ),
        (["--device=A100", "--peak_tflops=3"], "--device has no effect with --peak_tflops: leave it out"),
    ],
)
def test_flags_that_say_nothing_sensible_are_refused(arguments, message):
    assert message in refused("cost", *NUMBERS, *arguments)
