"""The error that a command reports in one line, without a traceback."""


class UserError(ValueError):
    """An error that the user can fix; the message is one line: the value, what was expected, what to do."""
