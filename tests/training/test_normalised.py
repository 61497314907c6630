"""A run whose text is normalised is trained, measured and used on the same text."""

import dataclasses
from unittest import mock

import pytest

import transformer_flax
from tests.commands.process import run as command
from tests.training.small import PAIRS, small_config, write_text
from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.training.evaluation import Task
from transformer_flax.training.loop import train

LINE = "Isn't it: Forty-Two?"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("normalised")
    write_text(folder)
    for split in PAIRS:
        for language in ("en", "de"):
            file = folder / f"{split}.{language}"
            file.write_text("".join(f"Isn't it: {line.title()}?\n" for line in file.read_text().splitlines()))
    settings = {"data__lowercase": True, "data__tokenized": True, "data__cache_dir": str(folder / "cache")}
    settings |= {
        "steps": 2,
        "eval__every": 2,
        "eval__sentences": 0,
        "decode__beam_size": 1,
        "decode__max_input_length": 64,
    }
    train(small_config(data__path=str(folder), **settings), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def run(workdir):
    return transformer_flax.restore(workdir)


def test_a_split_is_measured_as_in_training(run, workdir):
    sources, references = run.split("valid")
    assert sources[0].startswith("Isn't it: ")
    report = run.evaluate(sources, references, num_devices=1)
    (measured,) = (line for line in read_json_lines(workdir / "metrics.jsonl") if "valid/perplexity" in line)
    assert report.perplexity == pytest.approx(measured["valid/perplexity"], rel=1e-5)
    assert report.bleu == pytest.approx(measured["valid/bleu"])
    assert (workdir / "translations/2.txt").read_text().splitlines() == report.translations
    assert not any("tokenised" in warning for warning in report.warnings)
    for part in ("|case:lc|", "|tok:moses-de|"):
        assert part in report.signature
    task = Task(mock.Mock(config=run.config, classes=None), run.model)
    assert task.measure(report.translations, references)[1] == {"BLEU": report.signature}


def test_references_are_normalised_before_they_are_compared(run, monkeypatch):
    monkeypatch.setattr(Translator, "translate", lambda *_, **how: ["isn &apos; t it : forty-two ?"])
    report = run.evaluate([LINE], [LINE], num_devices=1)
    assert (round(report.bleu), report.exact_match) == (100, 1)


def test_any_text_that_a_run_is_given_is_normalised(run):
    plain = dataclasses.replace(run, config=run.config.copy_and_resolve_references())
    plain.config.data.update(lowercase=False, tokenized=False)
    english, german = "isn &apos;t it : forty-two ?", "isn &apos; t it : forty-two ?"
    assert run.translate([LINE], num_devices=1) == plain.translate([english], num_devices=1)
    assert run.score([LINE], [LINE], num_devices=1) == plain.score([english], [german], num_devices=1)
    attention = run.attention(LINE, LINE)
    assert [" ".join(side.words) for side in (attention.source, attention.target)] == [english, german]
    with pytest.raises(UserError, match=r"have different config\.data\.lowercase"):
        run.ensemble(plain)


@pytest.mark.parametrize(("flag", "other", "words"), [("source", "target", 6), ("target", "source", 7)])
def test_lines_are_aligned_by_words_that_the_run_keeps_as_they_are(workdir, tmp_path, flag, other, words):
    (tmp_path / flag).write_text(f"{LINE}\n")
    (tmp_path / other).write_text("forty-two\n")
    texts = [f"--{name}={tmp_path / name}" for name in (flag, other)]
    result = command("align", f"--workdir={workdir}", *texts)
    assert result.returncode == 2
    message = f"error: --{flag}, line 1, has 3 words, and {words} as the run reads them; align needs words"
    assert message in result.stderr
