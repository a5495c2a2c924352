"""The error that a command reports in one line, without a traceback."""


class UserError(ValueError):
    """A mistake that its user can mend; the message is one line: the value, what was expected, what to do."""
