"""Parses command lines: the order of flags, short forms, and messages about mistakes."""

import difflib
import itertools
import re
import sys
from collections.abc import Iterable
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from transformer_flax.errors import UserError
from transformer_flax.training.config_fields import flatten

LANGUAGES = ("data.source_language", "data.target_language")
# Config fields, by the names that other toolkits use for them.
LEARNING_RATE = ("optimizer.factor", "which multiplies the paper's learning rate (section 5.3)")
OTHER_NAMES = {
    "lr": LEARNING_RATE,
    "learning_rate": LEARNING_RATE,
    "batch_size": ("data.tokens_per_batch", "the size of a training batch in tokens"),
    "epochs": ("steps", "the length of training; a run prints how many batches are an epoch"),
}


def parse(argv: list[str]) -> list[str]:
    """Parses the flags of a command line. Returns the program's name and the arguments that are not flags.

    Raises:
      UserError: a flag or its value is wrong.
    """
    if "config" in flags.FLAGS:
        parser: Any = flags.FLAGS["config"].parser
        argv = arrange(argv, default=parser.default)
        sys.argv[:] = argv  # ml_collections looks here for the fields that are set
    try:
        others = flags.FLAGS(argv)
    except (flags.Error, ValueError) as error:
        raise UserError(_explain(error)) from error
    _require_values(argv)
    return others


def _require_values(argv: list[str]) -> None:
    """Checks that no flag without a value has taken the next flag as its value.

    Raises:
      UserError: a flag has taken the next flag.
    """
    for argument, following in itertools.pairwise(itertools.takewhile(lambda argument: argument != "--", argv)):
        name = argument.lstrip("-")
        is_flag = argument.startswith("-") and name in flags.FLAGS
        if is_flag and following.startswith("--") and not isinstance(flags.FLAGS[name].parser, flags.BooleanParser):
            raise UserError(f"--{name} has no value before {following}; write --{name}=VALUE")


def arrange(argv: list[str], *, default: str) -> list[str]:
    """Spells out --languages, and moves --config to the front, because fields that are set after it override it.

    Args:
      argv: the program's name and its arguments.
      default: the config file to use without --config.

    Raises:
      UserError: --languages does not name two languages, or a flag --config.FIELD also sets a language.
    """
    program, *arguments = argv
    configs, arguments = _take("config", arguments)
    pairs, arguments = _take("languages", arguments)
    arranged = [program, f"--config={[default, *configs][-1]}"]
    if pairs:
        named = pairs[-1].split("-")
        if len(named) != 2 or not all(named):
            raise UserError(
                f"--languages={pairs[-1]}: give the source and the target, as in de-en; set names with a hyphen with "
                + " and ".join(f"--config.{field}" for field in LANGUAGES)
            )
        for field, language in zip(LANGUAGES, named, strict=True):
            if _take(f"config.{field}", arguments)[0]:
                raise UserError(f"--languages sets config.{field}: leave --languages or --config.{field} out")
            arranged.append(f"--config.{field}={language}")
    return arranged + arguments


def _take(name: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the values of a flag, --NAME=VALUE or --NAME VALUE, and the other arguments."""
    values, others, remaining = [], [], iter(arguments)
    for argument in remaining:
        found = re.fullmatch(rf"--?{re.escape(name)}(=(?P<value>.*))?", argument, re.DOTALL)
        value = None if found is None else found["value"] if found[1] else next(remaining, None)
        if value is not None:
            values.append(value)
        else:
            others.append(argument)
        if argument == "--":  # the rest are not flags
            others += remaining
    return values, others


def require_known(config: ConfigDict, argv: list[str]) -> None:
    """Checks that a config has the fields that --config.FIELD=VALUE sets.

    Raises:
      UserError: the config lacks a field. The message suggests another field.
    """
    for argument in argv:
        found = re.match(r"--?(no)?config\.([^=]*)", argument)
        section = config
        for name in found[2].split(".") if found else ():
            if not isinstance(section, ConfigDict) or name not in section:
                hint = _suggest(name, config) or "the config file, and those it imports, list its fields"
                raise UserError(f"{argument}: this config has no field {name!r}; {hint}")
            section = section[name]


def _suggest(name: str, config: ConfigDict | None, names: Iterable[str] = ()) -> str:
    """Returns a text that suggests the flag or config field that a name may mean; "" if none is close.

    Args:
      name: the unknown name, with or without its section.
      config: the command's config, if it has one.
      names: the names of the command's flags.
    """
    name = name.rpartition(".")[2]
    if config is not None and "model" in config and name in OTHER_NAMES:
        field, what = OTHER_NAMES[name]
        return f"set --config.{field}, {what}"
    spelled: dict[str, list[str]] = {known: [f"--{known}"] for known in names}
    for field in flatten(config.to_dict()) if config is not None else ():
        spelled.setdefault(field.rpartition(".")[2], []).append(f"--config.{field}")
    near = difflib.get_close_matches(name, spelled, n=1)
    return f"did you mean {' or '.join(sorted(spelled[near[0]], key=len))}?" if near else ""


def _explain(error: Exception) -> str:
    """Rewords an error of absl or ml_collections."""
    if isinstance(error.__context__, UserError):  # from a config file or its fields
        return str(error.__context__)
    if isinstance(error, flags.UnrecognizedFlagError):
        modules = flags.FLAGS.flags_by_module_dict().items()
        names = [flag.name for module, own in modules if not module.startswith("absl") for flag in own]
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        return f"unknown flag --{error.flagname}; {_suggest(error.flagname, config, names) or 'see --help'}"
    text = str(error)
    if isinstance(error, flags.IllegalFlagValueError):
        given = text.removeprefix("flag ").removesuffix(f": {error.__context__}")
        return f"{given}: it must be {_requirement(flags.FLAGS[given[2:].partition('=')[0]])}"
    return text


def _requirement(flag: flags.Flag) -> str:
    parser = flag.parser
    if isinstance(parser, flags.EnumParser):
        return f"one of {', '.join(parser.enum_values)}"
    if isinstance(parser, flags.BooleanParser):
        return "true or false"
    # Of the other parsers, only the one of a config section has no help text.
    return parser.syntactic_help or f"a dict; to set a field of it: --{flag.name}.FIELD=VALUE"
