"""Attention as one interactive page: a file that opens in any browser, without a network."""

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from transformer_flax.analysis.attention import Attention
from transformer_flax.analysis.heads import head_colours
from transformer_flax.errors import UserError

TEMPLATE = pathlib.Path(__file__).with_name("page.html")
PLACE = "{{DATA}}"  # in the template
WHOLE = 1000  # a weight of 1, as the page has it


def attention_page(attentions: Attention | Iterable[Attention]) -> str:
    """The HTML of a page that shows one or several sentences; kind, layer and heads are chosen by clicks.

    Hovering over a word shows what it attends to, or what attends to it, and how much; a click holds it.

    Raises:
      UserError: there is no sentence.
    """
    several = [attentions] if isinstance(attentions, Attention) else list(attentions)
    if not several:
        raise UserError("there is no sentence to show; an attention page needs at least one")
    data = [_described(attention) for attention in several]
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # In a script element only "</" and "<!--" could end or change it; "<" stands in strings alone.
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text.replace("<", "\\u003c"))


def write_page(attentions: Attention | Iterable[Attention], file: str | os.PathLike) -> None:
    """Writes `attention_page` to a file."""
    pathlib.Path(file).write_text(attention_page(attentions), encoding="utf-8")


def _described(attention: Attention) -> dict[str, Any]:
    kinds = {}
    for kind in attention.kinds:
        rows, columns = attention.labels(kind)
        weights = np.rint(attention.layers(kind) * WHOLE).astype(int).tolist()
        kinds[kind] = {"rows": rows, "columns": columns, "weights": weights}  # [N][H][rows][columns]
    return {
        "source": attention.source.text,
        "target": attention.target.text,
        "colours": head_colours(attention.num_heads),
        "kinds": kinds,
    }
