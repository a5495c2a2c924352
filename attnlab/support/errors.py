"""The errors that a command reports in one line, without a traceback."""


class UserError(ValueError):
    """An error that the user can fix; the message is one line: the value, what was expected, what to do."""


class ArgumentError(UserError):
    """An invalid argument, `seeds = 1: expected …`; `of_flag` is the message for a command line, `--seeds=1: …`."""

    def __init__(self, name: str, value, expected: str):
        super().__init__(f"{name} = {value!r}: {expected}")
        shown = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
        self.of_flag = f"--{name}={shown}: {expected}"
