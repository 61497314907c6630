import pathlib

import pytest

from tests import forked
from tests.training.small import small_config, write_text
from transformer_flax.analysis.scores_by_length import Bucket, load_written, measure_by_length, plot_by_length
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.training.run_directory import RunDirectory

LENGTHS = [1, 2, 2, 3, 6, 6]
TRANSLATIONS = ["a", "b c", "b", "", "x", "x y"]
REFERENCES = ["a", "b c", "b c", "d", "x y", "x y"]


def test_sentences_are_measured_in_the_bucket_of_their_length():
    assert measure_by_length(LENGTHS, TRANSLATIONS, REFERENCES) == [
        Bucket(1, 1, count=1, right=1.0, begun=1.0),
        Bucket(2, 2, count=2, right=0.5, begun=0.75),
        Bucket(3, 3, count=1, right=0.0, begun=0.0),
        Bucket(6, 6, count=2, right=0.5, begun=0.75),
    ]
    assert measure_by_length(LENGTHS, TRANSLATIONS, REFERENCES, width=3) == [
        Bucket(1, 3, count=4, right=0.5, begun=0.625),
        Bucket(4, 6, count=2, right=0.5, begun=0.75),
    ]
    assert [bucket.count for bucket in measure_by_length([0, 5, 6], ["", "", ""], ["", "", ""], width=5)] == [2, 1]


def test_words_behind_the_first_wrong_one_and_behind_the_end_do_not_count():
    ours, theirs = ["a x c", "a b c d", "", "a"], ["a b c", "a b", "", ""]
    assert [bucket.begun for bucket in measure_by_length([1, 2, 3, 4], ours, theirs)] == [1 / 3, 1.0, 1.0, 0.0]
    assert [bucket.right for bucket in measure_by_length([1, 2, 3, 4], ours, theirs)] == [0, 0, 1, 0]


def test_the_picture_has_the_mean_of_the_runs_of_a_name(tmp_path):
    one, other = ([Bucket(1, 2, 4, right, 1.0), Bucket(3, 4, 4, 0.0, right)] for right in (1.0, 0.5))
    figure = plot_by_length({"learned": [one, other]}, trained=2, file=tmp_path / "length.png")
    right, begun = (axes.lines[0].get_xydata().tolist() for axes in figure.axes)
    assert right == [[1.5, 75.0], [3.5, 0.0]]
    assert begun == [[1.5, 100.0], [3.5, 75.0]]
    assert [list(axes.lines[1].get_xdata()) for axes in figure.axes] == [[2.5, 2.5]] * 2
    assert (tmp_path / "length.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="the runs of 'learned' are not measured at the same lengths"):
        plot_by_length({"learned": [one, other[:1]]})


def test_each_sentence_has_a_length_a_translation_and_a_reference():
    for lengths, translations in ((LENGTHS, TRANSLATIONS[1:]), (LENGTHS[1:], TRANSLATIONS)):
        with pytest.raises((ValueError, IndexError), match=r"longer|did not match"):
            measure_by_length(lengths, translations, REFERENCES)


def test_translations_belong_to_the_text_that_they_were_made_of(tmp_path):
    config = small_config(steps=1, data__path=str(write_text(tmp_path)))
    pairs = {split: load_pairs(config.data, split) for split in ("train", "valid", "test")}
    place = RunDirectory(tmp_path / "run")
    fingerprints = {split: pairs[split].fingerprint for split in pairs}
    english, german = ((tmp_path / f"test.{language}").read_text().splitlines() for language in ("en", "de"))
    place.claim(config, fingerprints, Tokenizer.train(english + german, 300))
    place.save_outputs("translations", "test", 1, [f"{line}!" for line in german])
    assert load_written(place, "test") == [(a, b, f"{b}!") for a, b in zip(english, german, strict=True)]
    (tmp_path / "test.en").write_text("\n".join(["one", *english[1:]]) + "\n")
    with pytest.raises(UserError, match="was not measured with this test split: it has changed"):
        load_written(place, "test")


def copying(path: pathlib.Path, longest_tested: int) -> pathlib.Path:
    """Makes the directory of a run, as if its model had learned to copy, but six letters at most."""
    made = {"source": "copy", "num_pairs": 100, "longest_trained": 5, "longest_tested": longest_tested}
    config = small_config(steps=1, **{f"data__{name}": value for name, value in made.items()})
    pairs = {split: load_pairs(config.data, split) for split in ("train", "valid", "test")}
    place = RunDirectory(path)
    fingerprints = {split: pairs[split].fingerprint for split in pairs}
    lines = {split: [source for source, _ in each.read(range(len(each)))] for split, each in pairs.items()}
    place.claim(config, fingerprints, Tokenizer.train(lines["train"], 285))
    place.save_outputs("translations", "valid", 1, lines["valid"])
    place.save_outputs("translations", "test", 1, [line[:11] for line in lines["test"]])
    return place.path


def test_the_script_of_the_docs_measures_what_runs_have_written(tmp_path):
    run = copying(tmp_path / "run", longest_tested=7)
    told = forked.run("docs/length.py", f"--output={tmp_path}/length.png", "--width=1", run)
    assert told.stdout.splitlines() == [
        "| tokens | sinusoidal (1) |",
        "|---|---|",
        "| 4 | 100.0 % / 100.0 % |",
        "| 5 | 100.0 % / 100.0 % |",
        "| 6 | 100.0 % / 100.0 % |",
        "| 7 | 0.0 % / 85.7 % |",
    ]
    assert (tmp_path / "length.png").read_bytes().startswith(b"\x89PNG")
    told = forked.run("docs/length.py", "--width=1", run, copying(tmp_path / "other", longest_tested=6))
    assert told.stderr == "error: the runs were tested on sources of different lengths; draw them apart\n"
    assert not told.stdout


def test_the_last_translations_are_read_also_where_patience_ended_a_run(tmp_path):
    place = RunDirectory(tmp_path)
    with pytest.raises(UserError, match="has no translations of the valid split"):
        place.load_translations("valid")
    for step in (8, 10):
        place.save_outputs("translations", "valid", step, [f"ours after {step}"])
        place.save_outputs("translations", "test", step + 1, ["theirs"])
    assert place.load_translations("valid") == ["ours after 10"]
