"""A command until it has imported what it needs: Ctrl-C ends it, where JAX would turn it into another error."""

import os
import signal
import sys

from attnlab.support import status


def handle_interrupts() -> None:
    """Let a SIGINT end this process, if it is a command of attnlab, until `restore_interrupts`."""
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    is_module = bool(module) and module[0].partition(".")[0] == "attnlab"
    is_script = os.path.basename(sys.argv[0]) == "attnlab" and sys.argv[0] in sys.orig_argv
    if (is_module or is_script) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def restore_interrupts() -> None:
    """Let a SIGINT raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_) -> None:
    status.clear()
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)
