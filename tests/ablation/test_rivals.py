"""Rivals are swept as the Transformer is, and docs/rivals.py sets them side by side."""

import pytest

from configs import rivals_small
from tests import forked
from tests.ablation.sweeping import InProcess
from tests.training.small import write_text
from transformer_flax.ablation.results import make_head
from transformer_flax.ablation.sweep import sweep
from transformer_flax.ablation.trials import TrialFactory
from transformer_flax.ablation.variants import make_variants
from transformer_flax.training.config_fields import complete


@pytest.mark.long
def test_rivals_are_swept_and_set_side_by_side(tmp_path):
    (tmp_path / "text").mkdir()
    base = complete(rivals_small.get_config("recurrent"))
    base.steps = 4
    base.model.update(d_model=16, num_layers=1)
    base.data.update(vocab_size=300, max_length=40, cache_dir=str(tmp_path / "cache"), num_buckets=1)
    base.data.path = str(write_text(tmp_path / "text"))
    base.log.every = base.checkpoint.every = 2
    base.eval.update(every=2, sentences=4)
    base.decode.update(max_input_length=40, max_extra_length=5, beam_size=1, batch_size=16)
    base.parallel.num_devices = 1
    factory = TrialFactory("configs/rivals_small.py:recurrent", base, {}, tmp_path / "sweep")
    trials = factory.trials(make_variants(base, "base", axes=["model.attention=none"]), seeds=range(1))
    sweep(trials, factory, make_head(base, "python", ""), InProcess())
    report = (tmp_path / "sweep/report/report.md").read_text()
    assert "model.d_model = 16" in report
    assert "paper" not in report
    told = forked.run("docs/rivals.py", "--speed", "--repeats=1", f"--output={tmp_path}", f"{tmp_path}/sweep")
    models, lengths = ([line.split(" | ") for line in table.splitlines()] for table in told.stdout.split("\n\n"))
    assert [row[0] for row in models[2:]] == [row[0] for row in lengths[2:]] == ["| recurrent, no attention"]
    assert all(int(row[3].replace(",", "")) > 5_000 and row[6][0].isdigit() for row in models[2:])
    for picture in ("rivals_time.png", "rivals_length.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
