"""The status of a command until it has results: one changing line on a terminal, one line per message elsewhere.

Imports nothing slow: its first message announces the slow import of JAX.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and newlines
_shown = False  # whether a status is on the cursor's line


def open_streams() -> None:
    """Replace closed standard streams by the null device, so that printing never fails."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def importing(words: Iterable[str]) -> None:
    """Show that JAX is being imported, unless the words of the command line ask for help."""
    if not any(word.startswith(("-h", "--help")) for word in words):
        show("importing JAX")


def end_when_interrupted() -> None:
    """Until `commands.run`, let SIGINT end this process: an import of JAX would report it as another error."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def end(*_) -> None:
    """End this process at once and report the interrupt."""
    clear()
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


def show(text: str) -> None:
    """Show what begins now, in place of the previous status."""
    global _shown
    clear()
    _shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if _shown:  # a line that wraps could not be erased
        text = escaped(" ".join(f"{text} ...".split()))[: shutil.get_terminal_size().columns - 1]
    with contextlib.suppress(OSError):  # the pipe's reader has exited
        print(text, end="" if _shown else "\n", flush=True)


def escaped(text: str) -> str:
    r"""Return a text with escaped control characters, so that a terminal shows them instead of obeying them."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def silent(text: str) -> None:
    """Show nothing."""


def clear() -> None:
    """Erase the status, before something else is printed."""
    global _shown
    if _shown:
        _shown = False
        with contextlib.suppress(OSError):
            print("\r\x1b[2K", end="", flush=True)
