"""The current work of a command until it has results: one line that changes on a terminal, a line for each elsewhere.

It imports nothing that takes time, as the first thing that it tells of is an import of seconds.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and new lines
_shown = False  # whether the cursor is behind a status


def open_streams() -> None:
    """Open the null device in place of standard streams that are closed, so that printing never fails."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def importing(words: Iterable[str]) -> None:
    """Show that JAX is imported, unless the words of the command line ask for help."""
    if not any(word.startswith(("-h", "--help")) for word in words):
        show("importing JAX")


def end_when_interrupted() -> None:
    """Let a SIGINT end this process until `commands.run`: in an import of JAX it would become another error."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def end(*_) -> None:
    """End this process at once, as interrupted."""
    clear()
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


def show(text: str) -> None:
    """Say what begins now, in place of what was said before."""
    global _shown
    clear()
    _shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if _shown:  # a line that wraps could not be erased
        text = escaped(" ".join(f"{text} ...".split()))[: shutil.get_terminal_size().columns - 1]
    with contextlib.suppress(OSError):  # the reader of a pipe has gone
        print(text, end="" if _shown else "\n", flush=True)


def escaped(text: str) -> str:
    r"""A text whose control characters a terminal shows in place of obeying them."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def silent(text: str) -> None:
    """Say nothing."""


def clear() -> None:
    """Erase the status, before something else is printed."""
    global _shown
    if _shown:
        _shown = False
        with contextlib.suppress(OSError):
            print("\r\x1b[2K", end="", flush=True)
