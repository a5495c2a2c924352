"""When a run must stop before its end: it is asked to, by SIGINT or SIGTERM, or one of its processes is gone."""

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
LOST = 75  # the exit code when others are gone: EX_TEMPFAIL of sysexits.h, "try again"


def lost(why: str) -> None:
    """Ends this process at once, with `LOST` and saying what to do, for another one of the run is gone."""
    print(f"error: another process is gone ({why}): start all of them again by the same command", file=sys.stderr)
    _exit(LOST)


class Stop:
    """Inside it, a signal ends the run after its step, or at once where the state is at rest; a second one at once.

    A thread listens to the signals, for Python's handlers wait while XLA compiles or computes. Where the run is one of
    several processes all stop after the same step: JAX's preemption service agrees upon it, of SIGTERM, and SIGINT is
    passed on to it. It asks only between steps, and hears no second SIGTERM. Where one of them is gone, the others
    would wait for it without end: they leave with `LOST`.

    Args:
      own_process: the process is the run's, and may be ended from the thread. Else, in a notebook say, the loop alone
        ends, after its step.
      timeout: seconds that may pass from step to step, a save between them included, until others are taken for gone.

    Attributes:
      signal: the first that came.

    >>> with Stop() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     while stop.signal is None:  # a thread hears it
    ...         time.sleep(0.01)
    ...     stop.asked()
    True
    """

    def __init__(self, own_process: bool = False, timeout: int = 300):
        self.signal: int | None = None
        self._own_process = own_process
        self._alone = jax.process_count() == 1
        self._calls = self._handled = 0
        self._leave = None
        self._at_rest = threading.Condition()
        self._old = {}
        self._timeout, self._heard = timeout, None
        self._over = threading.Event()

    def __enter__(self):
        # Python lets no other thread handle signals; one that trains inside a larger program has its own ways to stop.
        if threading.current_thread() is threading.main_thread():
            numbers = SIGNALS if self._alone else (signal.SIGINT,)  # JAX's service handles SIGTERM itself
            self._hear, self._tell = socket.socketpair()
            self._tell.setblocking(False)
            self._old = {number: signal.signal(number, self._handle) for number in numbers}
            self._old_fd = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, name="attnlab-stop", daemon=True).start()
        if not self._alone and self._own_process:
            threading.Thread(target=self._watch, name="attnlab-watch", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._over.set()
        if self._old:
            signal.set_wakeup_fd(self._old_fd)
            for number, handler in self._old.items():
                signal.signal(number, handler)
            self._tell.close()  # ends the thread

    def asked(self) -> bool:
        """Whether to stop now; asked at the same places in every process."""
        if self._alone:
            return self.signal is not None
        self._calls += 1
        self._heard = time.monotonic()
        if multihost_utils.reached_preemption_sync_point(self._calls):
            self.signal = self.signal or signal.SIGTERM
            return True
        return False

    @contextlib.contextmanager
    def at_rest(self, leave: Callable[[], None]) -> Iterator[None]:
        """Inside it, nothing changes the state: a signal calls `leave`, from another thread, and ends the process."""
        with self._at_rest:
            before, self._leave = self._leave, leave
            self._at_rest.notify()
        try:
            yield
        finally:
            with self._at_rest:  # waits while the thread is leaving
                self._leave = before

    def _handle(self, *_):
        """Python's own handler, which runs between two lines of the main thread."""
        self._handled += 1
        if self._handled > 1 and not self._own_process:
            raise KeyboardInterrupt

    def _listen(self):
        while number := self._hear.recv(1):
            number = number[0]
            if number not in SIGNALS:
                continue
            if self.signal is not None and self._own_process:
                _exit(128 + number)
            self.signal = number
            if not self._alone:
                os.kill(os.getpid(), signal.SIGTERM)
            elif self._own_process:
                threading.Thread(target=self._leave_at_rest, daemon=True).start()
        self._hear.close()

    def _watch(self):
        while not self._over.wait(1):
            if self._heard and time.monotonic() - self._heard > self._timeout:
                lost(f"or a save takes longer: no step for config.parallel.timeout = {self._timeout} s")

    def _leave_at_rest(self):
        with self._at_rest:
            self._at_rest.wait_for(lambda: self._leave is not None)
            code = 128 + self.signal
            try:
                self._leave()
            except BaseException as error:  # nobody else would hear of it
                print(f"error: {error}", file=sys.stderr)
                code = 2
            _exit(code)


def _exit(code: int) -> None:
    """Ends the process without waiting for other threads or processes, as `sys.exit` would."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
