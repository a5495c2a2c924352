"""Huge pages for the buffers of XLA's CPU backend.

XLA asks glibc for the buffers of every step as one block, and glibc returns a large block to the kernel when it is
freed: the next step faults in each of its pages again, 240,000 of 4 KiB at GPT sizes of 10 million parameters, a fifth
of the step's time. In pages of 2 MiB they are a thousand. glibc (2.35 and newer) reads the wish when a program starts.
"""

import os
import sys

TUNABLE = "glibc.malloc.hugetlb"


def environment(env: dict[str, str]) -> dict[str, str]:
    """A program's environment with the wish for huge pages, unless it says something about them already.

    >>> environment({"HOME": "/root"})
    {'HOME': '/root', 'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    """
    tunables = env.get("GLIBC_TUNABLES", "")
    if TUNABLE in tunables:
        return env
    return env | {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{TUNABLE}=1"]))}


def restart() -> None:
    """Starts this program again with them, in the same process: called before anything heavy is imported."""
    wished = environment(dict(os.environ))
    if sys.platform == "linux" and wished != dict(os.environ):
        os.execve(sys.executable, sys.orig_argv, wished)
