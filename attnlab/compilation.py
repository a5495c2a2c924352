"""JAX's persistent compilation cache, in the user's cache folder, without the entries that a kill has torn.

JAX writes an entry in place, so that a kill leaves half of one, and never writes one again that is there: a torn entry
would be compiled anew at every start, with a warning.
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
from pathlib import Path

import jax

LIMIT = 2 << 30  # bytes of attnlab's own folder, past which the oldest entries go


def keep_programs() -> Path | None:
    """Programs compiled from here on are kept for the next start, and those of earlier ones found.

    The folder is JAX_COMPILATION_CACHE_DIR, else attnlab/ in the user's cache folder (XDG_CACHE_HOME, ~/.cache), there
    one for each kind of processor. JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.

    Returns:
      The folder; None when nothing is kept.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    given = jax.config.jax_compilation_cache_dir
    if given and "://" in given:  # a bucket, whose objects are whole or not there
        return None
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(given) if given else home / "attnlab" / f"programs-{_processor()}"
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, limit=math.inf if given else LIMIT)
    except (OSError, RuntimeError):  # no home, or one that may not be written: nothing is kept
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


def sweep(folder: Path, limit: int | float = LIMIT) -> list[Path]:
    """Deletes torn entries, and the oldest ones past a limit of bytes.

    Only what was written since the last sweep is read. An entry that another process is just writing looks torn too:
    it goes on into a file without a name.

    Returns:
      The torn ones.
    """
    swept = folder / "swept"
    before, now = swept.stat().st_mtime if swept.exists() else 0.0, time.time()
    kept, torn = [], []
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps as well
            facts = entry.stat()
            if facts.st_mtime >= before - 1 and not _is_whole(entry.read_bytes()):
                torn.append(entry)
            else:
                kept.append((facts.st_mtime, facts.st_size, entry))
    newest_first = sorted(kept, reverse=True)
    sizes = itertools.accumulate(size for _, size, _ in newest_first)
    old = [entry for (_, _, entry), size in zip(newest_first, sizes) if size > limit]
    for entry in torn + old:
        entry.unlink(missing_ok=True)
    swept.touch()
    os.utime(swept, (now, now))
    return torn


def _is_whole(entry: bytes) -> bool:
    if entry[:4] == b"\x28\xb5\x2f\xfd":
        return _is_whole_zstd(entry)
    stream = zlib.decompressobj()
    try:
        stream.decompress(entry)
    except zlib.error:
        return False
    return stream.eof


def _is_whole_zstd(entry: bytes) -> bool:
    """JAX takes Python's own from 3.14 on, before that zstandard where it is installed."""
    try:
        from compression import zstd

        decompress, error = zstd.decompress, zstd.ZstdError
    except ImportError:
        try:
            import zstandard
        except ImportError:
            return True  # nobody here can read it, nor say
        decompress, error = zstandard.ZstdDecompressor().decompress, zstandard.ZstdError
    try:
        decompress(entry)
    except error:
        return False
    return True


@functools.cache
def _processor() -> str:
    """A name for this kind of processor: programs for another one may not run here, and homes may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
