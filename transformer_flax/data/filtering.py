"""Which pairs a model is trained on, and how many were left out for which reason."""

import collections
import dataclasses
import hashlib

import numpy as np

from transformer_flax.data.corpus import Corpus, blocks


@dataclasses.dataclass(frozen=True)
class Selection:
    """A part of a split, in its order."""

    indices: np.ndarray  # int32 [pairs that are used]
    dropped: dict[str, int]  # by the first reason that holds


def select_training_pairs(
    corpus: Corpus, max_length: int, *, max_length_ratio: float = 0.0, drop_duplicates: bool = False
) -> Selection:
    """Leaves out what a model should not learn from; lengths are in tokens, the end symbol included.

    Args:
      corpus: the training split.
      max_length: of the longer side.
      max_length_ratio: of the longer side to the shorter; 0 for any.
      drop_duplicates: keep the first only of pairs of which both sides are the same.
    """
    duplicate = _is_duplicate(corpus) if drop_duplicates else None
    dropped: collections.Counter[str] = collections.Counter()
    kept = []
    for block in blocks(len(corpus)):
        indices = np.arange(block.start, block.stop, dtype=np.int32)
        source, target = corpus.source.lengths_of(indices), corpus.target.lengths_of(indices)
        shorter, longer = np.minimum(source, target), np.maximum(source, target)
        reasons = {"an empty side": shorter == 1, f"more than {max_length} tokens": longer > max_length}
        if max_length_ratio:
            reasons[f"one side over {max_length_ratio:g} times as long"] = longer > max_length_ratio * shorter
        if duplicate is not None:
            reasons["an earlier one the same"] = duplicate[block]
        left = np.ones(len(indices), bool)
        for reason, holds in reasons.items():
            dropped[reason] += int(np.sum(left & holds))
            left &= ~holds
        kept.append(indices[left])
    return Selection(np.concatenate([np.empty(0, np.int32), *kept]), dict(dropped))


def _is_duplicate(corpus: Corpus) -> np.ndarray:
    """True for pairs that stand before in the corpus: bool [pairs]."""
    digests = np.empty(len(corpus), np.int64)  # of which two in a few billion may be equal by chance
    for i in range(len(corpus)):
        text = (
            corpus.source[i].tobytes() + corpus.target[i].tobytes()
        )  # the end symbol closes each, and stands nowhere else
        digests[i] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    duplicate = np.ones(len(corpus), bool)
    duplicate[np.unique(digests, return_index=True)[1]] = False
    return duplicate
