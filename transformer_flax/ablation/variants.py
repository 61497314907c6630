"""The configs that a sweep trains: rows of table 3 and beyond, entries of a TOML file, and a grid of fields."""

import dataclasses
import itertools
import pathlib
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from transformer_flax.ablation import table3
from transformer_flax.checked_fields import TYPES
from transformer_flax.errors import UserError, did_you_mean
from transformer_flax.training.config_checks import check
from transformer_flax.training.config_fields import flatten

OWN_FIELDS = {  # the sweep sets them for every run
    "seed": "set --seeds",
    "name": "each run is named after its variant",
}
EXAMPLE = 'wide = {model.d_ff = 512, model.positions = "rotary"}'  # of an entry of a file
PARSERS = {  # the command line parses config fields with the same parsers
    bool: flags.BooleanParser(),
    int: flags.IntegerParser(),
    float: flags.FloatParser(),
    str: flags.ArgumentParser(),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A config of a sweep, trained once for each seed."""

    name: str  # "A-h1", "A-h1 model.dropout=0.2", or the name of an entry of a file
    row: str  # the row of table 3 or beyond it, before the grid's changes
    changes: dict[str, Any]  # flat fields that differ from the sweep's base
    config: ConfigDict  # the base with these changes


def make_variants(
    base: ConfigDict, rows: str = "all", *, axes: Sequence[str] = (), file: pathlib.Path | None = None
) -> list[Variant]:
    """Makes and checks all variants of a sweep, in the order of the table, then of the file.

    Args:
      base: the config that rows and axes change.
      rows: names of rows and letters of groups, such as `A,C-N2,rotary`; `all` for table 3; `beyond`; or
        `recipes`. May be empty if there is a file.
      axes: fields with their values, such as `model.dropout=0.0,0.1`; crossed with each other and with the rows.
      file: a TOML file with an entry for each variant: `wide = {model.d_ff = 512}`. An entry may name a `row` to start
        from; the default is base.
    """
    grid = _parse_axes(axes, base)
    starts = [(name, table3.ALL[name], {}) for name in _parse_rows(rows)]
    starts += _read_entries(file, base) if file else []
    if not starts:
        raise UserError("there is nothing to train: name --rows or a --variants file")
    points = [dict(itertools.chain(*settings)) for settings in itertools.product(*grid)]
    return [_make_variant(*start, point, base) for start in starts for point in points]


def _make_variant(
    name: str, row: table3.Row, overrides: dict[str, Any], point: dict[str, Any], base: ConfigDict
) -> Variant:
    """Applies a row, the overrides of a file's entry and a point of the grid to the base."""
    if both := sorted((row.changes | overrides).keys() & point.keys()):
        raise UserError(f"--grid {both[0]} would undo {name}, which sets the same field; leave one of them out")
    name = " ".join([name, *(f"{field}={value}" for field, value in point.items())])
    config = table3.apply(row, base)
    config.update_from_flattened_dict(overrides | point)
    try:
        check(config)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    before = flatten(base.to_dict())
    changes = {field: value for field, value in flatten(config.to_dict()).items() if value != before[field]}
    return Variant(name, row.name, changes, config)


def _parse_rows(text: str) -> list[str]:
    """Returns the names of rows, each once, in the order of the table."""
    named = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        named |= set(table3.GROUPS.get(part) or [table3.find(part).name])
    return [name for name in table3.ALL if name in named]


def _parse_axes(texts: Iterable[str], base: ConfigDict) -> list[list[tuple[tuple[str, Any], ...]]]:
    """Returns the distinct settings of each axis of the grid. A setting is the (field, value) pairs of the axis."""
    axes: list[list[tuple[tuple[str, Any], ...]]] = []
    varied: set[str] = set()
    for text in texts:
        names, equals, values = text.partition("=")
        if not equals:
            raise UserError(f"--grid {text!r} has no values; write it like --grid model.dropout=0.0,0.1")
        columns = []
        for field in names.split(","):
            like = _value_in(base, field, "--grid")
            if field in varied:
                raise UserError(f"--grid {field} is given twice; put all of its values into one, separated by commas")
            try:
                columns.append([(field, PARSERS[type(like)].parse(value)) for value in values.split(",")])
            except ValueError as error:
                raise UserError(
                    f"--grid {text}: each value must be {TYPES[type(like)]}; the base has {like!r}"
                ) from error
            varied.add(field)
        axes.append(list(dict.fromkeys(zip(*columns, strict=True))))
    return axes


def _read_entries(file: pathlib.Path, base: ConfigDict) -> list[tuple[str, table3.Row, dict[str, Any]]]:
    """Returns the name, row and overrides of each entry of a file of variants."""
    try:
        entries = tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise UserError(f"{file} is not TOML: {error}; write lines such as {EXAMPLE}") from error
    if not entries:
        raise UserError(f"{file} has no entries; write lines such as {EXAMPLE}")
    starts = []
    for name, entry in entries.items():
        where = f"{file}, {name!r}"
        if not isinstance(entry, dict):
            raise UserError(f"{where} is {entry!r}; it must be a table of overrides, such as {{model.d_ff = 512}}")
        if name in table3.ALL:
            of = "of table 3" if name in table3.ROWS else "beyond table 3"
            raise UserError(f"{where} has the name of a row {of}; choose another")
        entry = flatten(entry)
        row = str(entry.pop("row", "base"))
        overrides = {field: _typed(field, value, base, where) for field, value in entry.items()}
        starts.append((name, table3.find(row), overrides))
    return starts


def _value_in(base: ConfigDict, field: str, where: str) -> Any:
    """Returns the base's value of a field that may vary."""
    known = flatten(base.to_dict())
    if field in OWN_FIELDS:
        raise UserError(f"{where}: {field} cannot vary: {OWN_FIELDS[field]}")
    if field not in known:
        in_section = [name for name in known if name.endswith(f".{field}")]
        near = f"did you mean {in_section[0]!r}?" if in_section else did_you_mean(field, known)
        hint = near or "the file that --config names, or those it builds on, list them"
        raise UserError(f"{where}: the base has no field {field!r}; {hint}")
    return known[field]


def _typed(field: str, value: Any, base: ConfigDict, where: str) -> Any:
    """Checks that a value of a file has the base's type, and returns it. A whole number may stand for a float."""
    like = _value_in(base, field, where)
    if type(like) is float and type(value) is int:
        return float(value)
    if type(value) is not type(like):
        raise UserError(f"{where}: {field} is {value!r}; it must be {TYPES[type(like)]}; the base has {like!r}")
    return value
