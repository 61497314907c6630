"""Attention as an interactive page: a file that opens in any browser, without a network."""

import json
import os
import pathlib
from collections.abc import Iterable

import numpy as np

from transformer_flax.analysis.attention import Attention
from transformer_flax.analysis.plots import head_colours

TEMPLATE = pathlib.Path(__file__).with_name("attention_page.html")
WHOLE = 1000  # the page's number for a weight of 1


def attention_page(attentions: Attention | Iterable[Attention]) -> str:
    """Returns the HTML of a page that shows one or several sentences. Clicks choose the kind, layer and heads.

    Hovering over a word shows how much the word attends to each other word, or is attended to. A click keeps the word
    selected.
    """
    sentences = [
        {
            "source": attention.source.text,
            "target": attention.target.text,
            "colours": head_colours(attention.num_heads),
            "kinds": {kind: _kind(attention, kind) for kind in attention.kinds},
        }
        for attention in ([attentions] if isinstance(attentions, Attention) else attentions)
    ]
    text = json.dumps(sentences, ensure_ascii=False, separators=(",", ":"))
    # "</" or "<!--" would end or change the script element; in JSON, "<" occurs only in strings.
    return TEMPLATE.read_text(encoding="utf-8").replace("{{DATA}}", text.replace("<", "\\u003c"))


def write_page(attentions: Attention | Iterable[Attention], file: str | os.PathLike[str]) -> None:
    """Writes `attention_page` to a file."""
    pathlib.Path(file).write_text(attention_page(attentions), encoding="utf-8")


def _kind(attention: Attention, kind: str) -> dict[str, list | tuple]:
    rows, columns = attention.labels(kind)
    weights = np.rint(attention.layers(kind) * WHOLE).astype(int).tolist()  # [N][H][rows][columns]
    return {"rows": rows, "columns": columns, "weights": weights}
