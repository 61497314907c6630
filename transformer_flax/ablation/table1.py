"""Table 1: the cost of a layer of each kind, as functions of its sizes. `benchmarks/table1.py` measures the same.

n is the length of the sequence, d the width of its representations, k the width of a convolution's kernel, and r the
size of the neighbourhood of restricted self-attention. Constants are left out, as in the paper.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple


class Costs(NamedTuple):
    """The three columns of the table."""

    operations: float  # complexity of a layer
    sequential: float  # operations that cannot run in parallel
    path: float  # longest path between two positions


@dataclasses.dataclass(frozen=True)
class Layer:
    """A row of the table: its columns as formulas, and as a function of n, d, k and r."""

    name: str
    formulas: tuple[str, str, str]
    costs: Callable[[int, int, int, int], Costs]

    def exponent(self, *, n: int = 4096, d: int, k: int, r: int) -> float:
        """The exponent of n in the operations near some n: the slope of log(operations) over log(n)."""
        return math.log2(self.costs(2 * n, d, k, r).operations / self.costs(n, d, k, r).operations)


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("self-attention", ("n^2 d", "1", "1"), lambda n, d, k, r: Costs(n**2 * d, 1, 1)),
        Layer("recurrent", ("n d^2", "n", "n"), lambda n, d, k, r: Costs(n * d**2, n, n)),
        Layer(
            "convolutional",
            ("k n d^2", "1", "log_k n"),
            lambda n, d, k, r: Costs(k * n * d**2, 1, math.log(n, k)),
        ),
        Layer(  # not in the table, but in the text beside it
            "separable convolutional",
            ("k n d + n d^2", "1", "log_k n"),
            lambda n, d, k, r: Costs(k * n * d + n * d**2, 1, math.log(n, k)),
        ),
        Layer(
            "restricted self-attention",
            ("r n d", "1", "n / r"),
            lambda n, d, k, r: Costs(r * n * d, 1, n / r),
        ),
    )
}
