"""A working directory that somebody else has prepared, or moved."""

import json
import os
import pathlib
import pickle
import shutil
import subprocess

import pytest

from tests import forked
from tests.commands.process import succeeds
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
    """A folder with a copy of a run and its cache."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(finished.parent / "cache", tmp_path / "cache")
    run = json.loads((tmp_path / "run/config.json").read_text())
    del run["crc32"]
    run["config"]["data"]["cache_dir"] = str(tmp_path / "cache")
    (tmp_path / "run/config.json").write_text(json.dumps(run))
    return tmp_path


def train(place: pathlib.Path) -> subprocess.CompletedProcess:
    """train.py going on with the run, with its own config from a file that the user trusts."""
    config = json.loads((place / "run/config.json").read_text())["config"]
    (place / "mine.py").write_text(CONFIG.format(config=json.dumps(config)))
    little = ["--config.eval.test=False", "--config.eval.final_sentences=2", "--config.steps=204"]
    return forked.run("train.py", f"--config={place / 'mine.py'}", f"--workdir={place / 'run'}", *little)


def plant_code(run: pathlib.Path, marker: pathlib.Path) -> None:
    """Plants code that touches the marker wherever somebody might run or unpickle it."""
    pickled = pickle.dumps(Touch(marker))
    for name in ("params.pkl", "checkpoints/x.pkl", "checkpoints/200/x.pkl", "checkpoints/200/state/x.pkl"):
        (run / name).write_bytes(pickled)
    for name in ("config", "train"):
        for folder in (run, run / "checkpoints", run / "checkpoints/200"):
            (folder / f"{name}.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    for folder in (run, *(run.parent / "cache/corpora").iterdir()):
        for name in ("source.ids", "target.offsets"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(pickled)


def move_to_another_disk(place: pathlib.Path) -> None:
    """Puts links in the place of a run and of its checkpoints."""
    (place / "disk").mkdir()
    shutil.move(place / "run/checkpoints", place / "disk/checkpoints")
    (place / "run/checkpoints").symlink_to(place / "disk/checkpoints")
    shutil.move(place / "run", place / "disk/run")
    (place / "run").symlink_to("disk/run")


def test_nothing_in_a_run_is_executed_or_unpickled_also_on_another_disk(place):
    move_to_another_disk(place)
    marker = place / "marker"
    plant_code(place / "run", marker)
    pickle.loads(pickle.dumps(Touch(place / "proof")))
    assert (place / "proof").exists()  # that the bait works
    mine = place / "mine.txt"
    mine.write_text("five years of work\n")
    for name in ("selection.json", ".lock", "translations/204.txt"):
        (place / "run" / name).unlink(missing_ok=True)
        (place / "run" / name).symlink_to(mine)
    restore(place / "run").translate(["zwei"])
    succeeds("translate", f"--workdir={place / 'run'}", given="zwei\n")
    succeeds("evaluate", f"--workdir={place / 'run'}")
    result = train(place)
    assert result.returncode == 0, result.stderr
    assert "resuming from step 200" in result.stdout
    assert not marker.exists()
    assert mine.read_text() == "five years of work\n"  # what is written takes the place of a link
    steps = [name for name in os.listdir(place / "disk/checkpoints") if name.isdigit()]
    assert sorted(steps) == ["150", "200", "204"]
    assert (place / "run").is_symlink()
    assert (place / "run/checkpoints").is_symlink()
    assert restore(place / "run", average=1).params_from == "the parameters of step 204"
