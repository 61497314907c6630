"""Several processes: as one in what they learn and tell, and never left behind by one that ends."""

import contextlib
import json
import shutil
import signal
import time
import types
from unittest import mock

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from tests.commands.test_train import refused
from tests.conftest import long
from tests.training.small import final_state, small_config, timeless, write_text
from tests.training.together import ENDING, ended, kill, together
from transformer_flax.errors import Interrupted, UserError
from transformer_flax.files import read_json_lines
from transformer_flax.training import multihost
from transformer_flax.training.loop import train
from transformer_flax.training.sharding import make_parallel
from transformer_flax.training.trainer import Trainer

CONFIG = """
from tests.training.small import small_config


def get_config():
    return small_config(**{!r})
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Overrides for a run with dropout."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "text").mkdir()
    text = str(write_text(folder / "text"))
    return {"data__path": text, "data__cache_dir": str(folder / "cache"), "eval__final_average": 2, "log__every": 3}


@pytest.fixture
def start(settings, tmp_path):
    """Starts train.py in two processes in a directory of that name."""

    def start(name, *of_the_second, program=("train.py",), **overrides):
        file = tmp_path / f"{name}.py"
        file.write_text(CONFIG.format(settings | {"parallel__num_devices": 0} | overrides))
        line = [*program, "--distributed", f"--config={file}", f"--workdir={tmp_path / name}"]
        return together(*line, second=of_the_second)

    return start


def train_alone(settings, workdir):
    """In one process, on two devices."""
    train(small_config(**settings, parallel__num_devices=2), workdir)


def begun(finished, folder):
    """A copy of a finished run as if it had been killed behind its first checkpoint."""
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints/6")
    return folder


def assert_same(path, other):
    jax.tree.map(np.testing.assert_array_equal, final_state(path, 6), final_state(other, 6))
    assert timeless(read_json_lines(path / "metrics.jsonl")) == timeless(read_json_lines(other / "metrics.jsonl"))
    for file in ("selection.json", "tokenizer.json", "translations/3.txt", "translations/6.txt"):
        assert (path / file).read_text() == (other / file).read_text()


def test_two_processes_are_as_one_with_their_devices(start, settings, tmp_path):
    with start("two") as processes:
        (status, out, _), (quiet_status, quiet_out, quiet_err) = ended(processes)
    assert (status, quiet_status) == (0, 0)
    assert "on 2 x cpu in 2 processes" in out
    assert out.count("step       6/6 ") == 1
    assert (quiet_out, quiet_err) == ("", "")

    train_alone(settings, tmp_path / "one")
    assert_same(tmp_path / "two", tmp_path / "one")
    assert [line["step"] for line in read_json_lines(tmp_path / "two/metrics.jsonl")] == [3, 3, 6, 6]
    assert len(list((tmp_path / "two").glob("events*"))) == 1


@pytest.mark.long
def test_they_go_on_where_one_has_begun_and_it_where_they_have(start, settings, tmp_path):
    train_alone(settings, tmp_path / "one")
    with start("two") as processes:
        ended(processes)
    by_one, by_two = (
        begun(tmp_path / before, tmp_path / after) for before, after in (("two", "by_one"), ("one", "by_two"))
    )
    train_alone(settings, by_one)
    with start("by_two") as processes:
        (status, out, _), (quiet_status, *_) = ended(processes)
    assert (status, quiet_status) == (0, 0)
    assert "resuming from step 3" in out
    for resumed in (by_one, by_two):
        assert_same(resumed, tmp_path / "one")


@pytest.mark.long
def test_two_processes_that_each_hold_a_share_of_the_parameters_are_as_one(start, settings, tmp_path):
    sharded = {"parallel__shard_params": True, "model__d_ff": 512}
    train_alone(settings | sharded, tmp_path / "one")
    begun(tmp_path / "one", tmp_path / "resumed")
    for name in ("two", "resumed"):
        with start(name, **sharded) as processes:
            (status, _, err), (other_status, *_) = ended(processes)
        assert (status, other_status) == (0, 0), err
        assert_same(tmp_path / name, tmp_path / "one")


HASTY = """
import runpy
from transformer_flax.training import multihost

multihost.GOODBYE_SECONDS = 1  # that the other, which prepares its text, does not answer
multihost.HEARTBEAT_SECONDS = 5
runpy.run_path("train.py", run_name="__main__")
"""


def assert_told(status, err):
    """That a process has ended because the other has: JAX ends it, or what it asks of the other fails."""
    assert status in (1, -signal.SIGABRT), err
    assert "another task died" in err or ("JaxRuntimeError" in err and "If another process has ended before" in err)


@pytest.mark.parametrize("killed", [0, long(1)])
def test_a_process_that_is_killed_ends_the_other_while_they_train(start, killed):
    with start("killed", program=("-c", HASTY), steps=1_000_000, eval__every=0) as processes:
        processes[0].wait_for("steps/s")
        assert_told(*kill(processes, killed))


def test_a_signal_to_one_ends_both_after_the_same_step_which_is_saved(start, tmp_path):
    with start("stopped", steps=1_000_000, eval__every=0, checkpoint__every=1_000_000) as processes:
        processes[0].wait_for("steps/s")
        processes[1].send_signal(signal.SIGTERM)
        (status, _, err), (other_status, *_) = ended(processes)
    assert (status, other_status) == (143, 143)
    assert err.count("stopped by SIGTERM after step") == 1
    [saved] = [folder.name for folder in (tmp_path / "stopped/checkpoints").iterdir()]
    assert f"after step {int(saved):,}, which is saved" in err


@pytest.mark.long
def test_a_signal_to_one_ends_both_while_the_first_translates(start):
    slow = {"decode__batch_size": 1, "decode__beam_size": 8, "decode__max_extra_length": 1_000}
    with start("evaluated", steps=1, eval__every=0, **slow) as processes:
        processes[0].wait_for("evaluating the parameters of step 1")
        processes[1].send_signal(signal.SIGTERM)
        (status, out, err), (other_status, _, other_err) = ended(processes)
    assert (status, other_status) == (143, 143)
    assert "stopped by SIGTERM while evaluating step 1, which is saved" in err
    assert "stopped" not in other_err
    assert "valid: loss" not in out


def test_what_the_first_refuses_ends_all_with_one_message(start):
    with start("refused", data__path="/nowhere") as processes:
        (status, _, err), (other_status, _, other_err) = ended(processes)
    assert (status, other_status) == (2, 2)
    assert "/nowhere" in err
    assert other_err == ""


SCRIPT = """
import argparse, sys, time
from transformer_flax.errors import Interrupted
from transformer_flax.training import multihost

parser = argparse.ArgumentParser()
parser.add_argument("doing")
parser.add_argument("--coordinator")
parser.add_argument("--num_processes", type=int)
parser.add_argument("--process_id", type=int)
args = parser.parse_args()
multihost.HEARTBEAT_SECONDS = 5


def work(seconds=1000):
    if args.process_id == 0:
        print("working", flush=True)
    time.sleep(seconds)


def main():
    if args.doing == "prepare":
        multihost.first_ahead(work)
    elif args.doing == "evaluate":
        multihost.from_first(work)
    elif args.doing == "fetch":
        multihost._POLL_SECONDS = 0.02  # too short for the value, as a second is for others on a busy machine
        print(len(multihost.from_first(lambda: "x" * 50_000_000)))
    elif args.doing == "fail":
        if args.process_id == 1:
            raise RuntimeError("a defect")
        work()
    elif args.doing == "end":
        if args.process_id == 0:
            work(seconds=3)
            raise SystemExit("the disk is full")
    elif args.doing.startswith("stop"):
        for step in range(1, 20):
            multihost.first_ahead(lambda: None)  # as steps do that all make together
            if multihost.agreed_stop(asked=args.process_id == 1 and step >= 5):
                break
            if args.doing == "stop, but fail before" and args.process_id == 1 and multihost._group.stop_at:
                raise RuntimeError("a defect")
        print("stopped after", step, flush=True)
        raise Interrupted("stopped", 15)


try:
    with multihost.joined(args.coordinator, args.num_processes, args.process_id):
        main()
except Interrupted as interruption:
    sys.exit(interruption.exit_status)
"""


@contextlib.contextmanager
def killed(doing, index):
    """One of two is killed while the other waits for the first, or is it."""
    with together("-c", SCRIPT, doing) as processes:
        processes[0].wait_for("working")
        processes[index].send_signal(signal.SIGKILL)
        deadline = time.monotonic() + ENDING
        yield
        processes[1 - index].wait(deadline - time.monotonic())
        assert_told(processes[1 - index].status, processes[1 - index].err)


@contextlib.contextmanager
def defect(doing):
    """One fails while the other works, or behind a step."""
    with together("-c", SCRIPT, doing) as processes:
        began = time.monotonic()
        yield
        (status, _, err), (other_status, _, other_err) = ended(processes, began)
    assert other_status == 1
    assert "RuntimeError: a defect" in other_err
    assert_told(status, err)


@contextlib.contextmanager
def failure_of_the_first():
    """The first fails when the other has finished."""
    with together("-c", SCRIPT, "end") as processes:
        began = time.monotonic()
        yield
        results = ended(processes, began)
    assert results == [(1, "working\n", "the disk is full\n"), (1, "", "")]


@contextlib.contextmanager
def not_shared(start, flag, message):
    """The second has another value of a flag."""
    with start("here", flag, program=("-c", HASTY)) as processes:
        began = time.monotonic()
        yield
        (status, _, err), (other_status, _, other_err) = ended(processes, began)
    assert other_status == 2
    assert message in other_err
    assert_told(status, err)


def test_the_end_of_one_process_ends_the_other(start):
    with (  # each begins here, and asserts behind `pass`, the last first: so all wait at once for a heartbeat
        defect("fail"),
        failure_of_the_first(),
        not_shared(start, "--config.seed=1", "process 1 of 2 has another config than process 0"),
        killed("prepare", 1),
    ):
        pass


@pytest.mark.long
def test_the_end_of_one_process_ends_the_other_in_other_places(start):
    elsewhere = "which process 0 has written; --workdir must lie in a file system that all"
    with (
        defect("stop, but fail before"),
        not_shared(start, "--workdir=elsewhere", elsewhere),
        killed("prepare", 0),
        killed("evaluate", 0),
        killed("evaluate", 1),
    ):
        pass


@pytest.mark.long
def test_a_value_may_take_longer_to_fetch_than_the_others_wait_at_a_time():
    with together("-c", SCRIPT, "fetch") as processes:
        results = ended(processes)
    assert results == [(0, "50000000\n", "")] * 2


@pytest.mark.long
def test_all_stop_after_one_step_when_one_is_asked_to():
    with together("-c", SCRIPT, "stop") as processes:
        (status, out, err), (other_status, other_out, other_err) = ended(processes)
    assert (status, other_status) == (143, 143)
    assert (err, other_err) == ("", "")
    assert out == other_out
    assert 5 <= int(out.split()[-1]) <= 8


class Store:
    """The key-value store of processes that are all played by this one."""

    def __init__(self):
        self.values, self.awaited = {}, []

    def key_value_set(self, key, value, allow_overwrite):
        self.values[key] = value

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        self.awaited.append(key)
        assert len(self.awaited) < 9, "waits in vain"
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")


def test_all_stop_after_the_same_step_also_where_the_first_is_behind(monkeypatch):
    store = Store()
    first, other = (multihost._Group(index, 2, store) for index in (0, 1))

    def stops(group, asked=False):
        monkeypatch.setattr(multihost, "_group", group)
        return multihost.agreed_stop(asked)

    assert [stops(other, asked=True), stops(other), stops(first)] == [False] * 3  # the first is one step behind
    assert [stops(other), stops(first), stops(first)] == [True, False, True]  # each in its third


def test_what_the_first_does_alone_does_not_count_towards_the_step_after_which_all_stop(monkeypatch):
    group, counts = multihost._Group(0, 2, Store()), []
    monkeypatch.setattr(multihost, "_group", group)

    def evaluator(params, check, max_sentences):
        for alone in (False, True, True, False):  # a batch of the loss, two of translations, a batch of the next split
            check(alone=alone)
            counts.append(group.stop_calls)
        return mock.MagicMock()

    trainer = mock.MagicMock(_evaluated_params=lambda *_: (None, mock.MagicMock()))
    trainer._metrics.has.return_value = trainer.interruption.asked = False
    trainer.programs.evaluators = {"valid": evaluator}
    Trainer.evaluate(trainer, None, 3)
    assert counts == [1, 1, 1, 2]


def test_the_first_prepares_before_the_others_and_begins_with_the_last_of_them(monkeypatch):
    for index, others, awaited in (
        (0, ["published/2/1", "published/2/2"], ["made", "published/2/1", "published/2/2"]),
        (2, ["published/1", "published/2/0"], ["published/1", "made", "published/2/0"]),
    ):
        store = Store()
        store.values = dict.fromkeys([*others, *(f"{key}/value" for key in others)], '{"value": null}')
        monkeypatch.setattr(multihost, "_group", multihost._Group(index, 3, store))
        multihost.first_ahead(lambda store=store: store.awaited.append("made"))
        assert store.awaited == awaited
        assert f"published/2/{index}" in store.values


@pytest.mark.parametrize("error", [UserError("no room"), Interrupted("stopped", 15)])
def test_what_ends_the_first_ends_those_that_wait_for_it_and_they_look_meanwhile_whether_they_are_asked(
    monkeypatch, error
):
    def fail():
        raise error

    store = Store()
    for index, check in ((1, fail), (0, fail), (1, lambda: None)):  # before the first has begun, it, and behind it
        monkeypatch.setattr(multihost, "_group", multihost._Group(index, 2, store))
        with pytest.raises(type(error), match=str(error)) as raised:
            multihost.from_first(fail, check)
        assert multihost._status(raised.value) == {UserError: 2, Interrupted: 143}[type(error)]


def test_a_message_is_left_to_the_first_only_where_it_has_the_same(monkeypatch):
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    own = {"message": "no room", "status": 2}
    other = own | {"message": "damaged"}
    for index, firsts, is_left in ((1, own, True), (1, other, False), (1, None, False), (0, own, False)):
        store = Store()
        store.values = {"end/0": "", "end/0/value": json.dumps(firsts), "end/1": ""}
        assert multihost._leave_after(UserError("no room"), multihost._Group(index, 2, store)) == is_left


def test_a_process_ends_with_the_status_that_its_error_would_have_given_it():
    errors = SystemExit(), SystemExit(3), SystemExit("the disk is full"), KeyboardInterrupt(), RuntimeError()
    assert [*map(multihost._status, errors)] == [0, 3, 1, 130, 1]


def test_processes_that_no_cluster_has_started_are_told_what_to_give(tmp_path):
    message = refused("--distributed", f"--workdir={tmp_path}")
    assert "--coordinator=HOST:PORT --num_processes=N --process_id=0 ... N-1" in message
    assert "HOST:PORT" in refused("--distributed", "--coordinator=here", "--num_processes=2", "--process_id=0")
    assert "--process_id has no effect without --distributed" in refused("--process_id=0")


@pytest.mark.parametrize(
    ("config", "processes", "message"),
    [
        ({"mode": "jit", "num_devices": 2}, [0, 0, 1, 1], "num_devices is 2; there are 4 .*; 0 takes all"),
        ({"mode": "jit", "num_devices": 0}, [0, 1, 1], r"process 0: 1, process 1: 2\); they must have the same"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(monkeypatch, config, processes, message):
    devices = [
        types.SimpleNamespace(process_index=index, id=id, device_kind="cpu") for id, index in enumerate(processes)
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(UserError, match=message):
        make_parallel(ConfigDict({"shard_params": False} | config), 8, 1)


def test_rows_are_divided_in_the_order_of_processes_whatever_the_ids_of_their_devices(monkeypatch):
    devices = [types.SimpleNamespace(process_index=index, id=id) for id, index in enumerate([1, 0, 1, 0])]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    config = ConfigDict({"mode": "jit", "num_devices": 0, "shard_params": False})
    assert [device.id for device in make_parallel(config, 8, 1).devices] == [1, 3, 0, 2]
