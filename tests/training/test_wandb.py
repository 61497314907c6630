"""Metrics at Weights & Biases, in its offline mode."""

import contextlib
import json
import struct
import sys
from unittest import mock

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from tests.training.small import small_config
from transformer_flax.console import Progress
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import checked_config
from transformer_flax.training.trainer import Trainer
from transformer_flax.training.wandb_run import WandbRun


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # it reads the environment once
    yield
    wandb.teardown()


def records(file) -> list[Record]:
    """The records of an offline run, each small enough for one chunk of LevelDB's log format."""
    data, at, found = file.read_bytes(), 7, []  # behind the header
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a record in several chunks"
        found.append(Record.FromString(data[at + 7 : at + 7 + length]))
        at += 7 + length
    return found


def offline_runs(folder) -> list[tuple[dict, list[dict]]]:
    """The description and the lines of each run."""
    wandb.teardown()  # its process may still be writing
    runs = []
    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        read = records(file)
        [run] = [record.run for record in read if record.HasField("run")]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        lines = [
            {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for record in read
            if record.HasField("history")
        ]
        [ended] = [record.exit.exit_code for record in read if record.HasField("exit")]
        axes = [record.metric.step_metric for record in read if record.HasField("metric")]
        described = {
            "ended": ended,
            "axes": axes,
            "id": run.run_id,
            "project": run.project,
            "name": run.display_name,
            "config": config,
        }
        runs.append((described, [{k: v for k, v in line.items() if not k.startswith("_")} for line in lines]))
    return runs


@contextlib.contextmanager
def opened(path, seed):
    """The trainer of a run, while it is trained."""
    unused, path = mock.Mock(task=mock.Mock(outputs="translations", score="bleu")), path / f"seed{seed}"
    path.mkdir(parents=True, exist_ok=True)
    run = mock.Mock(config=small_config(seed=seed, log__wandb="mine"), directory=RunDirectory(path))
    with Trainer(run, unused, unused, Progress(), unused, start=2) as trainer:
        yield trainer


def test_each_seed_is_one_run_there_which_is_continued(tmp_path, monkeypatch):
    given, init = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **settings: given.append(settings) or init(**settings))
    for step in (2, 3):  # of two sessions
        with (
            contextlib.suppress(KeyError),
            opened(tmp_path, 0) as first,  # as seeds that are trained together
            opened(tmp_path, 1) as second,
        ):
            for trainer in (first, second):
                trainer._metrics.write(step, "train", {"learning_rate": 0.5})
                trainer._metrics.write(step + 1, "train", {"learning_rate": 0.25})  # step 3 a second time
            if step == 3:
                raise KeyError
    monkeypatch.setattr("transformer_flax.training.wandb_run.is_first", lambda: False)  # another process of a run
    with opened(tmp_path, 2):
        assert not (tmp_path / "seed2/wandb.json").exists()
    assert [settings["resume"] for settings in given] == ["allow"] * 4  # otherwise a session deletes those before
    sent = sorted(offline_runs(tmp_path), key=lambda run: (run[0]["name"], run[1][0]["step"]))
    assert [(run["name"], run["project"], run["config"]["seed"]) for run, _ in sent] == [
        (str(tmp_path / f"seed{seed}"), "mine", seed) for seed in (0, 0, 1, 1)
    ]
    assert [(run["ended"], run["axes"]) for run, _ in sent] == [(status, ["step"]) for status in (0, 1, 0, 1)]
    ids = [run["id"] for run, _ in sent]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    for i in (1, 3):
        written = read_json_lines(RunDirectory(sent[i][0]["name"]).metrics_file)
        assert [line["step"] for line in written] == [2, 3, 4]
        assert [*sent[i - 1][1][:1], *sent[i][1]] == written


@pytest.mark.parametrize("method", ["init", "log", "finish"])
def test_a_failure_there_is_said_once_and_does_no_harm(tmp_path, monkeypatch, method):
    def fail(*_, **__):
        raise RuntimeError("no such host")

    monkeypatch.setattr(*((wandb, "init") if method == "init" else (wandb.Run, method)), fail)
    said = []
    run = WandbRun(small_config(log__wandb="mine"), RunDirectory(tmp_path), said.append)
    run.send({"step": 1, "seconds": 0.5, "train/loss": 2.0})
    run.send({"step": 2, "seconds": 1.5, "train/loss": 1.0})
    run.close(failed=False)
    assert said == ["WARNING: Weights & Biases: no such host; the run continues without it"]


def test_without_wandb_a_run_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    checked_config(small_config())
    with pytest.raises(UserError, match=r"config\.log\.wandb needs wandb .*pip install wandb"):
        checked_config(small_config(log__wandb="mine"))
