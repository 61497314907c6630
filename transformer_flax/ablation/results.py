"""What a run of a sweep came to."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished or failed run."""

    variant: str  # "A-h1", or "A-h1 model.dropout=0.2" with a grid's fields behind it, or a name of the user's
    row: str  # of table 3, before the grid's fields
    changes: dict[str, Any]  # flat config fields that differ from the sweep's base config
    seed: int
    status: str  # "finished" or "failed"
    error: str  # of a failed one, one line
    parameters: int
    flops: float  # of the whole training
    steps: int
    seconds: float  # of training
    scores: dict[str, dict[str, float]]  # by split, at the end
    signature: str  # of the BLEU
    curve: list[list[float]]  # [step, seconds, perplexity, bleu, exact_match] of each validation

    @property
    def finished(self) -> bool:
        return self.status == "finished"
