"""Table 3: each row as a function of a base config, with the paper's results beside it."""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.errors import UserError

PAPER_BASE = {
    "steps": 100_000,
    "model.num_layers": 6,
    "model.d_model": 512,
    "model.d_ff": 2048,
    "model.num_heads": 8,
    "model.d_k": 64,
    "model.d_v": 64,
}

PAPER_OPTIMIZER = {"optimizer.warmup_steps": 4_000, "optimizer.factor": 1.0}  # which rows beyond the table change
SCALED = PAPER_BASE | PAPER_OPTIMIZER

PAPER_ABSOLUTE = {"model.dropout": 0.1, "label_smoothing": 0.1, "model.positions": "sinusoidal"}  # of its base, too


@dataclasses.dataclass(frozen=True)
class Row:
    """What a row changes of the paper's base model."""

    name: str
    changes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PaperRow(Row):
    """A row of the table, with what the paper measured on newstest2013."""

    perplexity: float  # per word-piece
    bleu: float
    parameters: int | None = None  # in millions, as published


def _row(name: str, perplexity: float, bleu: float, parameters: int | None = None, **changes) -> PaperRow:
    top_level = ("steps", "label_smoothing")
    changes = {field if field in top_level else f"model.{field}": value for field, value in changes.items()}
    return PaperRow(name, changes, perplexity, bleu, parameters)


ROWS = {
    row.name: row
    for row in (
        _row("base", 4.92, 25.8, 65),
        _row("A-h1", 5.29, 24.9, num_heads=1, d_k=512, d_v=512),
        _row("A-h4", 5.00, 25.5, num_heads=4, d_k=128, d_v=128),
        _row("A-h16", 4.91, 25.8, num_heads=16, d_k=32, d_v=32),
        _row("A-h32", 5.01, 25.4, num_heads=32, d_k=16, d_v=16),
        _row("B-dk16", 5.16, 25.1, 58, d_k=16),
        _row("B-dk32", 5.01, 25.4, 60, d_k=32),
        _row("C-N2", 6.11, 23.7, 36, num_layers=2),
        _row("C-N4", 5.19, 25.3, 50, num_layers=4),
        _row("C-N8", 4.88, 25.5, 80, num_layers=8),
        _row("C-d256", 5.75, 24.5, 28, d_model=256, d_k=32, d_v=32),
        _row("C-d1024", 4.66, 26.0, 168, d_model=1024, d_k=128, d_v=128),
        _row("C-ff1024", 5.12, 25.4, 53, d_ff=1024),
        _row("C-ff4096", 4.75, 26.2, 90, d_ff=4096),
        _row("D-drop0.0", 5.77, 24.6, dropout=0.0),
        _row("D-drop0.2", 4.95, 25.5, dropout=0.2),
        _row("D-ls0.0", 4.67, 25.3, label_smoothing=0.0),
        _row("D-ls0.2", 5.47, 25.7, label_smoothing=0.2),
        _row("E", 4.92, 25.7, positions="learned"),
        _row("big", 4.33, 26.4, 213, steps=300_000, d_model=1024, d_ff=4096, num_heads=16, dropout=0.3),
    )
}


def apply(row: Row, base: ConfigDict) -> ConfigDict:
    """The row on a base config, which stays as it is.

    Sizes, steps, warm-up and the factor of the learning rate scale by the paper's ratio of the row to its base, so that
    a row means the same on a smaller one; all else is absolute. On the paper's base this gives the paper's values.

    Raises:
      UserError: a size of the base does not divide, or it has none, being no Transformer; naming the field.
    """
    config = base.copy_and_resolve_references()
    changes = {}
    for field, value in row.changes.items():
        section, _, name = field.rpartition(".")
        if section and name not in config[section]:
            raise UserError(
                f"row {row.name} sets config.{field}, which a base of kind {config.model.kind} does not have; leave "
                "the row out, or use a Transformer"
            )
        if (papers := SCALED.get(field)) is not None:
            ours = _get(config, field)
            ratio = Fraction(value) / Fraction(papers)
            scaled = ratio * Fraction(ours)
            if isinstance(ours, int) and scaled.denominator != 1:
                raise UserError(
                    f"row {row.name} takes {ratio} of config.{field}, which is {ours}: not a whole "
                    f"number; use a base whose {field} is a multiple of {ratio.denominator}"
                )
            value = type(ours)(scaled)
        changes[field] = value
    with config.ignore_type():  # a base of one's own may have a 0 where a row has 0.2
        config.update_from_flattened_dict(changes)
    return config


def is_papers_change(row: PaperRow, base: Mapping[str, Any]) -> bool:
    """Whether a row changes a base in the paper's direction, which its absolute fields do not on every base.

    D-drop0.2 is more dropout in the paper; on a base of 0.2 it is no change, and on one of 0.3 less. E takes the place
    of sinusoids in the paper, and of something else on a base with rotary positions.

    Args:
      row: one of the table.
      base: flat config; of absolute fields that it has not, the paper's value is taken.
    """
    for field, papers in PAPER_ABSOLUTE.items():
        if field in row.changes:
            value, ours = row.changes[field], base.get(field, papers)
            other = ours != papers if isinstance(value, str) else (value > ours) != (value > papers)
            if value == ours or other:
                return False
    return True


def _get(config: ConfigDict, field: str) -> Any:
    for name in field.split("."):
        config = config[name]
    return config
