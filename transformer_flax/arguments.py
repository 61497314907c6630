"""Parses command lines: --config and its fields, short forms, and messages about mistakes."""

import difflib
import inspect
import itertools
import os
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from transformer_flax.checked_fields import TYPES
from transformer_flax.errors import UserError
from transformer_flax.training.config_fields import add_fields, flatten, make_floats, require_fields

LANGUAGES = ("data.source_language", "data.target_language")
# Config fields, each with what it is, by the names that other toolkits use for them.
OTHER_NAMES = {
    ("lr", "learning_rate"): (
        "optimizer.factor",
        "which multiplies the paper's learning rate (section 5.3); the rate peaks at "
        "factor / sqrt(d_model * warmup_steps)",
    ),
    ("batch_size", "max_tokens"): (
        "data.tokens_per_batch",
        "the size of a training batch in tokens, over all devices and micro-batches",
    ),
    ("update_freq", "batch_multiplier"): ("accumulation_steps", "the micro-batches that a batch is divided into"),
    ("epochs", "max_epoch", "max_update"): (
        "steps",
        "the length of training; a run prints how many batches are an epoch",
    ),
    ("restore_file", "load_model"): ("init_from", "which starts a new run from the parameters of another"),
    ("save_dir", "model_dir"): ("name", "which names the run; --workdir=DIRECTORY sets its directory"),
    ("activation_dropout",): ("model.ffn_dropout", "which is inside the feed-forward network"),
    ("weight_decay",): ("model.dropout", "which regularises here; no optimizer has weight decay"),
    ("lenpen",): ("decode.alpha", "the exponent of the length penalty"),
    ("fp16", "bf16"): ("model.dtype", "the type of the computation; by default bfloat16 where the device has it"),
}

PACKAGE = pathlib.Path(__file__).parent
# A wheel ships configs/ inside the package; in a clone, configs/ lies beside the package.
ROOT = PACKAGE / "shipped" if (PACKAGE / "shipped").is_dir() else PACKAGE.parent  # holds configs/

flags.disclaim_key_flags()  # so that --help of each command lists the flags defined here


def define_config(default: str, *, explained_in: str = "base.py") -> Callable[[], ConfigDict]:
    """Defines --config, its fields and --languages, and returns a function that gives the config.

    Both arguments are files of configs/: the file to use without --config, and the one that explains the fields.
    """
    holder = config_flags.DEFINE_config_file(
        "config",
        help_string="a config file; configs/NAME.py is found from any directory. Set any field as in "
        f"--config.data.vocab_size=8000; {ROOT / 'configs' / explained_in} explains the fields",
        flag_values=flags.FLAGS,
    )
    flag = flags.FLAGS["config"]
    flag.parser = _ConfigFile(str(ROOT / "configs" / default))
    flag.default_as_str = f"configs/{default}"
    # Defined only for --help: `arrange` spells out --languages before the flags are parsed.
    help_string = "SOURCE-TARGET, such as de-en: short for --config.data.source_language=de ...target_language=en"
    flags.DEFINE_string("languages", None, help_string, flag_values=flags.FLAGS)
    return lambda: holder.value


MOST_SEEDS = 1_000


class SeedsParser(flags.ArgumentParser):
    """The parser of --seeds. "3" means the seeds 0, 1 and 2; "3," means the seed 3 alone."""

    syntactic_help = (
        f"a number of seeds, at most {MOST_SEEDS:,}, or a list of different seeds: '3' means the seeds 0, 1 and 2; "
        "'3,' means the seed 3 alone"
    )

    def parse(self, argument: str) -> list[int]:
        numbers = [int(number) for number in argument.removesuffix(",").split(",")]
        seeds = numbers if "," in argument else [*range(min(numbers[0], MOST_SEEDS + 1))]
        if not 0 < len(seeds) <= MOST_SEEDS or max(seeds) >= 2**32 or min(seeds) < 0 or len({*seeds}) < len(seeds):
            raise ValueError(self.syntactic_help)
        return seeds


class _ConfigFile(flags.ArgumentParser):
    """The parser of --config. ml_collections' own parser shows mistakes in a config file as tracebacks.

    `default` is the file to use without --config. ml_collections would load a flag's default while it defines the flag,
    which is too early to explain an error.
    """

    def __init__(self, default: str):
        super().__init__()
        self.default = default

    def parse(self, argument: str) -> ConfigDict:
        config = load_config(argument)
        found = {flag: re.match(r"--?(no)?config\.([^=]*)", flag) for flag in sys.argv}
        given = {match[2]: flag for flag, match in found.items() if match}  # by field or section
        if given.keys() - flatten(config.to_dict()).keys():
            add_fields(config)  # so that fields that the file lacks can be set too
        known = flatten(config.to_dict())
        for field, flag in given.items():
            if not any(f"{name}.".startswith(f"{field}.") for name in known):
                hint = _suggest(field, config) or "the config file, and those it imports, list its fields"
                raise UserError(f"{flag}: this config has no field {field!r}; {hint}")
        return config.lock()


def load_config(argument: str | os.PathLike[str]) -> ConfigDict:
    """Loads the config that FILE or FILE:ARGUMENT names. FILE is relative to the current directory or else to `ROOT`.

    Raises:
      UserError: the file cannot be loaded, or the config has unknown or missing fields. The message names the file
        and, if known, the line.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(1, str(ROOT))  # a config anywhere can import from configs/
    name, _, given = os.fspath(argument).partition(":")
    file = next((str(path) for path in (pathlib.Path(name), ROOT / name) if path.is_file()), None)
    if file is None:
        present = sorted(path.name for path in (ROOT / "configs").glob("[a-z]*.py"))
        near = difflib.get_close_matches(pathlib.Path(name).name, present, n=1)
        there = ", ".join(f"configs/{file}" for file in present)
        hint = f"did you mean 'configs/{near[0]}'?" if near else f"there are {there}"
        raise UserError(f"{argument} cannot be loaded: there is no such file; {hint}")
    try:
        get_config = runpy.run_path(file, run_name="config_file").get("get_config")
        if not callable(get_config):
            raise UserError(f"{file} defines no function get_config; configs/numbers.py shows one")
        arguments = [given] if given else []
        try:
            inspect.signature(get_config).bind(*arguments)
        except TypeError as error:
            takes = "takes no argument" if given else "needs an argument"
            raise UserError(f"--config={argument}: this config {takes} behind a colon") from error
        config = get_config(*arguments)
    except UserError:
        raise
    except Exception as error:
        *_, (last, _) = frames = list(traceback.walk_tb(error.__traceback__))
        lines = [line for frame, line in frames if frame.f_code.co_filename == file]
        mistake = _reword(error) if last.f_globals.get("__name__", "").startswith("ml_collections.") else ""
        mistake = mistake or f"{type(error).__name__}: {' '.join(str(error).split())}"
        hint = "" if file.endswith(".py") else "; a config is a Python file, such as configs/numbers.py"
        raise UserError(f"{file}{f', line {lines[-1]}' if lines else ''}: {mistake}{hint}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{file}: get_config returns {config!r}; it must return a ConfigDict")
    try:
        require_fields(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    make_floats(config)
    return config


def _reword(error: Exception) -> str:
    """Rewords ml_collections' errors about an unknown field and about a value of another type; "" for any other."""
    text = str(error)
    cast = r"Could not override field '(\w+)'.*?\. (.*) is of original type (.*) and .* to type (.*)"
    if found := re.match(cast, text, re.DOTALL):
        field, value, given, wanted = found.groups()
        value = repr(value) if given == str(str) else value
        types = {str(known): must for known, must in TYPES.items()}
        return f"field {field!r} cannot be {value}; it must be {types.get(wanted, 'a section of fields')}"
    found = re.match(r"\W*(?:Key )?\W*([\w.]+)", text)
    if isinstance(error, (AttributeError, KeyError)) and found and "object has no attribute" not in text:
        hint = re.search(r'Did you mean "(\w+)', text)
        advice = f"did you mean {hint[1]!r}?" if hint else "the config file, and those it imports, list its fields"
        return f"this config has no field {found[1]!r}; {advice}"
    return ""


def parse(argv: list[str]) -> list[str]:
    """Parses the flags of a command line. Returns the program's name and the arguments that are not flags."""
    # Most shells leave the ~ of --workdir=~/runs as it is.
    argv = [re.sub(r"^(--?[\w.]+=)~(?=/)", rf"\1{pathlib.Path.home()}", argument) for argument in argv]
    try:
        if "config" in flags.FLAGS:
            parser: Any = flags.FLAGS["config"].parser
            argv = arrange(argv, default=parser.default)
            sys.argv[:] = argv  # ml_collections looks here for the fields that are set
        others = flags.FLAGS(argv)
    except (flags.Error, ValueError) as error:
        raise UserError(_explain(error)) from error
    _require_values(argv)
    return others


def _require_values(argv: list[str]) -> None:
    """Checks that no flag without a value has taken the next flag as its value."""
    for argument, following in itertools.pairwise(itertools.takewhile(lambda argument: argument != "--", argv)):
        name = argument.lstrip("-")
        is_flag = argument.startswith("-") and name in flags.FLAGS
        if is_flag and following.startswith("--") and not isinstance(flags.FLAGS[name].parser, flags.BooleanParser):
            raise UserError(f"--{name} has no value before {following}; write --{name}=VALUE")


def arrange(argv: list[str], *, default: str) -> list[str]:
    """Spells out --languages, and moves --config to the front, because fields that are set after it override it."""
    own = flags.FlagValues()
    flags.DEFINE_string("config", default, "", flag_values=own)
    flags.DEFINE_string("languages", None, "", flag_values=own)
    program, *arguments = own(argv, known_only=True)
    arranged, pair = [program, f"--config={own['config'].value}"], own["languages"].value
    if pair is not None:
        named = pair.split("-")
        if len(named) != 2 or not all(named):
            raise UserError(
                f"--languages={pair}: give the source and the target, as in de-en; set names with a hyphen with "
                + " and ".join(f"--config.{field}" for field in LANGUAGES)
            )
        arranged += [f"--config.{field}={language}" for field, language in zip(LANGUAGES, named, strict=True)]
    return arranged + arguments


def _suggest(name: str, config: ConfigDict | None, names: Iterable[str] = ()) -> str:
    """Returns a text that suggests the flag or config field that a name may mean; "" if none is close."""
    section, _, name = name.replace("-", "_").rpartition(".")
    fields = flatten(config.to_dict()) if config is not None else {}
    spelled: dict[str, list[str]] = {known: [f"--{known}"] for known in names}
    for field in fields:
        spelled.setdefault(field.rpartition(".")[2], []).append(f"--config.{field}")
    inside = [known for known in spelled if section and f"--config.{section}.{known}" in spelled[known]]
    for others, (field, what) in OTHER_NAMES.items():
        if name in others and field in fields and name not in inside:
            return f"set --config.{field}, {what}"
    # A field that is named like this is meant, wherever it is; then one in the section that is named.
    near = difflib.get_close_matches(name, inside, n=1) if name in inside or name not in spelled else []
    if near:
        return f"did you mean --config.{section}.{near[0]}?"
    near = difflib.get_close_matches(name, spelled, n=1, cutoff=0.61)  # at 0.6, "sides" is close to "steps"
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
        return f"one of {', '.join(parser.enum_values)} ({flag.help.partition(': ')[2]})"
    if isinstance(parser, flags.BooleanParser):
        return "true or false"
    # Of the other parsers, only the one of a config section has no help text.
    return parser.syntactic_help or f"a section; to set a field of it: --{flag.name}.FIELD=VALUE"
