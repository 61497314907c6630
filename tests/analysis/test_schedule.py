import numpy as np
import pytest

from configs import base, numbers
from tests import forked
from transformer_flax.analysis.plots import plot_schedule


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
