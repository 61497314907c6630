"""Runs outlive versions: tests/data/run_0.1 is a run that version 0.1 has trained, and is never made anew.

run_0.1.json has what that version translated with it, and the log-probabilities of the tokens.
"""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

import transformer_flax
from configs import base
from tests.conftest import long
from tests.training.small import final_state
from transformer_flax.ablation import report
from transformer_flax.ablation.comparison import compare
from transformer_flax.ablation.results import RESULTS, Journal, make_head, read
from transformer_flax.model.registry import KINDS
from transformer_flax.training.config_fields import added_fields, flatten
from transformer_flax.training.loop import train
from transformer_flax.training.run_directory import RunDirectory

ROOT = pathlib.Path(__file__).parent.parent
DATA = ROOT / "tests/data"
KNOWN = json.loads((DATA / "run_0.1.json").read_text())
# Runs that were saved before these fields existed were made with these values, so no line is ever changed.
DEFAULTS = {
    "embedding_init": "",
    "init_from": "",
    "train_only": "",
    "r_drop": 0.0,
    "data.name": "",
    "data.path": "",
    "data.longest_trained": 6,
    "data.longest_tested": 6,
    "data.label_column": 0,
    "data.text_column": 1,
    "data.held_out": 0.0,
    "data.length_multiple_of": 1,
    "data.lowercase": False,
    "data.tokenized": False,
    "data.bpe_dropout": 0.0,
    "optimizer.name": "adam",
    "optimizer.cooldown": 0.0,
    "parallel.cpu_devices": 1,
    "eval.final_sentences": 0,
    "eval.patience": 0,
    "log.wandb": "",
}
DEFAULTS_OF_ENCODERS = {
    "model.compatibility": "scaled_dot",
    "model.clip_distance": 16,
    "model.neighbourhood": 0,
    "model.branch_init": 1.0,
    "model.start": "xavier",
    "model.attention_implementation": "plain",
}
DEFAULTS_OF_KINDS = {
    "transformer": DEFAULTS_OF_ENCODERS,
    "classifier": DEFAULTS_OF_ENCODERS | {"model.embedding_deviation": 1.0},
    "recurrent": {},
    "convolutional": {},
}
ADDED = {"eval": ["patience"], "model": ["branch_init", "neighbourhood"], "data": ["held_out"]}


def test_the_default_of_a_field_is_what_runs_did_before_the_field_existed():
    every_section = {f"{name.rpartition('.')[0]}.": ... for name in flatten(base.get_config().to_dict())}
    assert added_fields(every_section)["model.kind"] == "transformer"
    for kind in KINDS:
        defaults = added_fields(every_section | {"model.kind": kind})
        assert defaults == defaults | DEFAULTS | DEFAULTS_OF_KINDS[kind]


@pytest.fixture
def old(tmp_path):
    shutil.copytree(DATA / "run_0.1", tmp_path / "old")
    return tmp_path / "old"


def remove_fields(workdir: pathlib.Path) -> None:
    """Makes the run one from before there were the fields of ADDED."""
    file = workdir / "config.json"
    written = json.loads(file.read_text())
    del written["crc32"]
    for section, fields in ADDED.items():
        for field in fields:
            del written["config"][section][field]
    file.write_text(json.dumps(written))


@pytest.mark.parametrize(
    "lacking", [long(False, id="as it is"), pytest.param(True, id="without fields that came later")]
)
def test_a_run_of_version_0_1_is_restored_translates_and_is_trained_on(old, tmp_path, capsys, monkeypatch, lacking):
    assert RunDirectory(old).load_config().steps  # its checksum holds
    if lacking:
        remove_fields(old)
    run = transformer_flax.restore(old)
    sources, translations = zip(*KNOWN["translations"].items(), strict=True)
    few = {"batch_size": 16, "num_devices": 1}  # one program each instead of three and more
    assert run.translate(sources, **few) == list(translations)
    for scores, known in zip(run.score(sources, translations, **few), KNOWN["scores"], strict=True):
        np.testing.assert_allclose(scores, known, rtol=1e-3)

    config = run.config.copy_and_resolve_references()
    config.steps += 2
    config.model.dtype = "auto"  # as configs/ have it now; resumed on a GPU, the run keeps its float32
    monkeypatch.setattr("transformer_flax.training.setup.device_dtype", lambda: "bfloat16")
    config.data.cache_dir = str(tmp_path)
    config.eval.final_sentences, config.decode.batch_size = 8, 16
    train(config, old)
    assert final_state(old, config.steps).step == config.steps
    said = " ".join(capsys.readouterr().out.split())
    assert f"resuming from step {config.steps - 2}" in said
    added = [
        "config.data.held_out=0.0",
        "config.eval.patience=0",
        "config.model.branch_init=1.0",
        "config.model.neighbourhood=0",
    ]
    assert [field in said for field in added] == [lacking] * 4


def test_a_sweep_from_before_some_fields_is_resumed_and_reported_on(tmp_path):
    from configs import table3_small  # found only now

    file = pathlib.Path(shutil.copy(ROOT / "docs/table3/numbers" / RESULTS, tmp_path))
    before, known = read(file)
    assert "model.kind" not in before["config"]
    written = file.read_bytes()
    base = table3_small.get_config()
    base.eval.final_average = 1
    journal = Journal(file, make_head(base, "python -m transformer_flax.sweep", "another machine"))
    journal.begin()
    more = dataclasses.replace(known[0], seed=1 + max(result.seed for result in known))
    journal.append(more)
    head, results = read(file)
    assert file.read_bytes().startswith(written)
    assert results == [*known, more]
    assert head["sessions"][:-1] == before["sessions"]
    assert head["sessions"][-1]["hardware"] == "another machine"
    text = report.as_markdown(compare(results, head["config"]), head, pictures=())
    assert f"{len(results)} finished runs: 20 rows of the paper's table 3" in text
