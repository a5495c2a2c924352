"""JAX's persistent compilation cache; workarounds for a compiler bug, and for the memory that compilation keeps.

If a kill truncates an entry, JAX warns and compiles that program again at each start, until the entry is old enough to
be deleted. JAX's size limit (jax_compilation_cache_max_size) is not used: it needs the package filelock, and takes a
file lock for every entry that is read.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax

# jaxlib versions that compute some sums of products wrongly on CPUs if they fuse sum and products (JAX issue 39103).
FAULTY = ("0.10.2",)
FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
PRODUCTS, SUMS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", "LIBRARY_FUSION_TYPE_REDUCE"
COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event after each compilation
LIMIT = 2 << 30  # bytes in attnlab's cache folder, beyond which the oldest entries are deleted


def fuse_no_sums() -> None:
    """Turn fused sums off in XLA_FLAGS, for this process and its children, unless the user has set that flag.

    Call this before JAX creates its devices. `conform` and `bench` do not call it, because they compile as users do.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if version("jaxlib") in FAULTY and FUSIONS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{FUSIONS}=-reduce".strip()


def compiler_options(platform: str, *, fuses_sums: bool) -> dict[str, str] | None:
    """`compiler_options` of `jax.jit` for a platform; products are fast whether or not sums are fused."""
    if platform != "cpu" or version("jaxlib") not in FAULTY:
        return None
    return {FUSIONS: f"{PRODUCTS},{SUMS}" if fuses_sums else PRODUCTS}


def keep_programs() -> Path | None:
    """Enable the cache and return its folder; None if it is disabled or has no folder. Calls `fuse_no_sums`.

    The folder is JAX_COMPILATION_CACHE_DIR, else attnlab/ in the user's cache folder (XDG_CACHE_HOME, ~/.cache), with a
    subfolder per processor type. JAX_ENABLE_COMPILATION_CACHE=false disables the cache.
    """
    fuse_no_sums()
    if not jax.config.jax_enable_compilation_cache:
        return None
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        try:
            home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            folder = home / "attnlab" / f"programs-{_processor()}"
            folder.mkdir(parents=True, exist_ok=True)
            delete_oldest(folder)
        except (OSError, RuntimeError):  # no home, or one without write permission
            return None
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return Path(folder)


@functools.cache
def release_memory() -> None:
    """From now on, return memory to the system after each compilation, if the C library is glibc.

    LLVM works in many threads. When a thread frees memory, glibc holds it back for the thread's next requests: 50 to
    140 MiB for a small program.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if platform.system() == "Linux" else None

    def compiled(event: str, seconds: float, **_) -> None:
        if event == COMPILED and seconds > 0.1:  # shorter compilations leave little memory, but are frequent
            trim(0)

    if trim is not None:
        jax.monitoring.register_event_duration_secs_listener(compiled)


def delete_oldest(folder: Path, limit: int = LIMIT) -> None:
    """Delete the oldest entries beyond `limit` bytes."""
    entries = []
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process may delete entries too
            entries.append((entry.stat().st_mtime, entry.stat().st_size, entry))
    entries.sort(reverse=True)
    for (*_, entry), size in zip(entries, itertools.accumulate(size for _, size, _ in entries)):
        if size > limit:
            entry.unlink(missing_ok=True)


@functools.cache
def _processor() -> str:
    """A name for this processor type: home folders may be shared, and a program for another processor may fail."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
