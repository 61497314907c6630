"""`python -m transformer_flax.align` as a user meets it."""

import pytest

import transformer_flax
from tests import forked
from tests.commands.process import refused, succeeds
from tests.training.small import copied
from transformer_flax.analysis.alignment import align, to_pharaoh
from transformer_flax.analysis.attention_page import attention_page

LINES = ["dreihundert", "", "zweihundert fünf"], ["three hundred", "", "two hundred and five"]


@pytest.fixture
def files(tmp_path):
    for name, lines in zip(("source", "target"), LINES, strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return [f"--{name}={tmp_path / name}" for name in ("source", "target")]


def test_each_pair_of_lines_has_a_line_of_links_and_gold_ones_an_error_rate(finished, files, tmp_path):
    (tmp_path / "gold").write_text("1-1 1-2\n\n\n")
    options = [
        f"--gold={tmp_path / 'gold'}",
        "--first=1",
        "--layers=0",
        "--heads=1",
        f"--page={tmp_path / 'page.html'}",
    ]
    result = succeeds("align", f"--workdir={finished}", *files, *options)
    attentions = list(transformer_flax.restore(finished).attentions(*LINES))
    expected = [to_pharaoh(align(attention, layers=[0], heads=[1])) for attention in attentions]
    assert result.stdout.splitlines() == expected
    assert expected[:2] == ["0-0 0-1", ""]
    assert len(expected[2].split()) == 4
    # Of the six links found and two sure ones, the two of the first line agree: 1 - (2 + 2) / (6 + 2).
    assert "alignment error rate: 0.5000" in result.stderr
    assert (tmp_path / "page.html").read_text() == attention_page(attentions)


def test_without_a_target_the_runs_own_translations_are_aligned_and_written(finished, files, tmp_path):
    line = ["align", f"--workdir={finished}", "--by=read", "--heads=0"]
    result = succeeds(*line, files[0], f"--translations={tmp_path / 'out'}")
    restored = transformer_flax.restore(finished)
    assert result.stdout.splitlines() == [
        to_pharaoh(align(each, heads=[0], by="read")) for each in restored.attentions(LINES[0])
    ]
    translations = (tmp_path / "out").read_text().splitlines()
    assert translations == restored.translate(LINES[0])
    (tmp_path / "target").write_text((tmp_path / "out").read_text())
    assert succeeds(*line, *files).stdout == result.stdout


BREAKING = """
import dataclasses
from unittest import mock
from absl import flags
from transformer_flax import align

flags.FLAGS(["align", *{}])
run, settings = align.RESTORE()

def attentions(*sides, **settings):
    for each in run.attentions(*sides, **settings):
        yield dataclasses.replace(each, target=dataclasses.replace(each.target, text="two\\nwords"))

align.RESTORE = lambda: (mock.Mock(wraps=run, attentions=attentions), settings)
align.main()
"""  # a run that puts out line breaks


def test_each_translation_is_written_on_one_line(finished, files, tmp_path):
    line = [f"--workdir={finished}", files[0], f"--translations={tmp_path / 'out'}"]
    result = forked.run("-c", BREAKING.format(line))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out").read_text() == "two words\n" * 3


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_line_whose_words_the_run_splits_is_refused(finished, files, tmp_path, side):
    (tmp_path / side).write_text("five, six\n\n\n")
    message = refused("align", f"--workdir={copied(finished, tmp_path / 'run', tokenized=True)}", *files)
    assert f"--{side}, line 1, has 2 words, and 3 as the run reads them" in message


def test_what_cannot_be_aligned_is_refused(finished, files, tmp_path):
    assert "--source=FILE" in refused("align", f"--workdir={finished}")
    for option in "beam_size=2", "batch_size=2", "window=2", "translations=out":
        name = option.partition("=")[0]
        assert f"--{name} has no effect with --target" in refused("align", *files, f"--{option}")
    assert "--layers is 'last'; it must be whole numbers" in refused("align", files[0], "--layers=last")
    assert "--heads is ''; it must be whole numbers" in refused("align", files[0], "--heads=")
    assert "--gold needs --target=FILE" in refused("align", files[0], "--gold=gold")
    for gold, why in ("1-1", "1-1 is a link of a word"), ("0?2", "as the sentences have 1 and 2 words"):
        (tmp_path / "gold").write_text(f"{gold}\n\n\n")
        message = refused("align", *files, f"--gold={tmp_path / 'gold'}")
        assert "gold, line 1: " in message
        assert why in message
    for name in ("source", "target", "gold"):
        output = f"--page={tmp_path}/./{name}"
        assert "is an input" in refused("align", *files, f"--gold={tmp_path / 'gold'}", output)
    translations = f"--translations={tmp_path / 'source'}"
    assert "is an input" in refused("align", files[0], translations)
    (tmp_path / "gold").write_text("0-0\n")
    message = refused("align", f"--workdir={finished}", *files, f"--gold={tmp_path / 'gold'}")
    assert "source has 3 lines and" in message


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--heads=0,-1", "--heads has -1; the model has heads 0 to 1"),
        ("--layers=-2", "--layers has -2; the model has layers 0 to 0"),
    ],
)
def test_heads_and_layers_that_are_not_there_are_refused_before_anything_is_translated(finished, tmp_path, option, why):
    (tmp_path / "long").write_text("drei " * 1000)  # a line that is refused as soon as it is read into the model
    assert refused("align", f"--workdir={finished}", f"--source={tmp_path / 'long'}", option) == why
