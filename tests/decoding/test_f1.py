"""Accuracy, F1 and what is taken for what, by hand."""

import numpy as np
import pytest

from transformer_flax.decoding.scoring import score_labels
from transformer_flax.errors import UserError

CLASSES = ("a", "b", "c", "never")
RIGHT = ["a", "a", "a", "b", "b", "c"]
FOUND = ["a", "a", "b", "b", "c", "b"]


def test_scores_are_those_of_the_confusion():
    scores = score_labels(FOUND, RIGHT, CLASSES)
    np.testing.assert_array_equal(scores.confusion, [[2, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert scores.accuracy == pytest.approx(3 / 6)
    np.testing.assert_allclose(scores.precision, [1, 1 / 3, 0, 0])
    np.testing.assert_allclose(scores.recall, [2 / 3, 1 / 2, 0, 0])
    np.testing.assert_allclose(scores.f1, [0.8, 0.4, 0, 0])
    assert scores.macro_f1 == pytest.approx(1.2 / 3)  # the class that never occurs has no part in it
    assert score_labels(RIGHT, RIGHT, CLASSES).macro_f1 == 1
    assert score_labels(["never"], ["a"], CLASSES).macro_f1 == 0
    assert score_labels([], [], CLASSES).accuracy == score_labels([], [], CLASSES).macro_f1 == 0


def test_a_right_label_that_is_no_class_is_refused():
    with pytest.raises(UserError, match="'d' is none of the classes that the model knows, which are a, b"):
        score_labels(["a"], ["d"], ("a", "b"))
