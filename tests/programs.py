"""Compiled programs that outlive a test run, and programs compiled as users compile them."""

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

JAXLIB = tuple(map(int, version("jaxlib").split(".")[:3]))
# With default flags, compiling small programs took nine tenths of the tests' time. Without optimizations, and with the
# older code generator (which jaxlib 0.12 no longer has), compiling takes an eighth.
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
AS_USERS = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}
if JAXLIB < (0, 11):
    FAST["xla_cpu_use_fusion_emitters"], AS_USERS["xla_cpu_use_fusion_emitters"] = False, True

LIMIT = 2 << 30  # bytes; a larger cache is deleted, and every program is compiled again
DAY = 24 * 60 * 60  # seconds


def optimized(function, **options):
    """`jax.jit`, optimized as for users, although the tests' flags turn optimizations off."""
    import jax  # not above: JAX reads the flags that conftest.py sets

    return jax.jit(function, compiler_options=AS_USERS, **options)


def compiled_text(function, *arguments) -> str:
    """The HLO of a function, optimized as for users."""
    return optimized(function).lower(*arguments).compile().as_text()


def types_of_products(compiled: str) -> set:
    """The types of the operands of all products in HLO."""
    types = dict(re.findall(r"%([\w.-]+) = (\w+)\[", compiled))
    products = re.findall(r" dot\(%([\w.-]+), %([\w.-]+)\)", compiled)
    return {types[operand] for operands in products for operand in operands}


class Programs:
    """JAX's compilation cache for this process: a folder that exchanges its entries with a shared folder.

    JAX writes an entry in place, so a killed process leaves a truncated one, and another process may read half an
    entry. Here each process writes to its own folder, and hard links share complete entries between the two.

    Attributes:
      own: the folder of this process, deleted when it exits.
      shared: the folder of all processes with this type of processor. An entry's name depends on jaxlib, the
        compiler's flags and the program.
    """

    def __init__(self, folder: Path):
        features = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith(("flags", "Features"))]
        self.shared = folder / hashlib.sha256("".join(features[:1]).encode()).hexdigest()[:8]
        self.shared.mkdir(parents=True, exist_ok=True)
        if sum(entry.stat().st_size for entry in os.scandir(self.shared)) > LIMIT:
            shutil.rmtree(self.shared, ignore_errors=True)
            self.shared.mkdir(exist_ok=True)
        for stale in folder.glob("process-*"):  # left by killed processes
            if stale.stat().st_mtime < time.time() - DAY:
                shutil.rmtree(stale, ignore_errors=True)
        self.own = Path(tempfile.mkdtemp(prefix="process-", dir=folder))
        atexit.register(shutil.rmtree, self.own, ignore_errors=True)

    def exchange(self):
        """Publish this process's new entries and link those of others. Do not call this while a program compiles."""
        own, shared = set(os.listdir(self.own)), set(os.listdir(self.shared))
        for names, source, target in ((own - shared, self.own, self.shared), (shared - own, self.shared, self.own)):
            for name in names:
                with contextlib.suppress(FileExistsError, FileNotFoundError):  # another process was faster
                    os.link(source / name, target / name)


def _read(path):
    return Path(path).read_text() if Path(path).exists() else ""
