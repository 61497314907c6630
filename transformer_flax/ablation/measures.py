"""Measures by which a sweep's variants are compared."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from transformer_flax.ablation import table3

LARGEST_LOSS = 600.0  # nats; e^600 can be drawn, on an axis with margins, too


@dataclasses.dataclass(frozen=True)
class Measure:
    """What variants are compared in, on the validation split."""

    name: str
    unit: str
    digits: int  # of a difference, behind the point
    more_is_better: bool
    of: Callable[[Mapping[str, float]], float]  # scores, as an evaluation names them -> what is averaged and compared
    level_name: str
    level: Callable[[float], float]  # what is averaged -> what is told of a single variant
    paper_name: str  # what it is held against
    paper_digits: int
    of_paper: Callable[[table3.PaperRow], float]

    def mean(self, scores: Sequence[Mapping[str, float]]) -> float:
        """Of several runs, as it is told of a variant."""
        return self.level(float(np.mean([self.of(each) for each in scores])))


def _perplexity(loss: float) -> float:
    """e^loss; an interval of few seeds that differ much may end where no float reaches."""
    if not math.isfinite(loss):
        return loss
    return math.exp(max(-LARGEST_LOSS, min(LARGEST_LOSS, loss)))


# The logarithm, in nats, is what a run minimises; and its difference is the ratio of two perplexities, which means the
# same at 5 and at 10. So means over seeds are geometric ones of perplexity.
LOG_PERPLEXITY = Measure(
    name="log-perplexity",
    unit="nats a piece",
    digits=3,
    more_is_better=False,
    of=lambda scores: math.log(scores["perplexity"]),
    level_name="perplexity",
    level=_perplexity,
    paper_name="log-perplexity",
    paper_digits=3,
    of_paper=lambda row: math.log(row.perplexity),
)
BLEU = Measure(
    name="BLEU",
    unit="points",
    digits=2,
    more_is_better=True,
    of=lambda scores: scores["bleu"],
    level_name="BLEU",
    level=float,
    paper_name="BLEU",
    paper_digits=1,
    of_paper=lambda row: row.bleu,
)
EXACT_MATCH = dataclasses.replace(
    BLEU,
    name="exact match",
    unit="% of sentences",
    digits=1,
    of=lambda scores: 100 * scores["exact_match"],
    level_name="exact match, %",
)
ACCURACY = dataclasses.replace(
    EXACT_MATCH,
    name="accuracy",
    unit="% of texts",
    of=lambda scores: 100 * scores["accuracy"],
    level_name="accuracy, %",
)
SOURCE_GAIN = dataclasses.replace(  # of which the paper says nothing: for curves alone
    BLEU,
    name="source gain",
    unit="nats a token",
    of=lambda scores: scores["source_gain"],
    level_name="source gain, nats a token",
)
