"""The one exception that is meant for the user."""


class UserError(ValueError):
    """Something the user can mend: the message says what was wrong, with the value, and what to do.

    Commands print the message alone and exit with status 2; every other exception is a defect of the program and keeps
    its traceback.
    """
