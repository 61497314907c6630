"""What a sweep trains: rows of table 3 and beyond, axes of one's own crossed with them, and overrides from a file."""

import dataclasses
import difflib
import itertools
import math
import pathlib
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from transformer_flax.ablation import beyond, table3
from transformer_flax.errors import UserError
from transformer_flax.training.config_checks import check
from transformer_flax.training.fields import flatten

MOST_RUNS = 1_000  # more are a slip of the hand, or meant
LONGEST_NAME = 100  # of a variant, in characters
LARGEST_WHOLE = 1 << 53  # of which a float is the same number
OWN_FIELDS = {  # of every run, so no axis can have them
    "seed": "--seeds says how many",
    "name": "each run is named after its variant",
}
PARSERS = {  # those that the command line has for config fields
    bool: flags.BooleanParser(),
    int: flags.IntegerParser(),
    float: flags.FloatParser(),
    str: flags.ArgumentParser(),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A config of a sweep, which is trained once for each seed."""

    name: str  # "A-h1", "A-h1 model.dropout=0.2", or what a file calls it
    row: str  # of table 3 or beyond it, before the axes
    changes: dict[str, Any]  # flat fields that differ from the sweep's base
    config: ConfigDict  # the base with them


@dataclasses.dataclass(frozen=True)
class _Start:
    """What the axes are crossed with: a row, or an entry of a file."""

    name: str
    row: table3.Row
    overrides: dict[str, Any]


def make_variants(
    base: ConfigDict,
    rows: str = "all",
    *,
    axes: Sequence[str] = (),
    file: pathlib.Path | None = None,
    seeds: int = 1,
    many: bool = False,
) -> list[Variant]:
    """All variants of a sweep, in the order of the table, then of the file; every one is checked.

    Args:
      base: what rows and axes change.
      rows: names of rows and letters of groups, `A,C-N2,rotary`, `all` of table 3 or `beyond`; may be empty beside a
        file.
      axes: `model.dropout=0.0,0.1`, each crossed with the others and with the rows.
      file: TOML, an entry for each variant: `wide = {model.d_ff = 512}`, with a `row` to start from if it is not base.
      seeds: how often each is trained.
      many: more than MOST_RUNS runs are meant.

    Raises:
      UserError: a row or field is unknown, with the nearest names; a value is of the wrong type or does not fit the
        base; or there are too many runs.
    """
    parsed = _axes(axes, base)
    starts = [_Start(name, beyond.ALL[name], {}) for name in _rows(rows)]
    starts += _read(file, base) if file else []
    runs = len(starts) * math.prod(len(values) for values in parsed.values()) * seeds
    if runs == 0:
        raise UserError(
            "there is nothing to train: name --rows, or a --variants file with entries, and 1 or more seeds"
        )
    if runs > MOST_RUNS and not many:
        raise UserError(f"that makes {runs:,} runs; --many says that more than {MOST_RUNS:,} are meant")
    return [
        _variant(start, dict(zip(parsed, values, strict=True)), base)
        for start in starts
        for values in itertools.product(*parsed.values())
    ]


def _variant(start: _Start, point: dict[str, Any], base: ConfigDict) -> Variant:
    """A start with a value of each axis."""
    name = " ".join([start.name, *(f"{field}={value}" for field, value in point.items())])
    fixed = start.row.changes | start.overrides
    if both := sorted(fixed.keys() & point.keys()):
        raise UserError(
            f"--grid {both[0]} would undo what {start.name} is, as both set it; leave one of them out (--rows and "
            "--variants say what the grid is crossed with)"
        )
    config = table3.apply(start.row, base)
    config.update_from_flattened_dict(start.overrides | point)
    try:
        check(config)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    before = flatten(base.to_dict())
    changes = {field: value for field, value in flatten(config.to_dict()).items() if value != before[field]}
    return Variant(name, start.row.name, changes, config)


def _rows(text: str) -> list[str]:
    """The names of rows in the order of the table and of those beyond it, each once."""
    named = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        named |= set(beyond.GROUPS.get(part) or [beyond.find(part).name])
    return [name for name in beyond.ALL if name in named]


def _axes(texts: Iterable[str], base: ConfigDict) -> dict[str, list[Any]]:
    """The values of each field that is varied, each once."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not equals:
            raise UserError(f"--grid {text!r} has no values; it is written --grid model.dropout=0.0,0.1")
        like = _find(field, base, "--grid")
        if field in axes:
            raise UserError(f"--grid {field} is given twice; put all of its values into one, divided by commas")
        axes[field] = list(dict.fromkeys(_parse(field, value, like) for value in values.split(",")))
    return axes


def _read(file: pathlib.Path, base: ConfigDict) -> list[_Start]:
    """The entries of a file of variants."""
    try:
        with file.open("rb") as stream:
            entries = tomllib.load(stream)
    except ValueError as error:  # neither TOML nor UTF-8, or a number of thousands of digits
        raise UserError(f"{file} is no TOML: {error}; a line of it is such as: wide = {{model.d_ff = 512}}") from error
    except RecursionError:
        raise UserError(f"{file} is nested too deeply") from None
    starts = []
    for name, entry in entries.items():
        where = f"{file}, {name!r}"
        if not isinstance(entry, dict):
            raise UserError(f"{where} is {entry!r}; it must be a table of overrides, such as {{model.d_ff = 512}}")
        if not (name.strip() and name.isprintable() and len(name) <= LONGEST_NAME):
            raise UserError(f"{where} is no name: it must be of 1 to {LONGEST_NAME} characters that can be seen")
        if name in beyond.ALL:
            of = "of table 3" if name in table3.ROWS else "beyond table 3"
            raise UserError(f"{where} has the name of a row {of}; call it otherwise")
        entry = flatten(entry)
        row = entry.pop("row", "base")
        if not isinstance(row, str):
            raise UserError(f"{where}: its row is {row!r}; it must be the name of a row, in quotes")
        overrides = {field: _typed(field, value, _find(field, base, where), where) for field, value in entry.items()}
        starts.append(_Start(name, beyond.find(row), overrides))
    return starts


def _find(field: str, base: ConfigDict, where: str) -> Any:
    """The value of a field of the base."""
    known = flatten(base.to_dict())
    if field in OWN_FIELDS:
        raise UserError(f"{where}: {field} is no field to vary: {OWN_FIELDS[field]}")
    if field not in known:
        same_end = [name for name in known if name.endswith(f".{field}")]
        near = same_end or difflib.get_close_matches(field, known, n=3)
        listed = "the file that --config names, or those it builds on, list them"
        hint = f"did you mean {' or '.join(near)}?" if near else listed
        raise UserError(f"{where}: the base has no field {field!r}; {hint}")
    return known[field]


def _parse(field: str, text: str, like: Any) -> Any:
    """A value of the command line, of the type that the field has."""
    if type(like) not in PARSERS:
        raise UserError(f"--grid {field}: it is {like!r}, of a kind that a --variants file alone can vary")
    try:
        return PARSERS[type(like)].parse(text)
    except ValueError as error:
        raise UserError(f"--grid {field}={text}: {error}; it is {like!r} in the base") from error


def _typed(field: str, value: Any, like: Any, where: str) -> Any:
    """A value of a file, which must be of the type that the field has; a whole number is a float, too."""
    if type(like) is float and type(value) is int and abs(value) < LARGEST_WHOLE:
        return float(value)
    if type(like) in PARSERS and type(value) is not type(like):
        raise UserError(f"{where}: {field} is {value!r}; it must be of the type of {like!r}, which the base has")
    return value
