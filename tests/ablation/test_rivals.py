"""Rivals are swept as the Transformer is, and docs/rivals.py sets them side by side."""

import subprocess
import sys

from tests.commands.process import ENVIRONMENT, succeeds
from tests.conftest import ROOT
from tests.training.small import write_text


def test_rivals_are_swept_and_set_side_by_side(tmp_path):
    (tmp_path / "text").mkdir()
    sizes = {"model.d_model": 16, "model.num_layers": 1, "data.vocab_size": 300, "data.max_length": 40}
    lengths = {"steps": 4, "log.every": 2, "eval.every": 2, "checkpoint.every": 2, "eval.sentences": 4}
    search = {"decode.max_input_length": 40, "decode.max_extra_length": 5, "decode.beam_size": 1}
    fields = sizes | lengths | search | {"data.cache_dir": str(tmp_path / "cache")}
    succeeds(
        "sweep",
        "--config=configs/rivals_small.py:recurrent",
        f"--config.data.path={write_text(tmp_path / 'text')}",
        f"--workdir={tmp_path / 'sweep'}",
        "--rows=base",
        "--seeds=1",
        "--grid=model.attention=none",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    )
    report = (tmp_path / "sweep/report/report.md").read_text()
    assert "| `model.d_model` | 16 | 512 |" in report
    assert "d_ff" not in report
    command = [sys.executable, "docs/rivals.py", "--speed", "--repeats=1", f"--output={tmp_path}", f"{tmp_path}/sweep"]
    told = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout
    models, lengths = ([line.split(" | ") for line in table.splitlines()] for table in told.split("\n\n"))
    assert [row[0] for row in models[2:]] == [row[0] for row in lengths[2:]] == ["| recurrent, no attention"]
    assert all(int(row[3].replace(",", "")) > 5_000 and row[6][0].isdigit() for row in models[2:])
    for picture in ("rivals_time.png", "rivals_length.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
