"""How well labels agree with those that are right: accuracy, precision, recall, F1, and what is taken for what."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from transformer_flax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class ClassScores:
    """Of labels beside the right ones; what would be 0 / 0 is 0."""

    classes: tuple[str, ...]
    confusion: np.ndarray  # int64 [C, C]: how many of each class (row) were found to be of each class (column)

    @property
    def accuracy(self) -> float:
        """The share of labels that are right."""
        return _ratio(np.trace(self.confusion), self.confusion.sum()).item()

    @property
    def precision(self) -> np.ndarray:
        """Of those found to be of a class, the share that are: [C]."""
        return _ratio(np.diag(self.confusion), self.confusion.sum(axis=0))

    @property
    def recall(self) -> np.ndarray:
        """Of those of a class, the share found to be: [C]."""
        return _ratio(np.diag(self.confusion), self.support)

    @property
    def f1(self) -> np.ndarray:
        """The harmonic mean of precision and recall: [C]."""
        return _ratio(2 * np.diag(self.confusion), self.support + self.confusion.sum(axis=0))

    @property
    def support(self) -> np.ndarray:
        """How many are of each class: [C]."""
        return self.confusion.sum(axis=1)

    @property
    def macro_f1(self) -> float:
        """The mean of F1 over the classes that are among the right labels or those found, however frequent."""
        occurs = self.support + self.confusion.sum(axis=0) > 0
        return self.f1[occurs].mean().item() if occurs.any() else 0.0


def compare(labels: Sequence[str], references: Sequence[str], classes: Sequence[str]) -> ClassScores:
    """Counts labels beside the right ones.

    Raises:
      UserError: one is the name of no class.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    for name in references:
        if name not in numbers:
            raise UserError(f"{name!r} is none of the classes that the model knows, which are {', '.join(classes)}")
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    pairs = [(numbers[right], numbers[found]) for found, right in zip(labels, references, strict=True)]
    np.add.at(confusion, tuple(np.array(pairs, int).reshape(-1, 2).T), 1)
    return ClassScores(tuple(classes), confusion)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(np.shape(whole)), where=np.asarray(whole) > 0)
