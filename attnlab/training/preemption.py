"""Stop a run early: on SIGINT or SIGTERM, or when another process of the run is lost."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PEER_LOST = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again"


def exit_peer_lost(why: str) -> None:
    """Exit at once with `PEER_LOST`: another process of the run is lost."""
    print(f"error: another process is gone ({why}): start all of them again with the same command", file=sys.stderr)
    _exit(PEER_LOST)


class PreemptionHandler:
    """Handle SIGINT and SIGTERM: stop the run after the current step, or at once while its state is not changing.

    A second signal ends the process at once. A thread listens for signals, because Python's own handlers do not run
    while XLA compiles or computes.

    In a distributed run all processes must stop after the same step. JAX's preemption service synchronizes them on
    SIGTERM, so SIGINT is forwarded as SIGTERM. The service is polled only between steps, and ignores a second SIGTERM.
    If a process is lost the others would wait for it forever, so they exit with `PEER_LOST` after `timeout` seconds
    without a step, including saves.

    Where `own_process` is False (in a notebook), a signal only ends the loop.
    """

    def __init__(self, own_process: bool = False, timeout: int = 300):
        self.signal: int | None = None
        self._own_process = own_process
        self._single_process = jax.process_count() == 1
        self._polls = self._signals_handled = 0
        self._save_and_report = None  # set while the state is not changing
        self._rest_changed = threading.Condition()
        self._old_handlers = {}
        self._timeout, self._last_poll = timeout, None
        self._exited = threading.Event()

    def __enter__(self):
        # Only the main thread may handle signals; a program that trains in another thread must stop it in another way.
        if threading.current_thread() is threading.main_thread():
            numbers = SIGNALS if self._single_process else (signal.SIGINT,)  # JAX's service handles SIGTERM itself
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._old_handlers = {number: signal.signal(number, self._handle) for number in numbers}
            self._old_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, name="attnlab-signals", daemon=True).start()
        if not self._single_process and self._own_process:
            threading.Thread(target=self._watch_peers, name="attnlab-peers", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._exited.set()
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_fd)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            self._sender.close()  # ends the thread

    def requested(self) -> bool:
        """Whether to stop now. Every process must call it at the same points."""
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

    @contextlib.contextmanager
    def at_rest(self, save_and_report: Callable[[], None]) -> Iterator[None]:
        """Context in which the state does not change: on a signal, a thread calls `save_and_report` and exits."""
        with self._rest_changed:
            outer, self._save_and_report = self._save_and_report, save_and_report
            self._rest_changed.notify()
        try:
            yield
        finally:
            with self._rest_changed:  # blocks while the thread is saving
                self._save_and_report = outer

    def _handle(self, *_):
        """The Python-level handler, which runs in the main thread between two bytecodes."""
        self._signals_handled += 1
        if self._signals_handled > 1 and not self._own_process:
            raise KeyboardInterrupt

    def _listen(self):
        while number := self._receiver.recv(1):
            number = number[0]
            if number not in SIGNALS:
                continue
            if self.signal is not None and self._own_process:
                _exit(128 + number)
            self.signal = number
            if not self._single_process:
                os.kill(os.getpid(), signal.SIGTERM)
            elif self._own_process:
                threading.Thread(target=self._exit_at_rest, daemon=True).start()
        self._receiver.close()

    def _watch_peers(self):
        while not self._exited.wait(1):
            if self._last_poll and time.monotonic() - self._last_poll > self._timeout:
                exit_peer_lost(f"or a save takes longer: no step for config.parallel.timeout = {self._timeout} s")

    def _exit_at_rest(self):
        with self._rest_changed:
            self._rest_changed.wait_for(lambda: self._save_and_report is not None)
            code = self.exit_code
            try:
                self._save_and_report()
            except BaseException as error:  # no one else would report it
                print(f"error: {error}", file=sys.stderr)
                code = 2
            _exit(code)


def _exit(code: int) -> None:
    """Exit without waiting for other threads or processes, as `sys.exit` would."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
