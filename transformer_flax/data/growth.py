"""Limits how much a foreign tokenizer may lengthen a text.

Its steps may each double a text, and a file of 8 KB has room for a hundred of them: the library would never come back.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

from transformer_flax.errors import UserError

MOST_STEPS = 100
LONGEST = 100  # characters that a step puts in the place of others
GROWTH = 16  # times the length of a text; the bytes of a character, spelt as letters, are at most 8
CHAINS: dict[str, tuple[type, str, Callable[[Any, str], int]]] = {  # by their names in a tokenizer
    "normalizer": (tokenizers.normalizers.Sequence, "normalizers", lambda chain, text: len(chain.normalize_str(text))),
    "pre_tokenizer": (
        tokenizers.pre_tokenizers.Sequence,
        "pretokenizers",
        lambda chain, text: sum(len(piece) for piece, _ in chain.pre_tokenize_str(text)),
    ),
    "decoder": (tokenizers.decoders.Sequence, "decoders", lambda chain, text: len(chain.decode([text]))),
}


def require_bounded(backend: tokenizers.Tokenizer, text: str) -> None:
    """Tries the steps of a tokenizer, one more each time, at a text and at what these steps themselves put in.

    Raises:
      UserError: they make far more of it, or are too many to be tried.
    """
    for name, (kind, inner, length) in CHAINS.items():
        part = getattr(backend, name)
        steps = list(_steps(json.loads(part.__getstate__()), inner)) if part else []
        if len(steps) > MOST_STEPS:
            raise UserError(f"its {name} has {len(steps):,} steps; at most {MOST_STEPS} are taken")
        contents = [str(step.get("content", "")) for step in steps]
        if (longest := max(map(len, contents), default=0)) > LONGEST:
            raise UserError(f"its {name} puts in {longest:,} characters at once; at most {LONGEST} are taken")
        tried, chain = text + "".join(contents), kind([])
        for count in range(1, len(steps) + 1):
            chain.__setstate__(json.dumps({"type": "Sequence", inner: steps[:count]}).encode())
            if (made := length(chain, tried)) > GROWTH * len(tried):
                raise UserError(f"its {name} makes {made:,} characters of {len(tried):,}; take out what adds them")


def _steps(part: dict[str, Any], inner: str) -> Iterator[dict[str, Any]]:
    if part["type"] == "Sequence":
        for step in part[inner]:
            yield from _steps(step, inner)
    else:
        yield part
