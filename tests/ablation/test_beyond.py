"""Rows beyond table 3: each is an override away on any base, is swept with the others, and stands in the report."""

import functools

import pytest

from configs import base, multi30k, numbers, table3_small
from configs import table3 as table3_config
from tests.ablation import made
from tests.ablation.test_table3 import flat
from transformer_flax.ablation import report, table3
from transformer_flax.ablation.variants import make_variants
from transformer_flax.errors import UserError
from transformer_flax.model.flops import count_parameters
from transformer_flax.training.config_checks import check, model_config
from transformer_flax.training.optimizer import make_schedule

# What each is of the paper's base; all other fields stay. Then its parameters besides the base's 63,045,632.
CHANGES = {
    "additive": ({"model.compatibility": "additive"}, 18 * 8 * 64),  # v of each head in 18 attentions
    "dot": ({"model.compatibility": "dot"}, 0),
    "restricted": ({"model.neighbourhood": 8}, 0),
    "relative": ({"model.positions": "relative"}, 12 * 33 * 64),  # of distances from -16 to 16 in 12 self-attentions
    "rotary": ({"model.positions": "rotary"}, 0),
    "pre-norm": ({"model.pre_norm": True}, 2 * 2 * 512),  # a LayerNorm more at the end of each stack
    "released": (
        {
            "model.pre_norm": True,
            "model.attention_dropout": 0.1,
            "model.ffn_dropout": 0.1,
            "model.positions": "sinusoidal_concatenated",
            "optimizer.b2": 0.997,
            "optimizer.warmup_steps": 8000,
            "optimizer.factor": 2.0,
        },
        2 * 2 * 512,
    ),
    "r-drop": ({"r_drop": 5.0}, 0),
    "bpe-dropout": ({"data.bpe_dropout": 0.1}, 0),
    "xavier": ({}, 0),
    "fairseq": ({"model.start": "fairseq"}, 0),
    "deepnorm": ({"model.start": "deepnorm"}, 0),
    "t-fixup": ({"model.start": "t_fixup"}, -30 * 2 * 512),  # no LayerNorm after 30 sub-layers
    "admin": ({"model.start": "admin"}, 30 * 512),  # an omega for each sub-layer
    "muon": ({"optimizer.name": "muon", "optimizer.b1": 0.95}, 0),
    "schedule-free": ({"optimizer.name": "schedule_free"}, 0),
    "batch-x4": ({"data.tokens_per_batch": 100_000, "steps": 25_000, "optimizer.warmup_steps": 1_000}, 0),
}


@functools.cache  # many rows are of the base's model
def parameters(model) -> int:
    return sum(count_parameters(model).values())


@pytest.mark.parametrize("name", CHANGES)
def test_a_row_is_what_it_says_on_the_papers_base(name):
    changes, more = CHANGES[name]
    config = table3_config.get_config(name)
    expected = flat(base.get_config()) | {"name": f"table3-{name}"}
    expected |= {field: value for field, value in changes.items() if not field.startswith("optimizer")}
    assert flat(config) == expected
    optimizer = {name: value for name, value in config.optimizer.items() if value != base.get_config().optimizer[name]}
    assert {f"optimizer.{name}": value for name, value in optimizer.items()} == {
        field: value for field, value in changes.items() if field.startswith("optimizer")
    }
    check(config)
    assert parameters(model_config(config, 37_000)) == 63_045_632 + more


def test_all_rows_are_tried_and_none_has_a_name_of_table_3():
    assert [*table3.BEYOND, *table3.RECIPES] == list(CHANGES)
    assert not CHANGES.keys() & (table3.ROWS.keys() | {"all", "beyond", "recipes", "A", "B", "C", "D", "E"})


def test_on_another_base_the_released_recipe_has_twice_its_warmup_and_rate():
    released, additive = make_variants(numbers.get_config(), "released,additive")[::-1]
    assert additive.changes == {"model.compatibility": "additive"}
    assert released.changes["optimizer.warmup_steps"] == 600
    assert released.changes["optimizer.factor"] == 1.2
    assert released.config.optimizer.b2 == 0.997
    assert released.config.steps == numbers.get_config().steps


def test_on_another_base_a_larger_batch_has_as_many_epochs_and_the_root_of_its_size_as_rate():
    base = table3_small.get_config("multi30k")
    [row] = make_variants(base, "batch-x4")
    assert row.config.data.tokens_per_batch * row.config.steps == base.data.tokens_per_batch * base.steps
    ours, before = (make_schedule(config) for config in (row.config, base))
    for count in (400, 2000, 5000):
        assert float(ours(count // 4 - 1)) == pytest.approx(2 * float(before(count - 1)))


def test_starts_are_compared_by_themselves_on_a_base_with_lighter_sub_layers():
    rows = make_variants(table3_small.get_config("multi30k"), "xavier,fairseq,deepnorm,t-fixup,admin")
    assert {row.config.model.branch_init for row in rows} == {1.0}


def test_schedule_free_has_no_cooldown_on_a_base_with_one():
    [row] = make_variants(multi30k.get_config(), "schedule-free")
    assert multi30k.get_config().optimizer.cooldown > 0
    check(row.config)


def test_rows_beyond_are_swept_by_name_or_all_at_once_and_never_unasked():
    def names(rows, **options):
        return [variant.name for variant in make_variants(numbers.get_config(), rows, **options)]

    assert names("beyond,base") == ["base", *table3.BEYOND]
    assert names("recipes,base") == ["base", *table3.RECIPES]
    assert names("rotary,E,pre-norm") == ["E", "rotary", "pre-norm"]
    assert names("rotary", axes=["optimizer.b2=0.98,0.997"]) == [
        "rotary optimizer.b2=0.98",
        "rotary optimizer.b2=0.997",
    ]
    assert not set(names("E,D,base")) & CHANGES.keys()
    with pytest.raises(UserError, match=r"no row 'rotray'; did you mean 'rotary'\?$"):
        names("rotray")
    with pytest.raises(UserError, match=r"--grid model\.positions would undo rotary, which"):
        names("rotary", axes=["model.positions=learned"])
    odd = numbers.get_config()
    odd.model.d_k = 31
    with pytest.raises(UserError, match=r"rotary: config\.model\.d_k is 31; it must be even"):
        make_variants(odd, "rotary")


def test_a_file_may_start_from_a_row_beyond_but_not_take_its_name(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('both = {row = "rotary", model.pre_norm = true}\n')
    (both,) = make_variants(numbers.get_config(), "", file=file)
    assert both.changes == {"model.positions": "rotary", "model.pre_norm": True}
    file.write_text("rotary = {model.d_ff = 64}\n")
    with pytest.raises(UserError, match="'rotary' has the name of a row beyond table 3"):
        make_variants(numbers.get_config(), "", file=file)


def test_the_report_shows_them_behind_table_3_without_anything_of_the_papers():
    results = [made.result(name, bleu=30 + n, curve=[]) for n, name in enumerate(["rotary", "base", "r-drop"])]
    results.append(made.result("rotary steps=5", row="rotary", curve=[]))
    text = report.as_markdown(made.compare(results), made.BASE, ())
    assert text.startswith(
        "# A sweep of positions and r_drop on multi30k\n\n4 finished runs: base and 2 rows beyond table 3 and 1 "
        "variant, one seed each."
    )
    assert "the paper" not in text
    table = text[text.index("| variant |") :].split("\n\n")[0].split("\n")
    assert [line.split(" | ")[0] for line in table] == [
        "| variant",
        "| ---",
        "| rotary",
        "| rotary steps=5",
        "| r-drop",
    ]
    assert "paper" not in table[0]
    assert [line.split(" | ")[3] for line in table[2:5:2]] == ["-1.00", "+1.00"]
    assert "not run" not in text
    assert "Rank correlation" not in text
    assert not made.compare(results).is_of_table3
    assert made.compare([*results, made.result("A-h1")]).is_of_table3
