"""Huge pages for the buffers of XLA's CPU backend.

XLA asks glibc for the buffers of every step as one block, and glibc returns a large block to the kernel when it is
freed: the next step faults in each of its pages again, 240,000 of 4 KiB at GPT sizes of 10 million parameters, a fifth
of the step's time. In pages of 2 MiB they are a thousand. glibc (2.35 and newer) reads the wish when a program starts.
"""

import contextlib
import os
import sys

TUNABLE = "glibc.malloc.hugetlb"
RESTARTED = "ATTNLAB_RESTARTED"  # in the environment: once, even where the wish does not come through


def environment(env: dict[str, str]) -> dict[str, str]:
    """A program's environment with the wish for huge pages, unless it says something about them already.

    >>> environment({"HOME": "/root"})
    {'HOME': '/root', 'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    """
    tunables = env.get("GLIBC_TUNABLES", "")
    if TUNABLE in tunables:
        return env
    return env | {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{TUNABLE}=1"]))}


def restart(module: str) -> None:
    """Starts `python -m module` again with them, in the same process: called before anything heavy is imported.

    Nothing happens under a debugger, in a notebook, or where another program runs the module.
    """
    given, options = dict(os.environ), sys.orig_argv
    wished = environment(given)
    is_it = "-m" in options and options[options.index("-m") + 1 :][:1] == [module]
    if sys.platform == "linux" and is_it and wished != given and RESTARTED not in given and sys.gettrace() is None:
        with contextlib.suppress(OSError):  # slower, but it runs
            os.execve(sys.executable, options, wished | {RESTARTED: "1"})
