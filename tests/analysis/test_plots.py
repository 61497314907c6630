"""Pictures of runs, schedules and positions show what they say."""

import shutil

import numpy as np
import pytest

from configs import base, numbers
from tests import forked
from tests.training.small import small_config
from transformer_flax.analysis.plots import plot_curves, plot_positions, plot_schedule, similarity
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.model.positions import sinusoids
from transformer_flax.training.metrics import MetricsWriter
from transformer_flax.training.run_directory import RunDirectory


@pytest.fixture
def workdir(tmp_path):
    workdir = RunDirectory(tmp_path / "run")
    workdir.claim(small_config(), {}, Tokenizer.train(["a b"], 259))
    writer = MetricsWriter(workdir.metrics_file, 0, score="bleu")
    for step in (10, 20, 30):
        writer.write(step, "valid", {"bleu": step})
    writer.close()
    return workdir.path


def test_a_curve_has_every_point_that_was_measured(workdir, tmp_path):
    figure = plot_curves([workdir, workdir], "valid/bleu", x="step", file=tmp_path / "curve.png")
    for line in figure.axes[0].lines:
        assert line.get_xydata().tolist() == [[10, 10], [20, 20], [30, 30]]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_are_told_apart_by_their_directories(workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "again")
    (alone,) = plot_curves(workdir).axes[0].lines
    assert alone.get_label() == RunDirectory(workdir).load_config().name
    both = plot_curves([workdir, tmp_path / "again"]).axes[0].lines
    assert [line.get_label() for line in both] == [str(workdir), str(tmp_path / "again")]


def test_time_is_told_in_minutes(workdir):
    seconds = [line["seconds"] for line in read_json_lines(workdir / "metrics.jsonl")]
    (line,) = plot_curves(str(workdir)).axes[0].lines
    assert line.get_xdata() == pytest.approx([s / 60 for s in seconds])


def test_a_run_that_is_not_there_is_told_of_as_such(workdir, tmp_path):
    with pytest.raises(UserError, match=r"there is no directory \S+nowhere$"):
        plot_curves([tmp_path / "nowhere"])
    with pytest.raises(UserError, match=r"holds no run: it has no config\.json"):
        plot_curves([tmp_path])
    (workdir / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no valid/bleu; it has nothing yet"):
        plot_curves([workdir])


def test_what_was_not_measured_is_told_with_what_was(workdir, tmp_path):
    with pytest.raises(UserError, match="has no train/loss; it has valid/bleu"):
        plot_curves([workdir], "train/loss", file=tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_the_learning_rate_of_every_step_and_its_peak(tmp_path):
    figure = plot_schedule([base.get_config(), numbers.get_config()], file=tmp_path / "schedule.png")
    [paper, ours] = figure.axes[0].lines
    # 512^-0.5 * 4000^-0.5 = 6.99e-4, and then as the inverse root of the step.
    assert paper.get_label() == "base: at most 0.000699, at step 4,000"
    steps, rates = paper.get_data()
    np.testing.assert_allclose(rates, 512**-0.5 * np.minimum(steps**-0.5, steps * 4000**-1.5), rtol=1e-5)
    assert (steps[0], steps[-1]) == (1, 100_000)
    assert ours.get_xdata()[-1] == 1_000
    assert max(ours.get_ydata()) == pytest.approx(0.6 * (128 * 300) ** -0.5, rel=1e-5)
    free = base.get_config()
    free.optimizer.name = "schedule_free"
    [line] = plot_schedule([free]).axes[0].lines
    assert line.get_ydata()[-1] == pytest.approx((512 * 4000) ** -0.5, rel=1e-5)  # it stays at its peak
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_the_pictures_of_the_docs_that_need_no_run_are_made_without_one(tmp_path):
    forked.run("docs/pictures.py", f"--output={tmp_path}")
    assert {file.name for file in tmp_path.iterdir()} == {"positions.png", "schedule.png"}


def test_positions_are_drawn_with_how_alike_they_are(tmp_path):
    encoding = sinusoids(20, 16)
    figure = plot_positions(encoding, file=tmp_path / "positions.png")
    shown = [axes.images[0].get_array() for axes in figure.axes if axes.images and axes.get_xlabel()]
    np.testing.assert_array_equal(shown[0], encoding)
    np.testing.assert_array_equal(shown[1], similarity(encoding))
    assert (tmp_path / "positions.png").read_bytes().startswith(b"\x89PNG")


def test_how_alike_two_sinusoids_are_depends_on_their_distance():
    cosines = similarity(sinusoids(50, 64))
    np.testing.assert_allclose(np.diag(cosines), 1, rtol=1e-5)
    angles = 1 / 10000 ** (np.arange(32) * 2 / 64)
    for distance in (1, 7, 40):
        np.testing.assert_allclose(np.diag(cosines, distance), np.cos(distance * angles).mean(), atol=1e-5)
