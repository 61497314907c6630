"""The vocabulary of class labels: each label is a sentence of one token."""

import json
from collections.abc import Sequence

import numpy as np

from transformer_flax.data.sentence_pairs import Pairs, iterate_pairs
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import NUM_SPECIAL


class Classes:
    """The class names in order. Class c is the token NUM_SPECIAL + c. The special tokens are the same as for text."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.vocab_size = NUM_SPECIAL + len(self.names)
        self._tokens = {name: NUM_SPECIAL + number for number, name in enumerate(self.names)}

    @classmethod
    def of(cls, pairs: Pairs) -> "Classes":
        """Returns the classes that occur as targets of these pairs, sorted."""
        return cls(sorted({label for chunk in iterate_pairs(pairs) for _, label in chunk}))

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        shown = ", ".join(self.names[:20])
        return f"{shown} and {len(self) - 20:,} more" if len(self) > 20 else shown

    def to_json(self) -> str:
        return json.dumps(self.names)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes labels like `Tokenizer.encode_flat`: ids, int32 [labels], and lengths, int64 [labels], all 1."""
        for text in texts:
            if text not in self._tokens:
                raise UserError(f"the label {text!r} is none of the classes of the train split, which are {self}")
        return np.array([self._tokens[text] for text in texts], np.int32), np.ones(len(texts), np.int64)
