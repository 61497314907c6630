"""What all commands share: flags, and errors that speak to the user."""

import logging
import pathlib
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from absl import app, flags
from ml_collections import config_flags

from transformer_flax.errors import UserError

USER_ERROR = 2  # exit status

flags.disclaim_key_flags()  # a flag defined here is one of the command that asks for it, and in its --help


def define_config(default: pathlib.Path) -> flags.FlagHolder:
    """Defines --config=FILE[:ARGUMENT], which is `default` where it is not given, and --config.FIELD=VALUE."""
    # Not as the flag's own default: that is overridden while the flag is defined, where no error could be explained.
    if not any(re.match(r"--?config(=|$)", arg) for arg in sys.argv):
        sys.argv.insert(1, f"--config={default}")
    return config_flags.DEFINE_config_file(
        "config",
        help_string="a file of configs/; any of its fields can be set, as in --config.model.num_heads=16; "
        f"default configs/{default.name}",
    )


def run(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`; what the user can mend is told in one message, without a traceback."""

    def parse(argv: list[str]) -> list[str]:
        app.define_help_flags()
        try:
            positional = flags.FLAGS(argv)
            if "config" in flags.FLAGS:
                _ = flags.FLAGS.config.name  # a file that cannot be loaded is told of when it is first used
        except (flags.Error, AttributeError, KeyError, OSError) as error:
            _fail(_explain(error, argv))
        return positional

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            _fail(f"unexpected argument {argv[1]!r}; options are written --name=value, see --help")
        # In place of absl's handler, whose INFO level is the libraries' own chatter.
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, force=True)
        try:
            main()
        except UserError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
            sys.exit(130)
        except OSError as error:  # no room, no permission: the operating system's word is the message
            if error.errno is None:
                raise
            where = f": {error.filename}" if error.filename else ""
            _fail(f"{error.strerror}{where}; mend that, and the same command goes on from the last checkpoint")

    app.run(guarded, flags_parser=parse)


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(USER_ERROR)


def _explain(error: Exception, argv: list[str]) -> str:
    """One message out of what absl and ml_collections raise for a flag."""
    text = str(error).strip()
    file = re.search(r"--?config[= ](\S*)", " ".join(argv))
    file = file[1] if file else ""
    if user_error := re.search(r"\.UserError: (.*)", text):  # raised by a config, which is told as a traceback
        return user_error[1]
    if re.search(r"get_config\(\) takes .* positional argument", text):
        return f"--config={file}: this config takes no argument behind a colon"
    if isinstance(error, OSError):
        present = ", ".join(sorted(str(found) for found in pathlib.Path("configs").glob("[a-z]*.py")))
        return f"--config={file} cannot be loaded; there are {present or 'no configs in the current directory'}"
    if isinstance(error, (AttributeError, KeyError)):
        field = re.findall(r"\w+", text)[0]  # the message is a quoted name, with or without a hint
        override = next((arg for arg in argv if re.match(rf"--?config.*\b{field}\b", arg)), field)
        hint = re.search(r"Did you mean .*\?", text)
        return f"{override}: no config has a field {field!r}; {hint[0] if hint else 'configs/base.py lists them all'}"
    return text
