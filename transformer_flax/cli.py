"""What all commands share: flags, and errors that speak to the user."""

import logging
import sys
from collections.abc import Callable

from absl import app

from transformer_flax.errors import UserError


def run(main: Callable[[], None], usage: str) -> None:
    """Parses the flags and calls `main`; what the user can mend is told in one message, with status 2."""

    def parse(argv):
        try:
            return app.parse_flags_with_usage(argv)
        except (UserError, AttributeError, KeyError, ValueError, TypeError, OSError) as error:
            fail(error)

    def guarded_main(argv):
        if len(argv) > 1:
            fail(f"unexpected argument {argv[1]!r}; see --help")
        # In place of absl's handler, whose INFO level is the libraries' own chatter.
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, force=True)
        try:
            main()
        except UserError as error:
            fail(error)

    app.run(guarded_main, flags_parser=parse)


def fail(error: object) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
