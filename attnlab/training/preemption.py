"""Stop a run early: on SIGINT or SIGTERM, or when another process of the run is lost."""

import contextlib
import os
import signal
import sys
import threading
import time

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PEER_LOST = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again"


def is_peer_lost(error: Exception) -> bool:
    """Whether another process may have caused an error in this one; JAX also raises Gloo errors as ValueErrors."""
    is_own = any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Traceback"))  # a traceback is from a callback
    is_runtime = isinstance(error, jax.errors.JaxRuntimeError | TimeoutError)
    return not is_own and (is_runtime or "Gloo" in str(error))


def exit_peer_lost(why: str) -> None:
    """Exit at once with `PEER_LOST`, because another process of the run is lost."""
    print(f"error: another process is gone ({why}): start all of them again with the same command", file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(PEER_LOST)


class PreemptionHandler:
    """Turn SIGINT and SIGTERM into a flag that training and evaluation poll; a second signal ends the process.

    Before `handle` is called there is nothing to save, so signals end the process at once. This works even while XLA
    compiles, when Python's handlers would wait.

    In a distributed run all processes must stop after the same step. JAX's preemption service synchronizes them on
    SIGTERM, so SIGINT is forwarded as SIGTERM. The service ignores a second SIGTERM. If a process is lost, the others
    would wait for it forever, so they exit with `PEER_LOST` if `timeout` seconds pass without a poll, even in a save.

    If `own_process` is False (as in a notebook), the caller's handlers stay until `handle` is called, a second signal
    raises KeyboardInterrupt, and lost processes are not detected.
    """

    def __init__(self, own_process: bool = False, timeout: int = 300):
        self.signal: int | None = None
        self._own_process = own_process
        self._single_process = jax.process_count() == 1
        self._polls = 0
        self._old_handlers = {}
        self._timeout, self._last_poll = timeout, None
        self._exited = threading.Event()

    def __enter__(self):
        # Only the main thread may handle signals; a program that trains in another thread must stop it by other means.
        if threading.current_thread() is threading.main_thread():
            numbers = SIGNALS if self._single_process else (signal.SIGINT,)  # JAX's service handles SIGTERM itself
            self._old_handlers = {number: signal.getsignal(number) for number in numbers}
            if self._own_process:
                self._set(signal.SIG_DFL)
        if not self._single_process and self._own_process:
            threading.Thread(target=self._watch_peers, name="attnlab-peers", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._exited.set()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def handle(self) -> None:
        """From now on, record signals instead of ending, because there is something to save."""
        self._set(self._record)

    def requested(self) -> bool:
        """Whether to stop now. Every process must call this at the same points."""
        if self._single_process:
            return self.signal is not None
        self._polls += 1
        self._last_poll = time.monotonic()
        if multihost_utils.reached_preemption_sync_point(self._polls):
            self.signal = self.signal or signal.SIGTERM
            return True
        return False

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, the convention of shells."""
        return 128 + self.signal

    def _set(self, handler) -> None:
        for number in self._old_handlers:
            signal.signal(number, handler)

    def _record(self, number, _):
        self.signal = number
        self._set(signal.SIG_DFL if self._own_process else signal.default_int_handler)
        if not self._single_process:
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch_peers(self):
        while not self._exited.wait(1):
            if self._last_poll and time.monotonic() - self._last_poll > self._timeout:
                exit_peer_lost(f"no step for config.parallel.timeout = {self._timeout} s, or a save that takes longer")
