"""`python -m transformer_flax.evaluate` as a user meets it: a table for people, JSON for programs."""

import json
import shutil

import pytest

import transformer_flax
from tests import forked
from tests.commands.process import refused, run, succeeds
from tests.training.small import PAIRS
from transformer_flax.files import read_json_lines

KEYS = {
    "decode",
    *("run", "workdirs", "text", "sentences", "bleu", "signature", "chrf", "chrf_signature", "table2_bleu"),
    *("table2_signature", "exact_match", "perplexity", "length_ratio", "warnings", "params_from"),
    *("sentences_per_second", "compilations"),
}


def test_a_split_is_measured_as_at_the_end_of_training(finished, tmp_path):
    result = succeeds("evaluate", f"--workdir={finished}", "--split=test", f"--translations={tmp_path / 'out.txt'}")
    report = json.loads(result.stdout)
    assert report.keys() == KEYS
    (measured,) = (line for line in read_json_lines(finished / "metrics.jsonl") if "test/bleu" in line)
    for name in ("bleu", "exact_match", "perplexity"):
        assert report[name] == pytest.approx(measured[f"test/{name}"], rel=1e-3)
    assert (report["run"], report["text"], report["sentences"]) == ("numbers", "test split", PAIRS["test"])
    assert report["params_from"] == "the mean of the parameters at steps 150, 200"
    assert (tmp_path / "out.txt").read_bytes() == (finished / "translations/200.test.txt").read_bytes()
    table = result.stderr
    assert f"numbers, test split: {PAIRS['test']} sentences" in table
    numbers = f"{report['bleu']:.2f}", f"{report['chrf']:.2f}", f"{report['perplexity']:.3f}"
    for shown in ("BLEU", *numbers, f" {100 * report['exact_match']:.1f} %"):
        assert shown in table
    assert "WARNING" not in table
    assert report["warnings"] == []


def test_files_are_measured_with_the_flags_of_a_search_and_doubts_are_warned_of(finished, tmp_path):
    source, reference = tmp_path / "in.txt", tmp_path / "reference.txt"
    lines = ["zwanzig", "", "fünfhundertdreizehn"]
    source.write_text("\n".join(lines))
    reference.write_text("twenty and many more words than that\n\nfive hundred and thirteen and many more words\n")
    options = [f"--source={source}", f"--reference={reference}", "--beam_size=1", f"--translations={tmp_path / 'out'}"]
    result = succeeds("evaluate", f"--workdir={finished}@150", "--lowercase", "--tokenized", *options)
    report = json.loads(result.stdout)
    assert (report["text"], report["sentences"]) == (str(source), 3)
    assert report["params_from"] == "the parameters of step 150"
    greedy = transformer_flax.restore(finished, steps=[150]).translate(lines, beam_size=1)
    assert (tmp_path / "out").read_text() == "".join(f"{line}\n" for line in greedy)
    assert report["length_ratio"] < 0.9
    assert (report["decode"]["beam_size"], report["decode"]["alpha"]) == (1, 0.6)
    (warning,) = report["warnings"]
    assert f"WARNING: {warning}" in result.stderr

    # The score is also given as others publish it.
    assert report.keys() == KEYS | {"normalised_bleu", "normalised_signature"}
    assert "|case:lc|" in report["normalised_signature"]
    assert f"normalised: {report['normalised_signature']}" in result.stderr
    assert "BLEU, lower-cased, of Moses' tokens" in result.stderr
    assert f"{report['normalised_bleu']:.2f}" in result.stderr


def test_the_scores_of_an_ensemble_are_printed_although_the_disk_is_full(finished):
    checkpoints = [f"--workdir={finished}@{step}" for step in (150, 200)]
    result = run("evaluate", *checkpoints, "--split=valid", "--translations=/dev/full")
    report = json.loads(result.stdout)
    assert report["run"] == "numbers + numbers"
    assert report["workdirs"] == [f"{finished}@150", f"{finished}@200"]
    assert result.returncode == 2
    assert "error: No space left on device: /dev/full" in result.stderr


def test_a_split_that_is_elsewhere_now_can_be_given_as_files(finished, tmp_path):
    moved = tmp_path / "run"
    shutil.copytree(finished, moved)
    config = json.loads((moved / "config.json").read_text())
    config["config"]["data"] |= {"source": "folder", "path": str(tmp_path / "gone")}
    del config["crc32"]
    (moved / "config.json").write_text(json.dumps(config))
    message = refused("evaluate", f"--workdir={moved}")
    assert str(tmp_path / "gone") in message
    assert message.endswith("--source and --reference score two files instead")


@pytest.mark.parametrize("flag", ["--source", "--reference"])
def test_a_source_and_its_reference_belong_together(flag):
    assert "give both --source and --reference" in refused("evaluate", "--workdir=/nowhere", f"{flag}=a.txt")


def test_files_of_different_length_are_refused_before_a_run_is_looked_for(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n")
    (tmp_path / "b.txt").write_text("a\n")
    options = [f"--source={tmp_path / 'a.txt'}", f"--reference={tmp_path / 'b.txt'}"]
    message = refused("evaluate", "--workdir=/nowhere", *options)
    assert f"{tmp_path / 'a.txt'} has 2 lines and {tmp_path / 'b.txt'} has 1:" in message
    assert "no.txt" in refused("evaluate", "--workdir=/nowhere", options[0], "--reference=no.txt")


def test_a_place_for_translations_that_cannot_be_written_is_told_of_before_any_work(tmp_path):
    message = refused("evaluate", "--workdir=/nowhere", f"--translations={tmp_path / 'no/out.txt'}")
    assert str(tmp_path / "no/out.txt") in message


def test_a_flag_for_classifiers_is_refused_for_a_translator(finished, tmp_path):
    message = refused("evaluate", f"--workdir={finished}", f"--confusion={tmp_path / 'a.png'}")
    assert "--confusion has no effect with numbers, which translates: leave it out" in message
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("name", ["a.txt", "b.txt"])
def test_a_text_is_not_overwritten_by_its_translations(tmp_path, name):
    for text in ("a.txt", "b.txt"):
        (tmp_path / text).write_text("a\n")
    options = [f"--source={tmp_path / 'a.txt'}", f"--reference={tmp_path / 'b.txt'}"]
    (tmp_path / "link").symlink_to(tmp_path / name)
    for other_spelling in (f"{tmp_path}/./{name}", tmp_path / "link"):
        message = refused("evaluate", "--workdir=/nowhere", *options, f"--translations={other_spelling}")
        assert message.startswith(f"{other_spelling} is an input")
    assert (tmp_path / name).read_text() == "a\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the directory of a trained run: --workdir=runs/NAME"),
        (["--workdir=/nowhere", "--split=dev"], "--split=dev: it must be one of train, valid, test"),
        (["--workdir=/nowhere", "in.txt"], "unexpected argument 'in.txt'"),
        (["--workdir=/nowhere", "--confusion=no.gif"], "--confusion=no.gif: the file of a picture must end in"),
        (["--workdir=/nowhere", "--confusion=/nowhere/a.png"], "No such file or directory: /nowhere/a.png"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_in_one_message(arguments, message):
    assert message in refused("evaluate", *arguments)


@pytest.mark.parametrize("name", ["lowercase", "tokenized"])
def test_a_run_on_normalised_text_needs_no_flag_for_it(finished, tmp_path, name):
    shutil.copytree(finished, tmp_path / "run")
    content = json.loads((tmp_path / "run/config.json").read_text())
    content["config"]["data"][name] = True
    del content["crc32"]
    (tmp_path / "run/config.json").write_text(json.dumps(content))
    result = run("evaluate", f"--workdir={tmp_path}/run", f"--{name}")
    assert result.returncode == 2
    assert f"error: --{name} has no effect with numbers, which has config.data.{name}=True" in result.stderr


def test_a_score_as_others_publish_it_is_of_text_normalised_alike_on_both_sides():
    program = """if True:
        from types import SimpleNamespace as Made
        from absl import flags
        from transformer_flax import evaluate
        from transformer_flax.data.normalisation import Normaliser
        flags.FLAGS(["evaluate"])
        for flag, own, ours, theirs in (
            ("tokenized", Normaliser("de", lowercase=True), "er sagt: ja, gut.", "Er sagt: Ja, gut."),
            ("lowercase", Normaliser("de", tokenized=True), "Er sagt : ja , gut .", "er sagt: Ja, gut."),
        ):
            flags.FLAGS.lowercase, flags.FLAGS.tokenized = flag == "lowercase", flag == "tokenized"
            run = Made(normalise=(None, own), config=Made(data=Made(target_language="de")))
            found = evaluate._score_normalised(run, Made(translations=[ours]), [theirs])
            print(round(found.bleu), "|case:lc|" in found.signature, "|tok:moses-de|" in found.signature)
        """
    result = forked.run("-c", program)
    assert result.stdout.splitlines() == ["100 True True"] * 2, result.stderr
