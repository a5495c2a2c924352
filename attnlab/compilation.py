"""JAX's persistent compilation cache in the user's cache folder; compilers that err.

JAX writes an entry in place, so a kill leaves it truncated, and never overwrites an entry: the program would be
compiled again at every start, with a warning. JAX's size limit (jax_compilation_cache_max_size) is not used: it takes a
file lock for every entry that is read, keeps truncated entries, and up to JAX 0.10 fails on entries without an access
time, which a kill leaves as well.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import os
import platform
import time
import zlib
from importlib.metadata import version
from pathlib import Path

import jax

# jaxlib versions that compute some programs wrongly on CPUs, none of attnlab (tests/test_optimized.py), and a remedy.
WRONG = {
    "0.10.2": "sums some products of few columns wrongly on CPUs (JAX issue 39103), none of attnlab's own; functions "
    "of yours are safe with XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= or on Python 3.12"
}
LIMIT = 2 << 30  # bytes of attnlab's own folder, beyond which the oldest entries are deleted


def miscompilation() -> str:
    """A message where this jaxlib is known to compute wrongly and no flag prevents it; otherwise ""."""
    fault = WRONG.get(version("jaxlib"))
    if not fault or jax.default_backend() != "cpu" or "ynn_fusion_type=" in os.environ.get("XLA_FLAGS", ""):
        return ""
    return f"jaxlib {version('jaxlib')} {fault}"


def keep_programs() -> Path | None:
    """Enable the cache, and return its folder; None when the cache is disabled.

    The folder is JAX_COMPILATION_CACHE_DIR, else attnlab/ in the user's cache folder (XDG_CACHE_HOME, ~/.cache), with a
    subfolder per processor type. JAX_ENABLE_COMPILATION_CACHE=false disables the cache.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    given = jax.config.jax_compilation_cache_dir
    if given and "://" in given:  # a bucket, whose objects are written atomically
        return None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(given) if given else home / "attnlab" / f"programs-{_processor()}"
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, limit=math.inf if given else LIMIT)
    except (OSError, RuntimeError):  # no home, or one without write permission
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


def sweep(folder: Path, limit: int | float = LIMIT) -> list[Path]:
    """Delete truncated entries, which are returned, and the oldest entries beyond a limit of bytes.

    Only entries written since the last sweep are read. An entry that another process is writing looks truncated, too:
    that process goes on writing to the deleted file.
    """
    swept = folder / "swept"
    before, now = swept.stat().st_mtime if swept.exists() else 0.0, time.time()
    kept, truncated = [], []
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps as well
            stat = entry.stat()
            if stat.st_mtime >= before - 1 and not _is_intact(entry.read_bytes()):
                truncated.append(entry)
            else:
                kept.append((stat.st_mtime, stat.st_size, entry))
    newest_first = sorted(kept, reverse=True)
    sizes = itertools.accumulate(size for _, size, _ in newest_first)
    old = [entry for (_, _, entry), size in zip(newest_first, sizes) if size > limit]
    for entry in truncated + old:
        entry.unlink(missing_ok=True)
    swept.touch()
    os.utime(swept, (now, now))
    return truncated


def _is_intact(entry: bytes) -> bool:
    if entry[:4] == b"\x28\xb5\x2f\xfd":
        return _is_intact_zstd(entry)
    stream = zlib.decompressobj()
    try:
        stream.decompress(entry)
    except zlib.error:
        return False
    return stream.eof


def _is_intact_zstd(entry: bytes) -> bool:
    """JAX uses Python's zstd from 3.14 on, before that zstandard where it is installed."""
    try:
        from compression import zstd

        decompress, error = zstd.decompress, zstd.ZstdError
    except ImportError:
        try:
            import zstandard
        except ImportError:
            return True  # it cannot be checked, nor read by JAX
        decompress, error = zstandard.ZstdDecompressor().decompress, zstandard.ZstdError
    try:
        decompress(entry)
    except error:
        return False
    return True


@functools.cache
def _processor() -> str:
    """A name for this processor type: home folders may be shared, and programs for another processor may fail."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
