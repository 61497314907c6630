"""Metrics are summed, divided once and written; the peaks of devices are known or measured."""

import json
import math
import os
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest

from tests.conftest import ROOT
from tests.disks import files_up_to
from tests.training.small import small_config
from transformer_flax.ablation.expected_cost import assumed_flops
from transformer_flax.ablation.variants import make_variants
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.model.flops import training_flops
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.metrics import Event, Meter, MetricsWriter, SessionLog
from transformer_flax.training.peak_flops import data_sheet_flops, large_product, measured_flops
from transformer_flax.training.run_directory import is_out_of_patience
from transformer_flax.training.step import Metrics as StepMetrics
from transformer_flax.training.trainer import Trainer


def test_means_are_of_all_tokens_not_of_steps():
    meter = Meter()
    meter.add({"loss": 10.0, "nll": 8.0}, {"loss": 1.0, "nll": 1.0})
    meter.add({"loss": 2.0, "nll": 1.0}, {"loss": 3.0, "nll": 3.0})
    assert meter.means() == {"loss": 3.0, "perplexity": pytest.approx(math.exp(9 / 4))}


def test_rates_are_of_the_time_that_was_added():
    meter = Meter()
    assert meter.rates() == {}
    meter.add_time(0.5, 100, 5000)
    meter.add_time(1.5, 300, 7000)
    assert meter.rates() == {"steps_per_second": 1.0, "tokens_per_second": 200.0, "flops_per_second": 6000.0}


def test_the_lines_of_evaluations_say_what_was_evaluated_also_when_a_run_goes_on(tmp_path):
    def opened(step):
        return MetricsWriter(tmp_path / "metrics.jsonl", step, score="bleu", send=lambda line: None)

    values = {"loss": 2.0, "bleu": 30.0, "averaged": 1}
    writer = opened(0)
    writer.write(10, "train", {"loss": 1.0})
    writer.write(10, "valid", values)
    writer.write(20, "valid", values | {"loss": 1.5, "averaged": 2})
    writer.write(30, "valid", values | {"loss": 0.1, "final": 1})
    writer.close()
    writer = opened(30)
    writer.write(40, "valid", values | {"loss": 0.5, "bleu": 31.0})
    assert writer.scores() == {10: 30.0, 40: 31.0}  # of parameters that a checkpoint holds
    # 0.5 is better than 2.0 and 1.5; the final evaluation does not count.
    assert not is_out_of_patience(writer.written, 1)
    writer.write(50, "valid", values | {"loss": 0.5})  # no better
    assert [is_out_of_patience(writer.written, patience) for patience in (0, 1, 2)] == [False, True, False]
    assert MetricsWriter(tmp_path / "metrics.jsonl", 50, score="chrf").scores() == {}  # older lines have no such score
    assert [step for step in (10, 20, 30, 40) if writer.has(step, "valid")] == [10, 20, 40]
    assert [step for step in (10, 20, 30, 40) if writer.has(step, "valid", final=True)] == [30]
    assert not writer.has(10, "test")
    writer.close()


def test_r_drop_computes_every_token_twice_in_rates_and_plans():
    once, twice = make_variants(small_config(), "base,r-drop")
    lengths = {"source": np.array([3, 5]), "target": np.array([4, 2])}
    model = model_config(once.config, once.config.data.vocab_size)
    for variant, passes in ((once, 1), (twice, 2)):
        trainer = mock.Mock(meter=Meter())
        trainer.run.config = variant.config
        trainer.run.train.lengths.return_value, trainer.programs.model.config = lengths, model
        Trainer.add_time(trainer, 1, 0.5)
        trainer.run.train.lengths.assert_called_once_with(0)
        rates = trainer.meter.rates()
        assert rates["tokens_per_second"] == 14 / 0.5  # which the batch has once
        assert rates["flops_per_second"] == passes * training_flops(model, *lengths.values()) / 0.5
        assert assumed_flops(variant) == passes * assumed_flops(once)


def test_a_skipped_batch_is_written_as_its_own_step_had_it_spelt():
    trainer = mock.MagicMock()
    trainer.run.config.max_skipped = 2
    trainer.run.train.pairs = lambda k: np.array([10 * k])
    trainer.run.train.corpus_of = lambda k: mock.Mock(source={10 * k: np.array([k])}, target={10 * k: np.array([k, 2])})
    Trainer.read(trainer, StepMetrics({"loss": np.nan}, {"loss": 4.0}, np.inf, 1, 1), 7)  # of batch 6
    (line,) = trainer._skipped.write.call_args.args
    assert line == {"step": 7, "loss": "nan", "grad_norm": "inf", "pairs": [60], "source": [[6]], "target": [[6, 2]]}
    trainer.meter.add.assert_not_called()


@pytest.mark.parametrize(("backend", "share"), [("gpu", 4), ("cpu", 1)])  # devices of a CPU share all its cores
def test_a_log_has_the_rate_of_the_next_update_and_a_devices_share_of_its_peak(monkeypatch, backend, share):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr("transformer_flax.training.trainer.measured_flops", {"float32": 1e5}.get)
    monkeypatch.setattr("transformer_flax.training.trainer.data_sheet_flops", lambda kind, dtype: 4e5)
    trainer = mock.MagicMock(_runs_at_once=2, meter=Meter(), _label="")
    trainer.run.config, trainer._parallel.num_devices = small_config(), 4
    trainer.programs.schedule, trainer.seconds_left.return_value = float, 0.0
    for skipped_in_a_row, updates in ((0, 4), (1, 5)):  # of 7 steps, 2 are skipped, the last of them or not
        trainer.meter.add_time(0.5, 100, 5_000)
        Trainer.log(trainer, StepMetrics({}, {}, 1.5, 2, skipped_in_a_row), 7)
        step, _, line = trainer._metrics.write.call_args.args
        assert (step, line["learning_rate"], line["grad_norm"], line["skipped"]) == (7, updates, 1.5, 2)
        assert (line["flops_per_second"], line["tokens_per_second"], line["seeds_at_once"]) == (1e4, 200, 2)
        assert (line["mfu"], line["mfu_data_sheet"]) == (2e4 / share / 1e5, 2e4 / share / 4e5)
        assert not trainer.meter.rates()  # the next log is of the steps behind this one


@pytest.mark.parametrize(
    ("settings", "scored"),
    [({}, True), ({"eval__average": 2}, False), ({"eval__average": 2, "ema_decay": 0.9}, True)],
    ids=str,
)
def test_the_best_checkpoint_is_kept_where_no_evaluation_is_of_several(settings, scored):
    trainer = mock.Mock()
    trainer.run.config = small_config(**settings)
    Trainer.prune(trainer, 10)
    trainer.checkpoints.prune.assert_called_once_with(10, trainer._metrics.scores.return_value if scored else {})


def test_what_must_be_saved_is_saved_again_where_that_was_not_written_or_ends_the_run():
    for steps, again in (([3, 5], []), ([3], [mock.call("state", must=True)])):
        trainer = mock.Mock()
        trainer.checkpoints.steps.return_value = steps
        Trainer.require_saved(trainer, "state", 5)
        assert trainer.save.mock_calls == again
        assert trainer._wait.mock_calls == [mock.call(must=True)] * (1 + len(again))
    trainer.run.config = small_config(on_write_failure="go on")
    with Trainer._writing(trainer):
        raise UserError("no room")
    trainer.say.assert_called_once_with("WARNING: no room; the run continues without it")
    with pytest.raises(UserError, match="no room"), Trainer._writing(trainer, must=True):
        raise UserError("no room")


def test_on_resuming_what_was_written_after_the_checkpoint_is_cut_off(tmp_path):
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(file, 0, score="bleu")
    for step in (10, 20, 30):
        writer.write(step, "train", {"loss": step / 2})
    writer.close()
    with file.open("a") as stream:
        stream.write('{"step": 40, "train/lo')  # killed while writing
    resumed = MetricsWriter(file, 20, score="bleu")
    resumed.write(30, "train", {"loss": 1.0})
    resumed.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(10, 5.0), (20, 10.0), (30, 1.0)]
    assert lines[2]["seconds"] >= lines[1]["seconds"]
    assert read_json_lines(file) == [{name: line[name] for name in line if name != "crc32"} for line in lines]
    later = MetricsWriter(file, 30, score="bleu", seconds=900.0)  # saved after the last line
    assert 900 <= later.seconds < 990
    later.close()


def test_on_resuming_tensorboard_is_told_to_drop_what_it_has_of_later_steps(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl", 20, score="bleu").close()
    [file] = tmp_path.glob("events.*")
    content, events = file.read_bytes(), []
    while content:  # a record: its length in 8 bytes, 4 bytes of a checksum, the event, 4 bytes of a checksum
        end = 12 + int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12:end]))
        content = content[end + 4 :]
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == [21]


def test_events_that_do_not_fit_on_the_disk_are_told_of_once(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0, score="bleu")
    with files_up_to(230):  # enough for the line and not for its event
        with pytest.raises(UserError, match="TensorBoard events cannot be written: File too large"):
            writer.write(1, "train", {f"{index}": index for index in range(10)})
        writer.close()
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [1]


def test_totals_are_of_the_moment_and_another_meter_goes_on_from_them():
    meter, other = Meter(), Meter()
    meter.add({"loss": 1 / 3}, {"loss": 1.0})
    totals = meter.totals
    meter.add({"loss": 0.1}, {"loss": 2.0})
    assert totals == {"sums": {"loss": 1 / 3}, "counts": {"loss": 1.0}}
    other = Meter(totals)
    other.add({"loss": 0.1}, {"loss": 2.0})
    assert other.means() == meter.means()
    assert totals["counts"] == {"loss": 1.0}


def test_the_data_sheets_know_a_device_by_the_beginning_of_its_name():
    assert data_sheet_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert data_sheet_flops("TPU v5 lite", "float32") == 197e12
    assert data_sheet_flops("TPU v5p", "bfloat16") == 459e12
    assert data_sheet_flops("cpu", "float32") is None


def test_the_peak_is_a_rate_that_this_machine_can_have():
    product, flops = large_product("float32", repeats=2)
    assert product().shape == (2048, 2048)
    assert flops == 2 * 2 * 2048**3
    assert 1e9 < measured_flops("float32") < 1e15


def test_training_does_not_load_pytorch_where_it_is_installed(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch is loaded')")
    script = "import sys, transformer_flax.training.metrics; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=True)
