"""What all commands share: flags, and errors that speak to the user."""

import inspect
import logging
import os
import pathlib
import re
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from transformer_flax.decoding.search import LENGTH_PENALTIES
from transformer_flax.errors import Interrupted, UserError
from transformer_flax.training.fields import require_fields
from transformer_flax.training.interruption import OTHERS, drop_lost_output, handle

if TYPE_CHECKING:
    from transformer_flax.run import Run

USER_ERROR = 2  # exit statuses
INTERRUPTED = 130  # 128 + SIGINT, as shells count
CLOSED_PIPE = 141  # 128 + SIGPIPE

PICTURES = (".png", ".svg", ".pdf")

ROOT = pathlib.Path(__file__).parents[1]  # of the clone, where configs/ lies, which is not part of the package

NO_CONFIGS = "the installed package carries no configs: give --config=FILE, such as one of configs/ in the repository"

flags.disclaim_key_flags()  # a flag defined here is one of the command that asks for it, and in its --help


def define_config(default: pathlib.Path) -> Callable[[], ConfigDict]:
    """Defines --config=FILE[:ARGUMENT], which is `default` where it is not given, and --config.FIELD=VALUE.

    From any directory, configs can build on those of configs/.

    Returns:
      A function that gives the config, or raises a UserError where none is given and the default is not installed.
    """
    sys.path.insert(1, str(ROOT))
    # Not as the flag's own default: that is overridden while the flag is defined, where no error could be explained.
    if default.exists() and not any(re.match(r"--?config(=|$)", arg) for arg in sys.argv):
        sys.argv.insert(1, f"--config={default}")
    holder = config_flags.DEFINE_config_file(
        "config",
        help_string="a file of configs/; any of its fields can be set, as in --config.model.num_heads=16; "
        "the file, or those it builds on, explain them",
    )
    flag = flags.FLAGS["config"]
    flag.parser = _ConfigFile()
    flag.default_as_str = f"configs/{default.name}"

    def config() -> ConfigDict:
        if holder.value is None:
            raise UserError(NO_CONFIGS)
        return holder.value

    return config


class _ConfigFile(flags.ArgumentParser):
    """In place of that of ml_collections, which leaves mistakes in a file as tracebacks."""

    def parse(self, argument: str) -> ConfigDict:
        return load_config(argument).lock()

    def flag_type(self) -> str:
        return "config file"


def load_config(argument: str) -> ConfigDict:
    """The config that the file of FILE or FILE:ARGUMENT makes.

    Raises:
      UserError: it cannot, or the config has fields that it must not have; names the file, and the line of a mistake.
    """
    file, _, given = argument.partition(":")
    try:
        source = pathlib.Path(file).read_bytes()
    except OSError as error:
        present = ", ".join(sorted(str(found) for found in pathlib.Path("configs").glob("[a-z]*.py")))
        raise UserError(
            f"--config={argument} cannot be loaded; there are {present or 'no configs in the current directory'}"
        ) from error
    module = types.ModuleType("config_file")
    module.__file__ = file
    sys.modules[module.__name__] = module  # where a dataclass of the file looks for its module
    try:
        exec(compile(source, file, "exec"), module.__dict__)
        get_config = getattr(module, "get_config", None)
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
    except SyntaxError as error:
        raise UserError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        lines = [n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
        place = f"{file}, line {lines[-1]}" if lines else file
        raise UserError(f"{place}: {_mistake(error)}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{file}: get_config returns {config!r}; it must return a ConfigDict")
    try:
        require_fields(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return config


def _mistake(error: Exception) -> str:
    """In one line, what a config file has raised."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if isinstance(error, AttributeError) and frame.f_globals.get("__name__", "").startswith("ml_collections."):
        return _unknown_field(str(error))
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _unknown_field(text: str) -> str:
    """What ml_collections raises for it, quoted names with or without a hint, for the user."""
    field = re.findall(r"\w+", text)[0]
    hint = re.search(r'Did you mean "(\w+)', text)
    advice = f"did you mean {hint[1]!r}?" if hint else "the file that --config names, or those it builds on, list them"
    return f"this config has no field {field!r}; {advice}"


def _define_penalty(name: str, default: None, text: str) -> flags.FlagHolder:
    return flags.DEFINE_enum(name, default, LENGTH_PENALTIES, text)


SETTINGS = {  # of a search: fields of config.decode that a command may set otherwise
    "beam_size": (flags.DEFINE_integer, "hypotheses followed at a time; 1: greedy search"),
    "length_penalty": (_define_penalty, "gnmt: ((5 + |Y|) / 6)^alpha; length: |Y|^alpha; none"),
    "alpha": (flags.DEFINE_float, "of the length penalty: the larger, the longer the output"),
    "min_length": (flags.DEFINE_integer, "shortest output in tokens, the end symbol included"),
    "max_extra_length": (flags.DEFINE_integer, "tokens that an output may have beyond those of its input"),
    "max_input_length": (flags.DEFINE_integer, "longer inputs, in tokens, are cut with a warning"),
    "batch_size": (flags.DEFINE_integer, "sentences that go through the model at a time"),
    "window": (flags.DEFINE_integer, "lines read, sorted by length and dealt with before the first is put out"),
}


def define_run(names: Iterable[str] = SETTINGS) -> Callable[[], "tuple[Run, dict[str, Any]]"]:
    """Defines the flags that name a trained run and set its search, or those of them that are named.

    Returns:
      A function that restores it (an ensemble where several are named) and gives the settings that were set.
    """
    workdirs = flags.DEFINE_multi_string(
        "workdir",
        None,
        "the directory of a run, or DIRECTORY@STEP,... for the mean of these checkpoints; given several times, they "
        "are an ensemble",
    )
    average = flags.DEFINE_string(
        "average", None, "how many of the last checkpoints to average, or ema; default: what the run's config says"
    )
    holders = {}
    for name in names:
        define, text = SETTINGS[name]
        holders[name] = define(name, None, f"{text}; default: the run's")

    def restore() -> "tuple[Run, dict[str, Any]]":
        if not workdirs.value:
            raise UserError("name the directory of a trained run: --workdir=runs/NAME")
        first, *others = [restore_named(name, average.value) for name in workdirs.value]
        chosen = {name: holder.value for name, holder in holders.items() if holder.value is not None}
        return first.ensemble(*others), chosen

    return restore


def restore_named(name: str, average: str | None = None) -> "Run":
    """The run of one --workdir, `DIRECTORY` or `DIRECTORY@STEP,STEP,...`; the average is for those without steps."""
    from transformer_flax.run import restore  # not before the flags are checked: JAX takes seconds to load

    directory, _, steps = name.rpartition("@")
    if directory and re.fullmatch(r"\d+(,\d+)*", steps):
        return restore(directory, steps=[int(step) for step in steps.split(",")])
    return restore(name, average=int(average) if average and average.isdecimal() else average)


def require_picture(flag: str, name: str) -> None:
    """Refuses a file that no picture can be written to: before the work, and not after it.

    Raises:
      UserError: it has not the name of a picture.
      OSError: it cannot be written.
    """
    file = pathlib.Path(name)
    if file.suffix.lower() not in PICTURES:
        raise UserError(f"--{flag}={name}: the file of a picture must end in {', '.join(PICTURES)}")
    existed = file.exists()
    file.open("ab").close()
    if not existed:
        file.unlink()


def run(main: Callable[..., None], *, takes_files: bool = False, afterwards: str = "") -> None:
    """Parses the flags and calls `main`; what the user can mend is told in one message, without a traceback.

    Args:
      main: given the files on the command line, where there can be any.
      takes_files: whether arguments that are no flags are files; else they are refused.
      afterwards: what the user can do after an interruption in good order.
    """

    def parse(argv: list[str]) -> list[str]:
        app.define_help_flags()
        try:
            positional = flags.FLAGS(argv)
        except (flags.Error, AttributeError, KeyError) as error:
            _fail(_explain(error, argv))
        except SystemExit:  # of --help, which absl takes for a failure
            sys.exit(0)
        return positional

    def guarded(argv: list[str]) -> None:
        files = argv[1:]
        if files and not takes_files:
            _fail(f"unexpected argument {files[0]!r}; options are written --name=value, see --help")
        # In place of absl's handler, whose INFO level is the libraries' own chatter.
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, force=True)
        for library in ("absl", "asyncio"):  # what Orbax logs of an error that reaches us as one
            logging.getLogger(library).setLevel(logging.CRITICAL)
        sys.unraisablehook = _unraisable
        handle(_end, OTHERS)
        try:
            main(*files)
            sys.stdout.flush()  # here, where a closed pipe is still understood
        except UserError as error:
            _fail(str(error))
        except Interrupted as interruption:
            handle(signal.SIG_IGN, OTHERS)  # the same request, from another sender
            print(f"{interruption}; {afterwards}" if afterwards else interruption, file=sys.stderr)
            sys.exit(interruption.exit_status)
        except KeyboardInterrupt:  # before or after the work that Interrupted tells of
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:  # whoever read our output, such as `head`, has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush into the pipe
            sys.exit(CLOSED_PIPE)
        except OSError as error:  # no room, no permission: the operating system's word is the message
            if error.errno is None:
                raise
            where = f": {error.filename}" if error.filename else ""
            _fail(f"{error.strerror}{where}")

    app.run(guarded, flags_parser=parse)


def _end(number: int, _) -> NoReturn:
    """Ends the process on a signal, after clearing away what is half done."""
    drop_lost_output()
    sys.exit(128 + number)


def _fail(message: str) -> NoReturn:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(USER_ERROR)  # at once: what Orbax has left unread of a damaged checkpoint would complain at length


def _unraisable(unraisable: Any) -> None:
    """Deals with what was raised where nobody can catch it."""
    if unraisable.exc_type is KeyboardInterrupt:  # Ctrl-C, during garbage collection: it comes again a moment later
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif str(unraisable.exc_value) != "Event loop is closed":  # writes of a checkpoint of which another has failed
        sys.__unraisablehook__(unraisable)


def _explain(error: Exception, argv: list[str]) -> str:
    """One message out of what absl and ml_collections raise for a flag."""
    if isinstance(error.__context__, UserError):  # of a config file
        return str(error.__context__)
    text = str(error).strip()
    if isinstance(error, (AttributeError, KeyError)):
        field = re.findall(r"\w+", text)[0]
        override = next((arg for arg in argv if re.match(rf"--?config.*\b{field}\b", arg)), field)
        return f"{override}: {_unknown_field(text)}"
    if re.search(r"flag 'config\.", text):  # of which fields there are, only a config could say
        return NO_CONFIGS
    return text
