"""Law 3: the rows, exactly on the paper's base and to scale on smaller ones."""

import re

import pytest
from ml_collections import ConfigDict

from configs import base, big, convolutional, numbers
from configs import table3 as table3_config
from tests.conftest import ROOT
from transformer_flax.ablation import table3
from transformer_flax.errors import UserError
from transformer_flax.model.flops import count_parameters
from transformer_flax.training.config_checks import check, model_config

VOCABULARY = 37_000

# Parameters without embeddings, worked out by hand from the formula of table 3's models: N (3 d h (2 d_k + 2 d_v) +
# 2 (2 d d_ff + d_ff + d) + 5 * 2 d), and the learned positions of row E, 512 x 512.
NOT_EMBEDDINGS = {
    "base": 44_101_632,
    "A-h1": 44_101_632,
    "A-h4": 44_101_632,
    "A-h16": 44_101_632,
    "A-h32": 44_101_632,
    "B-dk16": 37_023_744,
    "B-dk32": 39_383_040,
    "C-N2": 14_700_544,
    "C-N4": 29_401_088,
    "C-N8": 58_802_176,
    "C-d256": 17_344_512,
    "C-d1024": 125_927_424,
    "C-ff1024": 31_506_432,
    "C-ff4096": 69_292_032,
    "D-drop0.0": 44_101_632,
    "D-drop0.2": 44_101_632,
    "D-ls0.0": 44_101_632,
    "D-ls0.2": 44_101_632,
    "E": 44_101_632 + 512 * 512,
    "big": 176_283_648,
}

# What each row says in the paper, as (field, value); all other fields are the base's.
PAPER = {
    "base": {},
    "A-h1": {"model.num_heads": 1, "model.d_k": 512, "model.d_v": 512},
    "A-h4": {"model.num_heads": 4, "model.d_k": 128, "model.d_v": 128},
    "A-h16": {"model.num_heads": 16, "model.d_k": 32, "model.d_v": 32},
    "A-h32": {"model.num_heads": 32, "model.d_k": 16, "model.d_v": 16},
    "B-dk16": {"model.d_k": 16},
    "B-dk32": {"model.d_k": 32},
    "C-N2": {"model.num_layers": 2},
    "C-N4": {"model.num_layers": 4},
    "C-N8": {"model.num_layers": 8},
    "C-d256": {"model.d_model": 256, "model.d_k": 32, "model.d_v": 32},
    "C-d1024": {"model.d_model": 1024, "model.d_k": 128, "model.d_v": 128},
    "C-ff1024": {"model.d_ff": 1024},
    "C-ff4096": {"model.d_ff": 4096},
    "D-drop0.0": {"model.dropout": 0.0},
    "D-drop0.2": {"model.dropout": 0.2},
    "D-ls0.0": {"label_smoothing": 0.0},
    "D-ls0.2": {"label_smoothing": 0.2},
    "E": {"model.positions": "learned"},
    "big": {
        "model.d_model": 1024,
        "model.d_ff": 4096,
        "model.num_heads": 16,
        "model.dropout": 0.3,
        "steps": 300_000,
    },
}


def flat(config):
    return {
        f"{section}.{name}" if section else name: value
        for section, fields in [("", config.to_dict()), *((s, config[s].to_dict()) for s in ("model", "data"))]
        for name, value in fields.items()
        if not isinstance(value, dict)
    }


@pytest.mark.parametrize("name", table3.ROWS)
def test_on_the_papers_base_a_row_has_the_papers_values(name):
    ours, theirs = flat(table3.apply(table3.ROWS[name], base.get_config())), flat(base.get_config()) | PAPER[name]
    assert ours == theirs


@pytest.mark.parametrize("name", table3.ROWS)
def test_every_row_builds_with_its_exact_number_of_parameters(name):
    config = table3_config.get_config(name)
    check(config)
    model = model_config(config, VOCABULARY)
    assert sum(count_parameters(model).values()) == NOT_EMBEDDINGS[name] + VOCABULARY * config.model.d_model


def test_there_are_twenty_rows_with_the_published_results():
    assert len(table3.ROWS) == 20
    assert [row.parameters for row in table3.ROWS.values() if row.parameters] == [
        65, 58, 60, 36, 50, 80, 28, 168, 53, 90, 213,
    ]  # fmt: skip
    assert [(row.perplexity, row.bleu) for row in table3.ROWS.values()] == [
        (4.92, 25.8),
        (5.29, 24.9), (5.00, 25.5), (4.91, 25.8), (5.01, 25.4),
        (5.16, 25.1), (5.01, 25.4),
        (6.11, 23.7), (5.19, 25.3), (4.88, 25.5), (5.75, 24.5), (4.66, 26.0), (5.12, 25.4), (4.75, 26.2),
        (5.77, 24.6), (4.95, 25.5), (4.67, 25.3), (5.47, 25.7),
        (4.92, 25.7),
        (4.33, 26.4),
    ]  # fmt: skip


def test_the_docs_name_every_row():
    tables = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs/sweeps.md").read_text(), re.MULTILINE)
    named = {name for cell in tables for name in re.findall(r"`([^`]+)`", cell)}
    assert named | {"base"} == set(table3.ALL)


def test_table_3_scores_raw_parameters_and_big_averages_20():
    assert table3_config.get_config("A-h1").eval.final_average == 1
    assert base.get_config().eval.final_average == 5
    assert big.get_config().eval.final_average == 20
    assert big.get_config().steps == 300_000


def test_rows_scale_with_their_base():
    small = base.get_config()
    small.steps = 3_000
    small.model.update(num_layers=3, d_model=64, d_ff=128, num_heads=8, d_k=8, d_v=16)
    heads = table3.apply(table3.ROWS["A-h32"], small).model
    assert (heads.num_heads, heads.d_k, heads.d_v) == (32, 2, 4)
    assert table3.apply(table3.ROWS["B-dk16"], small).model.d_k == 2
    assert [table3.apply(table3.ROWS[f"C-N{n}"], small).model.num_layers for n in (2, 4, 8)] == [1, 2, 4]
    wide = table3.apply(table3.ROWS["C-d1024"], small).model
    assert (wide.d_model, wide.d_k, wide.d_v, wide.d_ff) == (128, 16, 32, 128)
    giant = table3.apply(table3.ROWS["big"], small)
    assert (giant.model.d_model, giant.model.d_ff, giant.model.num_heads, giant.steps) == (128, 256, 16, 9_000)
    assert giant.model.dropout == 0.3  # absolute
    assert table3.apply(table3.ROWS["D-ls0.2"], small).label_smoothing == 0.2
    assert small.steps == 3_000  # the base stays as it is


def test_a_base_that_does_not_divide_is_refused_by_the_name_of_its_field():
    with pytest.raises(UserError, match=r"row C-N2 takes 1/3 of config\.model\.num_layers, which is 2"):
        table3.apply(table3.ROWS["C-N2"], numbers.get_config())
    with pytest.raises(UserError, match=r"row A-h1 takes 1/8 of config\.model\.num_heads, which is 4"):
        table3.apply(table3.ROWS["A-h1"], numbers.get_config())


def test_a_row_of_what_a_base_of_another_kind_has_not_is_refused_and_others_are_not():
    assert table3.apply(table3.ROWS["D-drop0.0"], convolutional.get_config()).model.dropout == 0
    with pytest.raises(UserError, match=r"row A-h1 sets config\.model\.num_heads, which a base of kind convolutional"):
        table3.apply(table3.ROWS["A-h1"], convolutional.get_config())


def test_an_unknown_row_is_told_with_the_nearest():
    with pytest.raises(UserError, match=r"no row 'A-h17'; did you mean 'A-h1'"):
        table3_config.get_config("A-h17")
    with pytest.raises(UserError, match=r"no row 'recipe'; did you mean 'recipes'"):
        table3.find("recipe")
    with pytest.raises(UserError, match=r"no row 'recipes'; groups of rows are all, beyond, recipes"):
        table3_config.get_config("recipes")


def test_a_base_may_have_a_whole_number_where_a_row_has_a_fraction():
    mine = base.get_config().to_dict() | {"label_smoothing": 0}
    assert table3.apply(table3.ROWS["D-ls0.2"], ConfigDict(mine)).label_smoothing == 0.2
