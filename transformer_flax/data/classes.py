"""The classes that labels name, as a vocabulary: a label is a sentence of one token."""

import json
from collections.abc import Sequence

import numpy as np

from transformer_flax.data.sources import Pairs, read_pairs
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import NUM_SPECIAL

BLOCK = 4096  # pairs read at a time


class Classes:
    """Names in their order: class c is the token NUM_SPECIAL + c, as text is numbered, and id 0 is padding here too."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.vocab_size = NUM_SPECIAL + len(self.names)
        self._tokens = {name: NUM_SPECIAL + number for number, name in enumerate(self.names)}

    @classmethod
    def of(cls, pairs: Pairs) -> "Classes":
        """Those that the targets of pairs name, sorted."""
        names: set[str] = set()
        for start in range(0, len(pairs), BLOCK):
            names.update(label for _, label in read_pairs(pairs, range(start, min(start + BLOCK, len(pairs)))))
        return cls(sorted(names))

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        shown = ", ".join(self.names[:20])
        return f"{shown} and {len(self) - 20:,} more" if len(self) > 20 else shown

    def to_json(self) -> str:
        return json.dumps(self.names)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As a tokenizer does: ids, int32 [labels], and the length of each, which is 1.

        Raises:
          UserError: a label names none of them.
        """
        for text in texts:
            if text not in self._tokens:
                raise UserError(f"the label {text!r} is none of the classes of the train split, which are {self}")
        return np.array([self._tokens[text] for text in texts], np.int32), np.ones(len(texts), np.int64)
