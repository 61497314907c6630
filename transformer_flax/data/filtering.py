"""Selection of training pairs, with the number of dropped pairs for each reason."""

import collections
import dataclasses
import hashlib

import numpy as np

from transformer_flax.data.corpus import Corpus, blocks


@dataclasses.dataclass(frozen=True)
class Selection:
    """The pairs of a split that are used, in the order of the split."""

    indices: np.ndarray  # int32 [pairs used]
    dropped: dict[str, int]  # dropped pairs for each reason; a pair counts for the first reason that applies


def select_training_pairs(corpus: Corpus, config) -> Selection:
    """Drops pairs with an empty side, a long side or unlikely lengths, and duplicates on request.

    `max_length`, `max_length_ratio` and `drop_duplicates` of `config.data` specify which pairs to drop.
    """
    max_length, max_length_ratio = config.max_length, config.max_length_ratio
    duplicate = _is_duplicate(corpus) if config.drop_duplicates else None
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
    """Returns True for each pair that also occurs earlier in the corpus: bool [pairs]."""
    digests = np.empty(len(corpus), np.int64)  # 64 bits: among a few billion pairs, two may collide
    for i in range(len(corpus)):
        pair = corpus.source[i].tobytes() + corpus.target[i].tobytes()  # unambiguous: a side ends at its one end symbol
        digests[i] = int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest(), "little", signed=True)
    duplicate = np.ones(len(corpus), bool)
    duplicate[np.unique(digests, return_index=True)[1]] = False
    return duplicate
