import numpy as np

from transformer_flax.analysis.plots import plot_positions, similarity
from transformer_flax.model.positions import sinusoids


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
