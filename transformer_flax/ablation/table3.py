"""Table 3 of the paper and rows beyond it: the fields that each row changes, and the paper's results."""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.errors import UserError, did_you_mean

PAPER_BASE = {
    "steps": 100_000,
    "model.num_layers": 6,
    "model.d_model": 512,
    "model.d_ff": 2048,
    "model.num_heads": 8,
    "model.d_k": 64,
    "model.d_v": 64,
}
# Fields that scale with the base. Only rows beyond the table change fields of the optimizer and the batch.
SCALED = PAPER_BASE | {"optimizer.warmup_steps": 4_000, "optimizer.factor": 1.0, "data.tokens_per_batch": 25_000}
PAPER_ABSOLUTE = {"model.dropout": 0.1, "label_smoothing": 0.1, "model.positions": "sinusoidal"}


@dataclasses.dataclass(frozen=True)
class Row:
    """The config fields of the paper's base model that a row changes."""

    name: str
    changes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PaperRow(Row):
    """A row of table 3, with the paper's results on newstest2013."""

    perplexity: float  # per word-piece
    bleu: float
    parameters: int | None = None  # in millions, as published


def _row(name: str, perplexity: float, bleu: float, parameters: int | None = None, **changes) -> PaperRow:
    top_level = ("steps", "label_smoothing")
    changes = {field if field in top_level else f"model.{field}": value for field, value in changes.items()}
    return PaperRow(name, changes, perplexity, bleu, parameters)


def _by_name(*rows: Any) -> dict[str, Any]:
    return {row.name: row for row in rows}


ROWS: dict[str, PaperRow] = _by_name(
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
BEYOND: dict[str, Row] = _by_name(
    # Section 3.2.1 compares scaled dot-product attention with both.
    Row("additive", {"model.compatibility": "additive"}),
    Row("dot", {"model.compatibility": "dot"}),
    # Section 4 and table 1: self-attention restricted to a neighbourhood of r.
    Row("restricted", {"model.neighbourhood": 8}),
    # Positions of Shaw et al. (2018) and Su et al. (2021), instead of section 3.5.
    Row("relative", {"model.positions": "relative"}),
    Row("rotary", {"model.positions": "rotary"}),
    # LayerNorm before each sub-layer, instead of section 3.1; nearly all later models do so.
    Row("pre-norm", {"model.pre_norm": True}),
    # The third and last version of tensor2tensor's transformer_base.
    Row(
        "released",
        {
            "model.pre_norm": True,
            "model.attention_dropout": 0.1,
            "model.ffn_dropout": 0.1,
            "model.positions": "sinusoidal_concatenated",
            "optimizer.b2": 0.997,
            "optimizer.warmup_steps": 8_000,
            "optimizer.factor": 2.0,
        },
    ),
)
RECIPES: dict[str, Row] = _by_name(
    # Two passes with different dropout are trained to agree (Liang et al., 2021), with their alpha for translation.
    Row("r-drop", {"r_drop": 5.0}),
    # The same words have other pieces in each epoch (Provilkov et al., 2020), with their dropout rate.
    Row("bpe-dropout", {"data.bpe_dropout": 0.1}),
    # Initialisations, each without scaling by `branch_init`, also on a base that sets it.
    Row("xavier", {"model.start": "xavier", "model.branch_init": 1.0}),
    Row("fairseq", {"model.start": "fairseq", "model.branch_init": 1.0}),
    Row("deepnorm", {"model.start": "deepnorm", "model.branch_init": 1.0}),
    Row("t-fixup", {"model.start": "t_fixup", "model.branch_init": 1.0}),
    Row("admin", {"model.start": "admin", "model.branch_init": 1.0}),
    # With the momentum of Jordan et al. (2024).
    Row("muon", {"optimizer.name": "muon", "optimizer.b1": 0.95}),
    Row("schedule-free", {"optimizer.name": "schedule_free", "optimizer.cooldown": 0.0}),
    # The same number of epochs. The warm-up is shortened too, so equation 3 gives twice the rate at every epoch.
    Row("batch-x4", {"data.tokens_per_batch": 100_000, "steps": 25_000, "optimizer.warmup_steps": 1_000}),
)
ALL: dict[str, Row] = {**ROWS, **BEYOND, **RECIPES}
GROUPS = {"all": list(ROWS), "beyond": list(BEYOND), "recipes": list(RECIPES)} | {
    letter: [name for name in ROWS if name.split("-")[0] == letter] for letter in "ABCDE"
}


def find(name: str) -> Row:
    """Returns the row of that name, of table 3 or beyond it."""
    if name not in ALL:
        there = f"groups of rows are {', '.join(GROUPS)}; rows are {', '.join(ALL)}"
        raise UserError(f"there is no row {name!r}; {did_you_mean(name, {*ALL, *GROUPS} - {name}) or there}")
    return ALL[name]


def apply(row: Row, base: ConfigDict) -> ConfigDict:
    """Returns a copy of a base config with a row's changes.

    The fields of SCALED (sizes, steps, tokens per batch, warm-up and the learning rate's factor) are multiplied by the
    paper's ratio of the row to its base. So a row means the same on a smaller base. All other fields are absolute. The
    paper's base gives the paper's values. A scaled size that is not a whole number is refused.
    """
    config = base.copy_and_resolve_references()
    changes = {}
    for field, value in row.changes.items():
        section, _, name = field.rpartition(".")
        owner = config[section] if section else config
        if name not in owner:
            raise UserError(
                f"row {row.name} sets config.{field}, which a base of kind {config.model.kind} does not have; leave "
                "the row out, or use a Transformer"
            )
        if field in SCALED:
            ours: Any = owner[name]
            ratio = Fraction(value) / Fraction(SCALED[field])
            scaled = ratio * Fraction(ours)
            if isinstance(ours, int) and scaled.denominator != 1:
                raise UserError(
                    f"row {row.name} takes {ratio} of config.{field}, which is {ours}: not a whole "
                    f"number; use a base whose {field} is a multiple of {ratio.denominator}"
                )
            value = type(ours)(scaled)
        changes[field] = value
    with config.ignore_type():  # a base may have the int 0 where a row has 0.2
        config.update_from_flattened_dict(changes)
    return config


def is_papers_base(config: Mapping[str, Any]) -> bool:
    """Returns whether a flat config has the steps, sizes, regularisation and positions of the paper's base model."""
    return all(config.get(field) == value for field, value in (PAPER_BASE | PAPER_ABSOLUTE).items())


def is_papers_change(row: PaperRow, base: Mapping[str, Any]) -> bool:
    """Returns whether a row changes a base (flat) in the same direction as in the paper.

    A row that sets an absolute field does not always do so. D-drop0.2 has more dropout than the base in the paper, but
    the same as a base with dropout 0.2, and less than a base with 0.3. E replaces sinusoids in the paper, but something
    else on a base with rotary positions. An absolute field that the base lacks counts as the paper's value.
    """
    for field, papers in PAPER_ABSOLUTE.items():
        if field in row.changes:
            value, ours = row.changes[field], base.get(field, papers)
            same = ours == papers if isinstance(value, str) else (value - ours) * (value - papers) > 0
            if not same:
                return False
    return True
