"""Runs the commands: the flags of a trained run, errors and signals.

Commands check their flags before they import JAX, which takes seconds.
"""

import contextlib
import inspect
import io
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from absl import app, flags

from transformer_flax.arguments import parse
from transformer_flax.errors import Interrupted, UserError
from transformer_flax.files import named_errors, require_other
from transformer_flax.training.interruption import OTHERS, drop_lost_output, handle

if TYPE_CHECKING:
    from transformer_flax.run import Run

CPU_DEVICES = 4  # at most; more devices make batches wider, which adds padding

PICTURES = (".png", ".svg", ".pdf")

flags.disclaim_key_flags()  # so that --help of each command lists the flags defined here


SETTINGS = {  # fields of config.decode that flags override
    "beam_size": (flags.DEFINE_integer, "hypotheses in the beam; 1: greedy search"),
    "length_penalty": (flags.DEFINE_string, "gnmt: ((5 + |Y|) / 6)^alpha; length: |Y|^alpha; none"),
    "alpha": (flags.DEFINE_float, "exponent of the length penalty; a larger one gives a beam search longer outputs"),
    "min_length": (flags.DEFINE_integer, "minimum output length in tokens, end symbol included; a lower maximum wins"),
    "max_extra_length": (flags.DEFINE_integer, "maximum output length in tokens, beyond the input's"),
    "max_input_length": (flags.DEFINE_integer, "tokens of the longest input that is taken whole"),
    "batch_size": (flags.DEFINE_integer, "sentences in a batch, on each device"),
    "window": (flags.DEFINE_integer, "lines that are read and sorted by length before the first output"),
}
SEARCH = ("beam_size", "length_penalty", "alpha", "min_length")  # of SETTINGS, those without effect on given outputs


def define_run(names: Iterable[str] = SETTINGS) -> Callable[[], "tuple[Run, dict[str, Any]]"]:
    """Defines the flags that name a trained run, and the flags of `SETTINGS` that `names` lists.

    Returns a function that restores the run or ensemble, prints its name, and returns it and the settings given.
    """
    workdirs = flags.DEFINE_multi_string(
        "workdir",
        None,
        "directory of a run, or DIRECTORY@STEP,... for the mean of these checkpoints; repeat it for an ensemble",
    )
    average = flags.DEFINE_string(
        "average", None, "number of last checkpoints to average, or ema; default: as the run's config says"
    )
    chosen = {name: SETTINGS[name] for name in names}
    holders = {name: define(name, None, f"{text}; default: the run's") for name, (define, text) in chosen.items()}

    def restore_all() -> "tuple[Run, dict[str, Any]]":
        if not workdirs.value:
            raise UserError("name the directory of a trained run: --workdir=runs/NAME")
        from transformer_flax.run import restore
        from transformer_flax.training.compilation_cache import keep_compiled
        from transformer_flax.training.sharding import divide_cpu

        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        divide_cpu(min(cores, CPU_DEVICES))
        keep_compiled("")
        which = int(average.value) if average.value and average.value.isdecimal() else average.value
        first, *others = [restore(name, average=which) for name in workdirs.value]
        run = first.ensemble(*others)
        print(f"{run.name}: {run.params_from}", file=sys.stderr)
        return run, {name: holder.value for name, holder in holders.items() if holder.value is not None}

    return restore_all


def is_given(name: str) -> bool:
    """Returns whether a flag is set. --noFLAG counts as not set."""
    flag = flags.FLAGS[name]
    return bool(flag.present) and flag.value is not False


def refuse_idle(names: Iterable[str], why: str) -> None:
    """Checks that none of these flags is set, because they have no effect; `why` is a text such as "with --target"."""
    for name in names:
        if is_given(name):
            raise UserError(f"--{name} has no effect {why}: leave it out")


def require_output(name: str | None, *inputs: str | None) -> None:
    """Checks that the file of a flag can be written and is none of the inputs. None stands for a flag that is not set.

    Must be called before the work whose result will be written to the file.
    """
    if name is not None:
        require_other(name, [file for file in inputs if file is not None])
        require_writable(pathlib.Path(name))


def require_writable(file: pathlib.Path) -> None:
    """Checks that a file can be written, without changing it."""
    existed = file.exists()
    file.open("ab").close()
    if not existed:
        file.resolve().unlink()  # behind a link, the file and not the link


def write_lines(name: str, lines: Iterable[str]) -> None:
    """Writes lines to a file; an error, such as that of a full disk, names the file."""
    with named_errors(name):
        pathlib.Path(name).write_text("".join(f"{line}\n" for line in lines), "utf-8")


def require_picture(flag: str, name: str) -> None:
    """Checks that a picture can be written to a file."""
    file = pathlib.Path(name)
    if file.suffix.lower() not in PICTURES:
        raise UserError(f"--{flag}={name}: the file of a picture must end in {', '.join(PICTURES)}")
    require_writable(file)


def run(main: Callable[..., None], *, afterwards: str = "") -> None:
    """Parses the flags and calls `main`. Prints an error as one message, and exits with status 2.

    Handles UserError, OSError, and JAX's error where memory is lacking. `main` gets the arguments that are not
    flags. If `main` takes none, they are errors. `afterwards` is added to the message of an interruption.
    """

    def parse_flags(argv: list[str]) -> list[str]:
        try:
            return parse(argv)
        except UserError as error:
            _fail(str(error))
        except (SystemExit, OSError):  # after --help, for which absl exits with status 1
            _end(0)

    def guarded(argv: list[str]) -> None:
        files = argv[1:]
        if files and not inspect.signature(main).parameters:
            _fail(f"unexpected argument {files[0]!r}; options are written --name=value, see --help")
        # Replaces absl's handler, which shows the INFO messages of libraries.
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, force=True)
        for library in ("absl", "asyncio"):  # Orbax logs the errors that it also raises
            logging.getLogger(library).setLevel(logging.CRITICAL)
        sys.unraisablehook = _unraisable
        handle(_exit, OTHERS)
        try:
            main(*files)
            sys.stdout.flush()  # here, so that a closed pipe is caught below
        except UserError as error:
            _fail(str(error))
        except Interrupted as interruption:
            _end(interruption.exit_status, f"{interruption}; {afterwards}" if afterwards else str(interruption))
        except KeyboardInterrupt:  # outside the training loop, which raises Interrupted
            _end(128 + signal.SIGINT, "interrupted")
        except SystemExit as ended:  # by another signal
            _end(ended.code)
        except BrokenPipeError:  # the reader, such as `head`, has ended
            _end(128 + signal.SIGPIPE)
        except OSError as error:  # no space, no permission
            if error.errno is None:
                raise
            where = f": {error.filename}" if error.filename else ""
            _fail(f"{error.strerror}{where}")
        except RuntimeError as error:
            if not str(error).startswith("RESOURCE_EXHAUSTED"):  # JAX's word for no memory
                raise
            what, _, _ = str(error).partition("\n")
            _fail(
                f"{what.rstrip('.')}; smaller batches and fewer hypotheses need less memory: --batch_size, --beam_size "
                "and --nbest, or --config.data.tokens_per_batch to train"
            )
        else:
            handle(signal.SIG_DFL)  # Python's handlers end before the process does
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # without its handler, this timer would kill the process

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as with `<&-`; a file opened later would take its place
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open until the process ends)
        elif mode == "w" and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a letter of the text
    app.run(guarded, flags_parser=parse_flags)


def _exit(number: int, _) -> NoReturn:
    """Ends the command on a signal; `finally` blocks run."""
    drop_lost_output()
    sys.exit(128 + number)


def _fail(message: str) -> NoReturn:
    _end(2, f"error: {message}")


def _end(status: Any, message: str = "") -> NoReturn:
    """Ends the process before its time, after the `finally` blocks of the command.

    Python's own exit would crash in a thread that still compiles, and Orbax would complain there about the unread part
    of a damaged checkpoint.
    """
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"{message}\n" if message else "")):
        with contextlib.suppress(OSError):  # its reader has ended, or its disk is full
            print(text, end="", file=stream, flush=True)
    os._exit(status)


def _unraisable(unraisable: Any) -> None:
    """Handles exceptions that no code can catch."""
    status = getattr(unraisable.exc_value, "code", None)  # of the SystemExit that `_exit` raises
    lost = [number for number in OTHERS if status == 128 + number]
    if unraisable.exc_type is KeyboardInterrupt:
        lost = [signal.SIGINT]
    if lost:  # the signal came during garbage collection: repeat it a moment later
        # The system's timer, because on a busy machine the signal of a thread came before that thread had started.
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(lost[0]))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    elif str(unraisable.exc_value) != "Event loop is closed":  # Orbax raises that one after a failed write
        sys.__unraisablehook__(unraisable)
