import pytest

from transformer_flax.analysis.length import Bucket, exact_match_by_length, plot_exact_match
from transformer_flax.errors import UserError

LENGTHS = [1, 2, 2, 3, 6, 6]
TRANSLATIONS = ["a", "b c", "b", "", "x", "x y"]
REFERENCES = ["a", "b c", "b c", "d", "x y", "x y"]


def test_sentences_are_counted_in_the_bucket_of_their_length():
    assert exact_match_by_length(LENGTHS, TRANSLATIONS, REFERENCES) == [
        Bucket(1, 1, right=1, count=1),
        Bucket(2, 2, right=1, count=2),
        Bucket(3, 3, right=0, count=1),
        Bucket(6, 6, right=1, count=2),
    ]
    assert exact_match_by_length(LENGTHS, TRANSLATIONS, REFERENCES, width=3) == [
        Bucket(1, 3, right=2, count=4),
        Bucket(4, 6, right=1, count=2),
    ]


def test_the_picture_has_the_mean_of_the_runs_of_a_name(tmp_path):
    one, other = ([Bucket(1, 2, right, 4), Bucket(3, 4, 0, 4)] for right in (4, 2))
    figure = plot_exact_match({"learned": [one, other]}, trained=2, file=tmp_path / "length.png")
    curve, mark = figure.axes[0].lines
    assert curve.get_xydata().tolist() == [[1.5, 75.0], [3.5, 0.0]]
    assert list(mark.get_xdata()) == [2.5, 2.5]
    assert (tmp_path / "length.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(UserError, match="6 lengths, 5 translations and 6 references"):
        exact_match_by_length(LENGTHS, TRANSLATIONS[1:], REFERENCES)
    with pytest.raises(UserError, match="width is 0"):
        exact_match_by_length(LENGTHS, TRANSLATIONS, REFERENCES, width=0)
