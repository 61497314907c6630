"""Checkpoints on real disks, full ones among them."""

import asyncio
import json
import threading
import time
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.disks import mounted
from tests.training.small import small_config, write_text
from tests.training.states import OPTIMIZER, state_at
from transformer_flax.console import Progress
from transformer_flax.errors import UserError
from transformer_flax.training.checkpoint_files import (
    METADATA,
    UnreadableError,
    _settled_loops,
    fingerprint,
    saved_steps,
)
from transformer_flax.training.checkpoints import Checkpoints, resume_or_begin
from transformer_flax.training.step import TrainState
from transformer_flax.training.vectorized_seeds import train_seeds


def save(checkpoints, step, scores=None):
    checkpoints.save(state_at(step), {})
    checkpoints.wait()
    checkpoints.prune(step, scores or {})


def test_the_latest_and_the_best_are_kept_by_separate_rules(tmp_path):
    scores = {}
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=10, keep=2, seed=0)
    for step, bleu in ((10, 30.0), (13, 30.0), (20, None), (25, 20.0), (30, None), (40, None), (47, 5.0)):
        save(checkpoints, step, scores)
        if bleu is not None:
            scores[step] = bleu  # it is measured after the step is saved
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", every=10, keep=2, seed=0)
    assert not list(tmp_path.rglob("_sharding"))  # it takes time and is not read
    assert again.steps() == [13, 30, 40, 47]  # the newer of the best, two at the interval, and one that is not
    assert float(again.restore(state_at(0), 13)[0].params["w"][0]) == 13
    again.close()


def test_the_folder_may_have_any_name_that_is_no_pattern(tmp_path):
    directory = tmp_path / "ä 100%20={x},'1'\":#~@$!;&|<>(2)\n" / "checkpoints"
    checkpoints = Checkpoints(directory, every=10, keep=2, seed=0)
    save(checkpoints, 10)
    assert float(checkpoints.restore(state_at(0), 10)[0].params["w"][0]) == 10
    checkpoints.close()


def test_what_an_interruption_saves_evicts_nothing_and_goes_with_the_next_regular_one(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=10, keep=2, seed=0)
    seen = []
    for step in (10, 20, 25, 27, 30, 40):
        save(checkpoints, step)
        seen.append(saved_steps(tmp_path / "checkpoints"))
    assert seen == [[10], [10, 20], [10, 20, 25], [10, 20, 25, 27], [20, 30], [30, 40]]
    checkpoints.close()


def test_without_regular_ones_the_latest_two_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=100, keep=2, seed=0)
    for step in range(1, 6):
        save(checkpoints, step, {2: 30.0, 3: 20.0})
    assert checkpoints.steps() == [2, 4, 5]
    checkpoints.close()


def test_nothing_is_deleted_before_its_successor_is_there_for_all(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=10, keep=1, seed=0)
    seen = []
    for step in (10, 13, 20, 23):
        checkpoints.save(state_at(step), {})
    checkpoints.wait()
    for newest in (0, 10, 13, 20, 23):  # of others that are trained with it
        checkpoints.prune(newest, {})
        seen.append(saved_steps(tmp_path / "checkpoints"))
    assert seen == [[10, 13, 20, 23]] * 3 + [[20, 23]] * 2
    assert checkpoints.steps() == [20, 23]
    checkpoints.save(state_at(30), {})
    checkpoints.close()
    assert saved_steps(tmp_path / "checkpoints") == [20, 23, 30]


def test_what_was_measured_is_saved_to_the_last_digit(tmp_path):
    totals = {"sums": {"loss": 1 / 3, "nll": 1e300}, "counts": {"loss": 7.0, "nll": 0.1}}
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, keep=1, seed=0)
    checkpoints.save(state_at(1), totals)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", every=1, keep=1, seed=0)
    assert again.restore(state_at(0), 1)[1] == totals
    again.close()


def test_every_part_of_a_state_is_compared_with_its_seal(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, keep=1, seed=0)
    checkpoints.save(state_at(1), {})
    checkpoints.wait()
    file = tmp_path / "checkpoints/1" / METADATA
    written = json.loads(file.read_text())
    sealed = json.loads(written["custom_metadata"]["seal"])
    for name in sealed["fingerprints"].keys() - {"step", "seed"}:  # of which another is another checkpoint
        content = json.dumps(sealed | {"fingerprints": sealed["fingerprints"] | {name: 1}})
        written["custom_metadata"] = {"seal": content, "crc32": zlib.crc32(content.encode())}
        file.write_text(json.dumps(written))
        with pytest.raises(UserError) as refusal:
            checkpoints.restore(state_at(0), 1)
        assert str(refusal.value.__cause__) == f"its {name} are not what was saved"
    written["custom_metadata"]["seal"] = json.dumps(sealed | {"totals": {"sums": {"loss": 1}, "counts": {"loss": 1}}})
    file.write_text(json.dumps(written))
    with pytest.raises(UserError) as refusal:
        checkpoints.restore(state_at(0), 1)
    assert str(refusal.value.__cause__) == "its seal is broken"
    checkpoints.close()


def test_a_loop_of_a_failed_read_finishes_its_tasks_before_it_closes():
    finished = []

    async def late():
        await asyncio.sleep(0.01)
        finished.append("late")

    async def read():
        tasks.append(asyncio.ensure_future(late()))
        raise OSError("damaged")

    tasks, maker = [], asyncio.new_event_loop
    with _settled_loops():
        loop = asyncio.new_event_loop()
        with pytest.raises(OSError, match="damaged"):
            loop.run_until_complete(read())
        loop.close()
    assert finished == ["late"]
    assert asyncio.new_event_loop is maker


def test_threads_that_read_side_by_side_leave_event_loops_as_they_were():
    maker, first_reads = asyncio.new_event_loop, threading.Event()

    def read_behind_the_first():
        first_reads.wait()
        with _settled_loops():
            time.sleep(0.2)

    second = threading.Thread(target=read_behind_the_first)
    second.start()
    with _settled_loops():
        first_reads.set()
        time.sleep(0.1)
    second.join()
    assert asyncio.new_event_loop is maker


def test_a_fingerprint_changes_where_arrays_or_their_elements_change_places():
    one, other = jnp.arange(3.0), jnp.ones(3)
    assert fingerprint({"b": one, "w": other}) != fingerprint({"b": other, "w": one})
    thirds = one / 3
    assert fingerprint(thirds) != fingerprint(thirds[::-1])


def test_one_that_is_put_aside_is_no_longer_there_and_not_lost(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, keep=3, seed=0)
    for step in (1, 2):
        checkpoints.save(state_at(step), {})
    checkpoints.wait()
    aside = checkpoints.put_aside(2, "damaged")
    assert checkpoints.steps() == saved_steps(tmp_path / "checkpoints") == [1]
    assert (aside / "state").is_dir()
    checkpoints.save(state_at(2), {})
    checkpoints.wait()
    assert checkpoints.put_aside(2, "damaged") != aside
    checkpoints.close()


PROGRAMS = types.SimpleNamespace(init=state_at, parallel=types.SimpleNamespace(place=lambda state: state))


def test_the_first_checkpoint_of_one_run_alone_is_put_aside(tmp_path):
    runs = [Checkpoints(tmp_path / name / "checkpoints", every=10, keep=2, seed=0) for name in ("one", "other")]
    runs[0].save(state_at(10), {})
    runs[0].wait()
    with Progress() as progress:
        _, totals, step = resume_or_begin(PROGRAMS, {"one: ": runs[0], "other: ": runs[1]}, progress, first=10)
    assert (totals, step) == ([None, None], 0)
    assert (tmp_path / "one/checkpoints/10.ahead.1").is_dir()
    for checkpoints in runs:
        checkpoints.close()


def test_where_one_run_cannot_read_its_checkpoint_all_go_on_from_the_one_before(tmp_path, monkeypatch):
    runs = {name: Checkpoints(tmp_path / name / "checkpoints", every=10, keep=2, seed=0) for name in ("one", "other")}
    for name, checkpoints in runs.items():
        for step in (10, 20):
            checkpoints.save(state_at(step), {"of": name})
        checkpoints.close()
    (tmp_path / "other/checkpoints/20" / METADATA).unlink()
    with monkeypatch.context() as several:  # processes, of which another one may be able to read it
        several.setattr("transformer_flax.training.checkpoints.share", lambda: (0, 2))
        with pytest.raises(UnreadableError), Progress() as progress:
            resume_or_begin(PROGRAMS, runs, progress)
        with pytest.raises(UnreadableError):
            runs["other"].average(state_at(30).params, 30, 3)
    assert runs["other"].steps() == [10, 20]
    with Progress() as progress:
        states, totals, step = resume_or_begin(PROGRAMS, runs, progress, combine=list)
    assert ([int(state.step) for state in states], step) == ([10, 10], 10)
    assert totals == [{"of": "one"}, {"of": "other"}]
    left = [sorted(folder.name for folder in (tmp_path / name / "checkpoints").iterdir()) for name in runs]
    assert left == [["10", "20.ahead.1"], ["10", "20.damaged.1"]]


def test_what_is_saved_is_not_what_the_next_step_makes_of_it(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, keep=1, seed=0)
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = state_at(1, size=1 << 20)
    checkpoints.save(state, {})
    for _ in range(5):
        state = advance(state)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", every=1, keep=1, seed=0)
    restored, _ = again.restore(state_at(0, size=1 << 20), 1)
    again.close()
    np.testing.assert_array_equal(restored.params["w"], 1)


def test_averages_are_the_mean_of_the_last_regular_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=2, keep=3, seed=0)
    for step in (2, 4, 5, 6):
        checkpoints.save(state_at(step), {})
    newest = state_at(8).params  # not saved yet
    average, choice = checkpoints.average(newest, 8, 3)
    assert choice.steps == [4, 6, 8]  # 5 is not at the interval
    np.testing.assert_array_equal(average["w"], np.full(8, 6, np.float32))
    assert checkpoints.average(newest, 8, 100)[1].steps == [2, 4, 6, 8]
    assert checkpoints.average(newest, 8, 1)[1].steps == [8]
    between = state_at(9).params
    checkpoints.save(state_at(8), {})
    average, choice = checkpoints.average(between, 9, 2)
    assert choice.steps == [8, 9]  # the newest always takes part
    np.testing.assert_array_equal(average["w"], 8.5)
    later, choice = checkpoints.average(state_at(14).params, 14, 3)
    assert (choice.steps, choice.missing) == ([14], [10, 12])  # which could not be written
    np.testing.assert_array_equal(later["w"], 14)
    alone, choice = checkpoints.average(between, 9, 1)
    assert choice.steps == [9]
    np.testing.assert_array_equal(alone["w"], 9)
    checkpoints.close()


def test_a_directory_that_is_gone_is_told_of_and_not_made_anew(tmp_path):
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints", every=1, keep=2, seed=0)
    save(checkpoints, 1)
    run.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"run/checkpoints has been moved or deleted, .*; put it back"):
        checkpoints.save(state_at(2), {})
    checkpoints.close()
    assert not run.exists()


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


def test_a_full_disk_is_told_of_and_the_older_checkpoints_stay(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", every=1, keep=5, seed=0)
    checkpoints.save(state_at(1), {})
    with pytest.raises(
        UserError, match=r"a checkpoint needs 2\.1 MB and the disk of .* has [01]\.\d MB left; .* resumes from step 1$"
    ):
        checkpoints.save(state_at(2, size=1 << 19), {})
    with pytest.raises(UserError, match=r"^3 checkpoints need 1\.6 MB"):  # of several seeds
        checkpoints.require_room(state_at(2, size=1 << 17), 3)
    checkpoints.close()
    again = Checkpoints(small_disk / "checkpoints", every=1, keep=5, seed=0)
    assert again.steps() == [1]
    again.close()


def test_several_seeds_do_not_begin_without_room_for_a_checkpoint_of_each(small_disk, tmp_path):
    config = small_config(data__path=str(write_text(tmp_path)), model__d_ff=640)
    room = r"2 checkpoints need 1\.\d MB and the disk of .* has [01]\.\d MB left; make room there: .* begins anew"
    with pytest.raises(UserError, match=room):
        train_seeds(config, [0, 1], small_disk / "seeds")


def test_a_disk_that_fills_while_a_checkpoint_is_written_is_told_of_too(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", every=1, keep=5, seed=0)
    checkpoints.save(state_at(1), {})
    checkpoints.wait()
    noise = np.random.default_rng(0).normal(size=200_000).astype(np.float32)  # 0.8 MB that do not compress
    big = TrainState.create(0, {"w": jnp.array(noise)}, OPTIMIZER).replace(step=jnp.int32(2))
    checkpoints.require_room = lambda state, count=1: None  # as if another program took the room in between
    (small_disk / "other").write_bytes(bytes(400_000))
    checkpoints.save(big, {})  # in the background
    with pytest.raises(UserError, match=r"could not be written to .*; the same command resumes from step 1$"):
        wait_for_failure(checkpoints)
    assert not list((small_disk / "checkpoints").glob("2*"))  # what was half written, and takes room
    (small_disk / "other").unlink()
    checkpoints.save(big, {})  # there is room again, also that of what was half written
    checkpoints.close()
    again = Checkpoints(small_disk / "checkpoints", every=1, keep=5, seed=0)
    assert again.steps() == [1, 2]
    again.close()


def wait_for_failure(checkpoints):
    """As a run does that looks after every step, and saves nothing in between."""
    for _ in range(600):
        checkpoints.check()
        time.sleep(0.1)
