"""Rows beyond table 3: what the paper did not vary, or others did before and after it, an override each."""

import difflib

from transformer_flax.ablation import table3
from transformer_flax.errors import UserError

ROWS = {
    row.name: row
    for row in (
        # Section 3.2.1 names both beside its own, and tells why they were not taken.
        table3.Row("additive", {"model.compatibility": "additive"}),
        table3.Row("dot", {"model.compatibility": "dot"}),
        # Section 4 and table 1: self-attention restricted to a neighbourhood of r.
        table3.Row("restricted", {"model.neighbourhood": 8}),
        # Section 3.5 otherwise: Shaw et al. (2018), Su et al. (2021).
        table3.Row("relative", {"model.positions": "relative"}),
        table3.Row("rotary", {"model.positions": "rotary"}),
        # Section 3.1 otherwise, as nearly all do now.
        table3.Row("pre-norm", {"model.pre_norm": True}),
        # tensor2tensor's transformer_base as it was left: its third version.
        table3.Row(
            "released",
            {
                "model.pre_norm": True,
                "model.attention_dropout": 0.1,
                "model.ffn_dropout": 0.1,
                "model.positions": "sinusoidal_concatenated",
                "optimizer.b2": 0.997,
                "optimizer.warmup_steps": 8_000,  # on another base twice its own, as is the factor
                "optimizer.factor": 2.0,
            },
        ),
    )
}
ALL: dict[str, table3.Row] = {**table3.ROWS, **ROWS}
GROUPS = {"all": list(table3.ROWS), "beyond": list(ROWS)} | {
    letter: [name for name in table3.ROWS if name.split("-")[0] == letter] for letter in "ABCDE"
}


def find(name: str) -> table3.Row:
    """The row of that name, of table 3 or beyond it.

    Raises:
      UserError: there is none; names those that are near.
    """
    if name not in ALL:
        near = difflib.get_close_matches(name, ALL, n=3, cutoff=0.3)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise UserError(
            f"table 3 has no row {name!r}{hint}; its rows are {', '.join(table3.ROWS)}, and beyond it there are "
            f"{', '.join(ROWS)}"
        )
    return ALL[name]
