"""results.jsonl: whole lines, the last of each run, of one base."""

import dataclasses
import json

import pytest

from configs import numbers
from transformer_flax.ablation import results
from transformer_flax.ablation.results import (
    FAILED,
    FINISHED,
    Journal,
    Result,
    make_head,
    read,
    require_same_base,
    require_same_data,
    require_same_variants,
)
from transformer_flax.errors import UserError

HEAD = {
    "config": {"steps": 100, "model.dropout": 0.1, "seed": 0, "name": "numbers", "data.path": "/here"},
    "name": "numbers",
    "command": "python -m transformer_flax.sweep",
    "versions": {"jax": "0.10.2"},
    "hardware": "2 x a processor",
    "commit": "abc",
}
SESSION = {name: HEAD[name] for name in ("command", "versions", "hardware", "commit")}
RESULT = Result(
    variant="A-h1 model.dropout=0.2",
    row="A-h1",
    changes={"model.dropout": 0.2, "model.positions": "learned"},
    seed=3,
    status=FINISHED,
    error="",
    parameters=700_416,
    flops=1.5e12,
    steps=100,
    seconds=12.25,
    scores={"valid": {"perplexity": 1.2345678901234567, "bleu": 0.0, "exact_match": 0.5}},
    signature="nrefs:1|Größe",
    curve=[
        {"step": 50, "seconds": 6.5, "perplexity": 2.5, "bleu": 0.0, "exact_match": 0.25},
        {"step": 100, "seconds": 12.25, "perplexity": 1.25, "bleu": 0.0, "exact_match": 0.5},
    ],
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "results.jsonl"


def test_what_is_written_is_read(file):
    journal = Journal(file, HEAD)
    failed = dataclasses.replace(RESULT, seed=4, status=FAILED, error="out of memory", scores={}, curve=[])
    for result in (RESULT, failed):
        journal.append(result)
    assert read(file) == (HEAD | {"sessions": [SESSION]}, [RESULT, failed])
    name = "A-h1 model.dropout=0.2"
    assert Journal(file, HEAD).results == journal.results == {(name, 3): RESULT, (name, 4): failed}
    assert not failed.finished


def test_seconds_to_the_last_step_alone_are_mended_when_they_are_read(file):
    Journal(file, HEAD).append(dataclasses.replace(RESULT, seconds=9.0))  # as older versions have it
    assert read(file)[1] == [RESULT]


def test_curves_of_older_versions_have_no_names(file):
    nameless = [list(point.values()) for point in RESULT.curve]
    classified = {"step": 5, "seconds": 1.0, "perplexity": 1.5, "accuracy": 0.8, "macro_f1": 0.7}
    journal = Journal(file, HEAD)
    journal.append(dataclasses.replace(RESULT, curve=nameless))
    journal.append(dataclasses.replace(RESULT, seed=4, curve=[[*nameless[0], 0.5]]))
    journal.append(dataclasses.replace(RESULT, seed=5, signature="", curve=[list(classified.values())]))
    translated, with_gain, of_classes = (result.curve for result in read(file)[1])
    assert translated == RESULT.curve
    assert with_gain == [RESULT.curve[0] | {"source_gain": 0.5}]
    assert of_classes == [classified]


def test_the_last_result_of_a_run_holds(file):
    journal = Journal(file, HEAD)
    journal.append(dataclasses.replace(RESULT, status=FAILED))
    journal.append(RESULT)
    assert journal.results == {RESULT.key: RESULT}
    assert read(file)[1] == [RESULT]
    assert len(file.read_text().splitlines()) == 3  # what happened stays


def test_wherever_a_kill_cuts_the_last_line_the_others_hold_and_the_next_is_whole(file):
    journal = Journal(file, HEAD)
    journal.append(RESULT)
    whole = file.read_bytes()
    journal.append(dataclasses.replace(RESULT, seed=4))
    torn = file.read_bytes()
    for length in [*range(len(whole), len(torn), 50), torn.rindex("ö".encode()) + 1]:
        file.write_bytes(torn[:length])
        assert read(file)[1] == [RESULT]
        Journal(file, HEAD).append(dataclasses.replace(RESULT, seed=5))
        assert [result.seed for result in read(file)[1]] == [3, 5]


def test_results_of_another_base_are_refused_with_the_fields_that_differ(file):
    Journal(file, HEAD)
    before = file.read_text()
    other = HEAD | {"config": HEAD["config"] | {"steps": 200, "model.dropout": 0.3, "seed": 5, "data.path": "/there"}}
    with pytest.raises(UserError) as refused:
        Journal(file, other)
    assert "config.model.dropout: 0.1 there, 0.3 now\n  config.steps: 100 there, 200 now\n" in str(refused.value)
    assert "seed" not in str(refused.value)
    assert "path" not in str(refused.value)
    assert file.read_text() == before


def test_fewer_evaluations_are_another_base_only_where_they_end_a_run(file):
    theirs = {"eval.every": 100, "eval.patience": 0}
    require_same_base(theirs, theirs | {"eval.every": 50}, file)
    theirs["eval.patience"] = 3
    with pytest.raises(UserError, match=r"config\.eval\.every: 100 there, 50 now"):
        require_same_base(theirs, theirs | {"eval.every": 50}, file)


def test_results_on_other_data_do_not_compare():
    run = dataclasses.replace(RESULT, fingerprints={"train": "abc", "valid": "def"})
    other = dataclasses.replace(run, seed=4, fingerprints={"train": "abc", "valid": "xyz"})
    with pytest.raises(UserError, match=r"model.dropout=0.2 seed 3 has other data \(valid\) than .* seed 4"):
        require_same_data(run, [run, other])
    # Data that are unknown, not used by both, or other because the config says so.
    for fingerprints, more in (({}, {}), ({"test": "xyz"}, {}), ({"valid": "xyz"}, {"data.num_pairs": 9})):
        require_same_data(run, [dataclasses.replace(run, fingerprints=fingerprints, changes=run.changes | more)])
    taught, otherwise = (  # by a field whose content has a fingerprint
        dataclasses.replace(run, fingerprints={"teacher": name}, changes={"teacher": name}) for name in ("one", "two")
    )
    require_same_data(taught, [otherwise])


def test_the_same_base_elsewhere_or_by_another_command_goes_on_with_the_head_that_is_there(file):
    Journal(file, HEAD)
    here = {"name": "other", "data.path": "/there", "decode.batch_size": 1024, "model.remat": "layers"}
    config = HEAD["config"] | here
    again = Journal(file, HEAD | {"config": config, "command": "another", "hardware": "a GPU"})
    assert again.head == HEAD | {"sessions": [SESSION]}


def test_results_of_two_sweeps_in_one_file_are_refused(file, tmp_path):
    Journal(file, HEAD).append(RESULT)
    Journal(tmp_path / "other.jsonl", HEAD | {"config": HEAD["config"] | {"steps": 200}}).append(RESULT)
    file.write_bytes(file.read_bytes() + (tmp_path / "other.jsonl").read_bytes())
    with pytest.raises(UserError, match="no other line may describe another; keep each sweep in its own file"):
        read(file)


def test_the_last_session_is_the_newest(file):
    elsewhere = HEAD | {"hardware": "a GPU", "commit": "def"}
    for head in (HEAD, HEAD, elsewhere, elsewhere, HEAD):
        journal = Journal(file, head)
        journal.begin()
        journal.append(RESULT)
    sessions = [SESSION, SESSION | {"hardware": "a GPU", "commit": "def"}, SESSION]
    assert read(file) == (HEAD | {"sessions": sessions}, [RESULT])
    assert journal.head["sessions"] == sessions
    assert len(file.read_text().splitlines()) == 1 + 2 + 5


def test_a_name_that_means_something_else_now_is_refused(file):
    journal = Journal(file, HEAD)
    journal.append(dataclasses.replace(RESULT, variant="wide", changes={"model.d_ff": 512}))
    require_same_variants(journal.results.values(), {"wide": {"model.d_ff": 512}, "other": {}}, file)
    require_same_variants(journal.results.values(), {"other": {}}, file)  # not trained in this session
    with pytest.raises(UserError, match=r"results of 'wide' with the overrides model\.d_ff=512; now they are none"):
        require_same_variants(journal.results.values(), {"wide": {}}, file)
    journal.append(dataclasses.replace(RESULT, variant="wide", changes={"model.d_ff": 512}, status=FAILED))
    require_same_variants(journal.results.values(), {"wide": {}}, file)  # it has no results yet, and may be corrected


@pytest.mark.parametrize("damaged", ["nonsense", '{"variant": "A-h1"}'])
def test_a_damaged_line_is_refused_by_its_number(file, damaged):
    journal = Journal(file, HEAD)
    journal.append(RESULT)
    head, line = file.read_text().splitlines(keepends=True)
    file.write_text(f"{head}{damaged}\n{line}")
    with pytest.raises(UserError, match=r"results\.jsonl is damaged in line 2"):
        read(file)


def test_a_file_that_does_not_say_what_was_swept_is_refused(file):
    with pytest.raises(UserError, match=r"results\.jsonl is missing or damaged"):
        read(file)
    file.write_text('{"variant": "A-h1"}\n')
    with pytest.raises(UserError, match="damaged in line 1: it is no result"):
        Journal(file, HEAD)
    file.write_text('{"config": {}, "name": "numbers"}\n')
    with pytest.raises(UserError, match="damaged in line 1: it is no result"):
        read(file)
    for text in ("", json.dumps(SESSION) + "\n", json.dumps(dataclasses.asdict(RESULT)) + "\n"):
        file.write_text(text)
        with pytest.raises(UserError, match="first line must describe a sweep"):
            read(file)


def test_the_commit_is_that_of_a_clone_and_marked_where_files_were_changed(monkeypatch, tmp_path):
    said = {"rev-parse": "abc123", "status": ""}
    monkeypatch.setattr(results, "output_of", lambda command: said[command[3]])  # git -C folder ...
    assert make_head(numbers.get_config(), "python", "")["commit"] == "abc123"
    said["status"] = "M transformer_flax/model/layers.py"
    assert make_head(numbers.get_config(), "python", "")["commit"] == "abc123+"
    monkeypatch.setattr(results, "ROOT", tmp_path)  # installed, perhaps within the repository of something else
    assert make_head(numbers.get_config(), "python", "")["commit"] == ""
