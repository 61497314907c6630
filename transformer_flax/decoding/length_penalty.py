"""The length penalty: the one definition of what hypotheses are ranked by (section 6.1)."""

import dataclasses
from typing import Any

from transformer_flax.errors import UserError

KINDS = ("gnmt", "length", "none")


@dataclasses.dataclass(frozen=True)
class LengthPenalty:
    """What log P(Y|X) is divided by for the score of a hypothesis, so that short ones do not win for being short.

    "gnmt": ((5 + |Y|) / 6)^alpha (Wu et al., 2016, equation 14; the paper's); "length": |Y|^alpha; "none": 1.
    """

    kind: str
    alpha: float

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(f"the length penalty is {self.kind!r}; it must be one of {', '.join(KINDS)}")

    def __call__(self, length: Any) -> Any:
        """Of |Y|, which is at least 1 and counts the end symbol."""
        if self.kind == "gnmt":
            return ((5 + length) / 6) ** self.alpha
        return (1.0 * length) ** self.alpha if self.kind == "length" else 1.0
