"""Table 1: the cost of a layer of each kind, as functions of its sizes. `benchmarks/table1.py` measures the same.

n is the length of the sequence, d the width of its representations, k the width of a convolution's kernel, and r the
size of the neighbourhood of restricted self-attention. Constants are left out, as in the paper.
"""

import math
from collections.abc import Callable
from typing import NamedTuple


class Costs(NamedTuple):
    """The three columns of the table."""

    operations: float  # complexity of a layer
    sequential: float  # operations that cannot run in parallel
    path: float  # longest path between two positions


LAYERS: dict[str, Callable[[int, int, int, int], Costs]] = {  # functions of n, d, k and r
    "self-attention": lambda n, d, k, r: Costs(n**2 * d, 1, 1),
    "recurrent": lambda n, d, k, r: Costs(n * d**2, n, n),
    "convolutional": lambda n, d, k, r: Costs(k * n * d**2, 1, math.log(n, k)),
    # not in the table, but in the text beside it
    "separable convolutional": lambda n, d, k, r: Costs(k * n * d + n * d**2, 1, math.log(n, k)),
    "restricted self-attention": lambda n, d, k, r: Costs(r * n * d, 1, n / r),
}
