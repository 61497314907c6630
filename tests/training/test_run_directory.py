import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zlib

import pytest

from tests.disks import as_nobody, files_up_to, snapshot
from tests.training.small import small_config
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.training.averaging import choose
from transformer_flax.training.checkpoint_files import load_params, saved_steps
from transformer_flax.training.config_fields import complete, differences, flatten
from transformer_flax.training.run_directory import MAY_CHANGE, RunDirectory
from transformer_flax.training.trained_model import parse_name

DATA = {"train": "abc", "valid": "def"}
TOKENIZER = Tokenizer.train(["a b a b"], 270)


def test_a_config_comes_back_as_it_was(tmp_path):
    config = small_config()
    RunDirectory(tmp_path / "run").claim(config, DATA, TOKENIZER)
    assert RunDirectory(tmp_path / "run").load_config() == config


def test_a_run_of_another_config_is_refused_with_the_fields_that_differ_and_nothing_changes(tmp_path):
    RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)
    before = snapshot(tmp_path)
    other = small_config(model__d_ff=32, optimizer__b2=0.9, steps=100)
    with pytest.raises(UserError) as refusal:
        RunDirectory(tmp_path).claim(other, DATA, TOKENIZER)
    told = str(refusal.value)
    assert "config.model.d_ff: 16 there, 32 now" in told
    assert "config.optimizer.b2: 0.98 there, 0.9 now" in told
    assert "steps" not in told
    assert "--workdir" in told
    assert snapshot(tmp_path) == before


def test_what_a_run_has_learned_from_may_not_change():
    fields = flatten(complete(small_config()).to_dict())
    free = {name for name in fields if not differences(fields, fields | {name: "another"}, MAY_CHANGE)}
    assert free >= {"steps", "loss_chunks", "model.remat", "data.cache_dir", "eval.every", "decode.beam_size"}
    learned = ("seed", "label_smoothing", "r_drop", "train_only", "ema_decay", "accumulation_steps", "deterministic")
    assert not free & {*learned, "data.seed", "data.num_pairs", "data.tokens_per_batch", "data.bpe_dropout"}
    assert not any(name.startswith("optimizer.") or name == "model.dtype" for name in free)


def test_other_data_are_refused(tmp_path):
    RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)
    with pytest.raises(UserError, match="the train data have changed"):
        RunDirectory(tmp_path).claim(small_config(), DATA | {"train": "xyz"}, TOKENIZER)


def test_another_tokenizer_is_refused_and_an_equal_one_or_none_is_not(tmp_path):
    RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)
    before = snapshot(tmp_path)
    other = Tokenizer.train(["c d c d"], 270)
    for refuse in (RunDirectory(tmp_path).check, RunDirectory(tmp_path).claim):
        with pytest.raises(
            UserError, match=r"the tokenizer given is not \S+tokenizer\.json, which the run was started"
        ):
            refuse(small_config(), DATA, other)
    assert snapshot(tmp_path) == before
    RunDirectory(tmp_path).check(small_config(), DATA, TOKENIZER)
    RunDirectory(tmp_path).check(small_config(data__tokenizer_file="/elsewhere.json"), DATA)


def test_more_steps_other_intervals_other_devices_and_a_moved_folder_are_the_same_run(tmp_path):
    RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)
    memory = {"loss_chunks": 2, "model__remat": "layers"}  # on a smaller device
    moved = small_config(
        steps=100,
        eval__every=7,
        checkpoint__every=9,
        log__every=1,
        parallel__mode="pmap",
        data__path="/elsewhere",
        **memory,
    )
    RunDirectory(tmp_path).claim(moved, DATA, TOKENIZER)
    assert RunDirectory(tmp_path).load_config().steps == 100


def test_fewer_steps_than_were_made_are_refused_and_nothing_changes(tmp_path):
    RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)
    (tmp_path / "checkpoints/6").mkdir(parents=True)
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=r"at step 6 already, past config\.steps=4"):
        RunDirectory(tmp_path).claim(small_config(steps=4), DATA, TOKENIZER)
    assert snapshot(tmp_path) == before


def test_a_run_that_was_evaluated_at_its_end_keeps_how_until_it_is_trained_on(tmp_path):
    run = RunDirectory(tmp_path)
    run.claim(small_config(), DATA, TOKENIZER)
    run.metrics_file.write_text(json.dumps({"step": 6, "valid/loss": 1.0, "valid/final": 1.0}) + "\n")
    for steps, beam_size in ((6, 2), (12, 1)):
        (tmp_path / f"checkpoints/{steps}").mkdir(parents=True)
        run.claim(small_config(steps=steps, decode__beam_size=1), DATA, TOKENIZER)
        assert run.load_config().decode.beam_size == beam_size


def test_other_splits_may_be_used_and_what_is_known_of_one_that_is_not_used_now_stays_known(tmp_path):
    RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)
    RunDirectory(tmp_path).claim(small_config(), {"train": "abc", "test": "ghi"}, TOKENIZER)
    with pytest.raises(UserError, match="the valid data have changed"):
        RunDirectory(tmp_path).check(small_config(), DATA | {"valid": "xyz"})


@pytest.mark.parametrize("larger", ["config", "tokenizer"])
def test_an_end_at_any_file_of_a_claim_leaves_a_directory_that_the_same_command_claims(tmp_path, larger):
    # As after a kill: of what a claim writes, there is all before the file that does not fit.
    config = small_config(name="long" * 10_000 if larger == "config" else "short")
    RunDirectory(tmp_path / "whole").claim(config, DATA, TOKENIZER)
    sizes = {name: (tmp_path / f"whole/{name}.json").stat().st_size for name in ("config", "tokenizer")}
    assert sizes[larger] == max(sizes.values())
    for size, failing in ((500, "config"), (min(sizes.values()), larger)):
        run = RunDirectory(tmp_path / str(size))
        with (
            pytest.raises(UserError, match=rf"{failing}\.json cannot be written: File too large"),
            files_up_to(size),
        ):
            run.claim(config, DATA, TOKENIZER)
        run.claim(config, DATA, TOKENIZER)
        assert snapshot(run.path) == snapshot(tmp_path / "whole")


def test_a_claim_that_was_ended_before_its_tokenizer_takes_no_other_one(tmp_path):
    RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)
    (tmp_path / "tokenizer.json").unlink()
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer given is not \S+tokenizer\.json, which the run was started"):
        RunDirectory(tmp_path).claim(small_config(), DATA, Tokenizer.train(["c d c d"], 270))
    assert snapshot(tmp_path) == before
    RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)


def test_a_run_that_is_claimed_again_keeps_its_tokenizer_s_file_as_it_is(tmp_path):
    workdir = RunDirectory(tmp_path)
    workdir.claim(small_config(), DATA, TOKENIZER)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8"))), "utf-8")  # as another version formats it
    run = json.loads((tmp_path / "config.json").read_text())
    del run["crc32"]
    run["tokenizer_crc32"] = zlib.crc32(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(run))
    before = file.read_bytes()
    workdir.claim(small_config(), DATA, workdir.load_tokenizer())
    assert file.read_bytes() == before
    assert workdir.load_tokenizer().to_json() == TOKENIZER.to_json()


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("five years of work")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)
    assert snapshot(tmp_path).keys() == {"thesis.tex"}


def test_a_folder_of_runs_names_some_also_those_of_a_sweep(tmp_path):
    for run in ("a", "b", "c", "sweep/base/seed0", "d", "e"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "config.json").touch()
    named = ", ".join(f"{tmp_path}/{run}" for run in "abcde")
    with pytest.raises(UserError, match=f"it has no config.json; there are {named}$"):
        RunDirectory(tmp_path).load_config()
    with pytest.raises(UserError, match=f"it has no config.json; there are {tmp_path}/sweep/base/seed0$"):
        RunDirectory(tmp_path / "sweep").load_config()
    (tmp_path / "f").mkdir()
    (tmp_path / "f/config.json").touch()
    with pytest.raises(UserError, match=f"{named} and 1 more$"):
        RunDirectory(tmp_path).load_config()


@pytest.mark.parametrize("name", ["[drop=0.1]", "**", "a?", "a\\b", "\udcff"])
def test_a_folder_whose_checkpoints_could_not_be_read_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="cannot hold checkpoints"):
        RunDirectory(tmp_path / name / "run").claim(small_config(), DATA, TOKENIZER)
    assert not list(tmp_path.iterdir())
    (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / name)
    with pytest.raises(UserError, match="cannot hold checkpoints"):
        RunDirectory(tmp_path / "link").claim(small_config(), DATA, TOKENIZER)


def test_a_folder_with_another_name_in_utf8_is_refused_in_an_old_locale(tmp_path):
    made = ["localedef", "--no-archive", "-i", "de_DE", "-f", "ISO-8859-1", str(tmp_path / "de_DE.ISO-8859-1")]
    if shutil.which("localedef") is None or subprocess.run(made, capture_output=True, check=False).returncode > 1:
        pytest.skip("needs localedef and the sources of the locales")
    program = "import pathlib, sys; from transformer_flax.training import run_directory as here"
    program += "; [here.require_safe(pathlib.Path(name)) for name in sys.argv[1:]]"
    environment = {**os.environ, "LOCPATH": str(tmp_path), "LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0"}
    for name, error in (("nu", ""), ("nü", "does not write as UTF-8")):
        command = [sys.executable, "-c", program, name.encode("latin-1")]
        found = subprocess.run(command, env=environment, capture_output=True, check=False, text=True, errors="replace")
        assert (found.returncode, error in found.stderr) == (bool(error), True), found.stderr


@pytest.mark.parametrize("content", [b'{"config": {', b"[]", b"\xff\xfe", b""])
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json cannot be read as the config of a run"):
        RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)


@pytest.mark.parametrize("content", ['{"model_type": "bert"}', '{"config": {}, "data_fingerprints": {}}', "{}"])
def test_the_config_of_another_program_is_told_from_a_run_s(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json is not the config of a run: it has the entries "):
        RunDirectory(tmp_path).claim(small_config(), DATA, TOKENIZER)


def test_the_tokenizer_comes_back_as_it_was(tmp_path):
    workdir = RunDirectory(tmp_path)
    workdir.claim(small_config(), DATA, TOKENIZER)
    assert workdir.load_tokenizer().to_json() == TOKENIZER.to_json()


def test_translations_are_one_line_each(tmp_path):
    file = RunDirectory(tmp_path).save_outputs("translations", "valid", 5, ["a b", "", "ü"])
    assert file.read_bytes() == "a b\n\nü\n".encode()


def test_outputs_of_the_steps_that_are_repeated_are_deleted_and_no_others(tmp_path):
    run = RunDirectory(tmp_path)
    for step, split in ((3, "valid"), (6, "valid"), (6, "test"), (12, "valid")):
        run.save_outputs("translations", split, step, ["a"])
    run.drop_outputs("translations", 6)
    assert sorted(file.name for file in (tmp_path / "translations").iterdir()) == ["3.txt", "6.test.txt", "6.txt"]


def test_a_directory_may_be_named_as_one_with_steps(tmp_path):
    name = str(tmp_path / "run@5")
    assert parse_name(name) == (str(tmp_path / "run"), [5])
    (tmp_path / "run@5").mkdir()
    assert parse_name(name) == (name, None)


def test_a_misspelt_directory_is_told_the_one_beside_it(tmp_path):
    (tmp_path / "numbers").mkdir()
    with pytest.raises(UserError, match=r"there is no directory \S+nmbers; did you mean '\S+/numbers'\?"):
        RunDirectory(tmp_path / "nmbers").load_config()


def test_who_names_the_folder_of_a_checkpoint_is_told_how_to_name_it(tmp_path):
    (tmp_path / "run/checkpoints/30").mkdir(parents=True)
    with pytest.raises(UserError, match=r"run/checkpoints/30 holds no run: it has no config\.json$"):
        RunDirectory(tmp_path / "run/checkpoints/30").load_config()
    (tmp_path / "run/config.json").write_text("{}")
    for name in ("run/checkpoints/30", "run/checkpoints", "run@best"):
        with pytest.raises(UserError, match=rf"/{name} is no run; a checkpoint of one is named as in \S+/run@STEP$"):
            RunDirectory(tmp_path / name).load_config()
    (tmp_path / "run@copy").mkdir()
    (tmp_path / "run@copy/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"run@copy/config\.json "):  # which is read
        RunDirectory(tmp_path / "run@copy").load_config()


def test_checkpoints_on_a_disk_that_is_not_mounted_are_not_taken_for_none(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.claim(small_config(), DATA, TOKENIZER)
    run.checkpoints.symlink_to(tmp_path / "disk/checkpoints")
    for use in (lambda: run.claim(small_config(), DATA, TOKENIZER), lambda: choose(run.checkpoints, small_config())):
        with pytest.raises(UserError, match=r"run/checkpoints is a link to \S+disk/checkpoints, which is not there"):
            use()
    assert not (tmp_path / "disk").exists()


def test_a_run_on_a_disk_that_is_not_mounted_is_told_as_such(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.symlink_to(tmp_path / "disk")
    with pytest.raises(UserError, match=r"run is a link to \S+disk, which is not there"):
        RunDirectory(run.path / "below").load_config()
    for use in (lambda: run.check(small_config(), DATA), run.load_config):
        with pytest.raises(UserError, match=r"run is a link to \S+disk, which is not there: mount its disk"):
            use()
    (tmp_path / "disk").mkdir()  # mounted
    run.claim(small_config(), DATA, TOKENIZER)
    assert run.load_config() == small_config()


def test_checkpoints_that_may_not_be_read_are_neither_none_nor_damaged():
    with tempfile.TemporaryDirectory() as name:  # others may see that it is there, and not what is in it
        folder = pathlib.Path(name)
        (folder / "5").mkdir()
        with as_nobody(), pytest.raises(UserError, match=f"{name} cannot be read: Permission denied"):
            saved_steps(folder)
        folder.chmod(0o755)
        (folder / "5/array").touch(0o600)
        with as_nobody(), pytest.raises(UserError, match=f"{name}/5/array cannot be read: Permission denied"):
            load_params(folder, 5, {}, seed=0)
