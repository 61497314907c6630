"""A sweep trains rows, axes and files of variants; mistakes in them are refused before anything starts."""

import pytest

from configs import numbers
from transformer_flax.ablation import table3
from transformer_flax.ablation.variants import make_variants
from transformer_flax.errors import UserError


def divisible():
    """`numbers` with sizes that every row divides."""
    config = numbers.get_config()
    config.model.update(num_layers=3, num_heads=8, d_k=16, d_v=16, max_length=512)
    return config


def names(*arguments, **options) -> list[str]:
    return [variant.name for variant in make_variants(divisible(), *arguments, **options)]


def test_fields_of_one_axis_have_the_same_value():
    made = make_variants(divisible(), "base", axes=["model.d_k,model.d_v=8,16", "model.dropout=0.1,0.2"])
    assert made[1].name == "base model.d_k=8 model.d_v=8 model.dropout=0.2"
    assert [(v.config.model.d_k, v.config.model.d_v, v.config.model.dropout) for v in made] == [
        (8, 8, 0.1),
        (8, 8, 0.2),
        (16, 16, 0.1),
        (16, 16, 0.2),
    ]


def test_rows_are_named_one_by_one_by_their_group_or_all_at_once():
    assert names("all") == list(table3.ROWS)
    assert names("C-N2") == ["C-N2"]
    assert names("B,base") == ["base", "B-dk16", "B-dk32"]  # in the order of the table
    assert names("E, E,B-dk16 ,B") == ["B-dk16", "B-dk32", "E"]
    assert len(names("A,B,C,D")) == 17
    assert names("big") == ["big"]


def test_a_row_changes_what_it_changes_of_the_base_it_is_given():
    base = divisible()
    base.model.dropout = 0.2
    a, drop = make_variants(base, "A-h4,D-drop0.2")
    assert a.changes == {"model.num_heads": 4, "model.d_k": 32, "model.d_v": 32}
    assert (a.row, a.config.model.num_heads, a.config.model.dropout) == ("A-h4", 4, 0.2)
    assert drop.changes == {}  # of this base


def test_axes_are_crossed_with_each_other_and_with_rows_in_the_types_of_their_fields():
    axes = ["optimizer.warmup_steps=100,200", "model.pre_norm=true,False", "data.tokenizer=bpe"]
    crossed = make_variants(divisible(), "base,C-N2", axes=axes)
    assert len(crossed) == 8
    assert crossed[1].name == "base optimizer.warmup_steps=100 model.pre_norm=False data.tokenizer=bpe"
    last = crossed[-1]
    assert last.name == "C-N2 optimizer.warmup_steps=200 model.pre_norm=False data.tokenizer=bpe"
    assert last.changes == {"model.num_layers": 1, "optimizer.warmup_steps": 200}
    assert [variant.config.model.pre_norm for variant in crossed[:2]] == [True, False]
    assert names("base", axes=["model.dropout=0.1,0.10,.1"]) == ["base model.dropout=0.1"]
    [one, two] = make_variants(divisible(), "base", axes=["steps,optimizer.factor=1,2"])  # each field has its own type
    assert one.changes == {"steps": 1, "optimizer.factor": 1.0}
    assert (two.config.steps, two.config.optimizer.factor) == (2, 2.0)


def test_a_file_names_variants_a_line_each(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "wide = {model.d_ff = 512, model.dropout = 0}\n"
        'few = {row = "C-N2", model.num_heads = 2, label_smoothing = 0.05}\n'
        "[table]\ndata.max_length = 32\n"
    )
    base, wide, few, table = make_variants(divisible(), "base", file=file)
    assert (base.row, wide.row, few.row) == ("base", "base", "C-N2")
    assert wide.changes == {"model.d_ff": 512, "model.dropout": 0.0}
    assert few.changes == {"model.num_layers": 1, "model.num_heads": 2, "label_smoothing": 0.05}
    assert table.changes == {"data.max_length": 32}
    assert names("", file=file, axes=[]) == ["wide", "few", "table"]
    assert names("", file=file, axes=["steps=5,6"])[:2] == ["wide steps=5", "wide steps=6"]


@pytest.mark.parametrize(
    ("rows", "axes", "message"),
    [
        ("A-h17", [], r"no row 'A-h17'; did you mean 'A-h1'"),
        ("base,F", [], "no row 'F'"),
        ("", [], "nothing to train"),
        ("base", ["dropout=0.1"], r"--grid: the base has no field 'dropout'; did you mean 'model\.dropout'\?"),
        ("base", ["model.drop=0.1"], r"the base has no field 'model\.drop'; did you mean 'model\.dropout"),
        ("base", ["model=1"], "the base has no field 'model'"),
        ("base", ["pooling=max"], "the base has no field 'pooling'; the file that --config names, or those it"),
        ("base", ["model.dropout"], r"--grid 'model\.dropout' has no values; write it like --grid"),
        ("base", ["model.dropout=wide"], r"model\.dropout=wide: each value must be a number; the base has 0\.05"),
        ("base", ["steps=1.5"], r"--grid steps=1\.5: each value must be a whole number; the base has 1000"),
        ("base", ["steps=5", "steps=6"], "--grid steps is given twice"),
        ("base", ["steps,log.every=5", "steps=6"], "--grid steps is given twice"),
        ("base", ["seed=5"], "--grid: seed cannot vary: set --seeds"),
        ("base", ["model.dropout=0.1,1.5"], r"base model\.dropout=1\.5: config\.model\.dropout is 1\.5; it must be"),
        ("D", ["model.dropout=0.1"], r"--grid model\.dropout would undo D-drop0\.0, which"),
        ("base,A", ["model.num_heads=4"], r"--grid model\.num_heads would undo A-h1, which"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_refused(rows, axes, message):
    with pytest.raises(UserError, match=message):
        make_variants(divisible(), rows, axes=axes)


def test_a_row_that_the_base_cannot_give_is_refused_by_its_name():
    with pytest.raises(UserError, match=r"row C-N4 takes 2/3 of config\.model\.num_layers, which is 2"):
        make_variants(numbers.get_config(), "base,C-N4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wide = 5", r"'wide' is 5; it must be a table of overrides"),
        ("", r"mine\.toml has no entries; write lines such as wide = \{"),
        ("wide {", "mine.toml is not TOML"),
        ("wide = {model.d_ff = 1, model.d_ff = 2}", "is not TOML"),
        ("A-h1 = {steps = 5}", "has the name of a row of table 3"),
        ("rotary = {steps = 5}", "has the name of a row beyond table 3"),
        ("wide = {row = 5}", "no row '5'"),
        ('wide = {row = "A-h17"}', "no row 'A-h17'"),
        (
            "wide = {model.dff = 5}",
            r"mine\.toml, 'wide': the base has no field 'model\.dff'; did you mean 'model",
        ),
        ('wide = {model.d_ff = "5"}', r"model\.d_ff is '5'; it must be a whole number; the base has 256"),
        ('wide = {model.dropout = "0.1"}', r"model\.dropout is '0\.1'; it must be a number; the base has 0\.05"),
        ("wide = {steps = true}", "steps is True; it must be a whole number; the base has 1000"),
        ("wide = {seed = 5}", "seed cannot vary"),
        ("wide = {model.d_model = 127}", r"wide: config\.model\.d_model is 127; it must be even"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path, text, message):
    file = tmp_path / "mine.toml"
    file.write_text(text + "\n")
    with pytest.raises(UserError, match=message):
        make_variants(divisible(), "base", file=file)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(b"wide = {name = '\xff'}\n")
    with pytest.raises(UserError, match=r"is not TOML: .* codec"):
        make_variants(divisible(), "base", file=file)


def test_a_grid_does_not_undo_what_a_variant_is_named_for(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("wide = {model.d_ff = 512}\n")
    with pytest.raises(UserError, match=r"--grid model\.d_ff would undo wide, which sets the same field"):
        make_variants(divisible(), "", axes=["model.d_ff=64,128"], file=file)
