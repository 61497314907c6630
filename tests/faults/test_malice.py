"""A working directory that somebody else has prepared: nothing in it is run, nothing outside it is changed."""

import json
import os
import pathlib
import pickle
import shutil
import subprocess

import numpy as np
import pytest

from tests import forked
from tests.commands.process import succeeds
from tests.disks import snapshot
from transformer_flax.run import restore

CONFIG = """
import json
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(json.loads({config!r}))
"""


class Touch:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: pathlib.Path):
        self._marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self._marker,)


@pytest.fixture
def place(finished, tmp_path):
    """A copy of a run with its cache, and beside it what must stay as it is."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(finished.parent / "cache", tmp_path / "cache")
    run = json.loads((tmp_path / "run/config.json").read_text())
    del run["crc32"]
    run["config"]["data"]["cache_dir"] = str(tmp_path / "cache")
    (tmp_path / "run/config.json").write_text(json.dumps(run))
    outside = tmp_path / "outside"
    (outside / "2019").mkdir(parents=True)
    for name in ("victim.txt", "2019/photograph"):
        (outside / name).write_text("five years of work\n")
    return tmp_path


def train(place: pathlib.Path, *, steps: int = 204) -> subprocess.CompletedProcess:
    """train.py going on with the run, with its own config from a file that the user trusts."""
    config = json.loads((place / "run/config.json").read_text())["config"]
    (place / "mine.py").write_text(CONFIG.format(config=json.dumps(config)))
    little = ["--config.eval.test=False", "--config.eval.final_sentences=2", f"--config.steps={steps}"]
    return forked.run("train.py", f"--config={place / 'mine.py'}", f"--workdir={place / 'run'}", *little)


def plant_code(run: pathlib.Path, marker: pathlib.Path) -> None:
    """What would touch the marker, wherever somebody might run or unpickle it."""
    pickled = pickle.dumps(Touch(marker))
    for name in ("params.pkl", "checkpoints/x.pkl", "checkpoints/200/x.pkl", "checkpoints/200/state/x.pkl"):
        (run / name).write_bytes(pickled)
    for name in (
        "config",
        "sitecustomize",
        "usercustomize",
        "conftest",
        "train",
        "transformer_flax",
        "__init__",
        "jax",
    ):
        for folder in (run, run / "checkpoints", run / "checkpoints/200"):
            (folder / f"{name}.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    arrays = np.array([Touch(marker)], dtype=object)
    for folder in (run, *(run.parent / "cache/corpora").iterdir()):
        for name in ("source.ids.npy", "target.offsets.npy"):
            (folder / name).unlink(missing_ok=True)
            np.save(folder / name, arrays, allow_pickle=True)


def test_nothing_in_a_run_is_executed_or_unpickled(place):
    marker = place / "marker"
    plant_code(place / "run", marker)
    pickle.loads(pickle.dumps(Touch(place / "proof")))
    assert (place / "proof").exists()  # that the bait works
    before = snapshot(place / "outside")
    restore(place / "run").translate(["zwei"])
    succeeds("translate", f"--workdir={place / 'run'}", given="zwei\n")
    succeeds("evaluate", f"--workdir={place / 'run'}")
    result = train(place)
    assert result.returncode == 0, result.stderr
    assert "resuming from step 200" in result.stdout
    assert not marker.exists()
    assert snapshot(place / "outside") == before


def test_what_links_lead_to_is_neither_changed_nor_deleted(place):
    run, outside = place / "run", place / "outside"
    shutil.copy(run / "metrics.jsonl", outside / "metrics.jsonl")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    for name in ("config.json", "tokenizer.json", "selection.json", "translations/204.txt", "metrics.jsonl"):
        file = run / name
        file.with_name(f".{file.name}.partial").symlink_to(outside / "victim.txt")
    for name, target in ((".lock", "victim.txt"), ("skipped.jsonl", "nothing.jsonl")):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / target)
    (run / "translations/204.txt").symlink_to(outside / "victim.txt")
    (run / "selection.json").unlink()
    (run / "selection.json").symlink_to("../outside/victim.txt")
    (run / "checkpoints/175.orbax-checkpoint-tmp").symlink_to(outside)
    (run / "checkpoints/180.orbax-checkpoint-tmp").mkdir()
    (run / "checkpoints/180.orbax-checkpoint-tmp/state").symlink_to(outside)
    (run / "checkpoints/150/more").symlink_to(outside)
    for entry in list((place / "cache/corpora").iterdir()):
        shutil.rmtree(entry)
        entry.symlink_to(outside)
    before = snapshot(outside)
    restore(run)
    result = train(place, steps=300)  # so that checkpoints are deleted
    assert result.returncode == 0, result.stderr
    assert not (run / "checkpoints/150").exists()
    assert not list((run / "checkpoints").glob("*.orbax-checkpoint-tmp"))  # also those that are links
    assert snapshot(outside) == before
    assert json.loads((run / "selection.json").read_text())["used"] > 0


@pytest.mark.parametrize(
    ("name", "to"), [("checkpoints/175", "outside"), ("checkpoints/150", "outside/150"), ("translations", "outside")]
)
def test_a_folder_that_training_would_write_to_or_delete_behind_a_link_is_refused_before_it(place, name, to):
    folder = place / "run" / name
    if to.endswith("150"):
        folder.rename(place / to)  # a checkpoint that was moved to make room
    else:
        shutil.rmtree(folder, ignore_errors=True)
    folder.symlink_to(place / to)
    before = snapshot(place / "outside")
    result = train(place)
    assert result.returncode == 2
    assert f"{folder} is a link" in result.stderr
    assert "Traceback" not in result.stderr
    assert snapshot(place / "outside") == before
    restore(place / "run", steps=[200])
    if to.endswith("150"):
        assert restore(place / "run", steps=[150]).parameters == "the parameters of step 150"


def test_folders_that_are_no_checkpoints_are_not_deleted_as_old_ones(place):
    shutil.move(place / "run/checkpoints/200", place / "outside/200")
    shutil.rmtree(place / "run/checkpoints")
    (place / "run/checkpoints").symlink_to(place / "outside")
    before = snapshot(place / "outside")
    result = train(place, steps=3000)
    assert result.returncode == 2
    assert "checkpoints/2019 is no checkpoint" in result.stderr
    assert snapshot(place / "outside") == before


def test_a_run_and_its_checkpoints_may_lie_on_another_disk(place):
    (place / "disk").mkdir()
    shutil.move(place / "run/checkpoints", place / "disk/checkpoints")
    (place / "run/checkpoints").symlink_to(place / "disk/checkpoints")
    shutil.move(place / "run", place / "disk/run")
    (place / "run").symlink_to("disk/run")
    restore(place / "run")
    result = train(place)
    assert result.returncode == 0, result.stderr
    assert sorted(os.listdir(place / "disk/checkpoints")) == ["150", "200", "204"]
    assert (place / "run").is_symlink()
    assert (place / "run/checkpoints").is_symlink()
    assert restore(place / "run", average=1).parameters == "the parameters of step 204"
