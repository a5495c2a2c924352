"""One run of a sweep: `attnlab train`, which stops as by SIGTERM, its state saved, when the sweep itself is gone."""

import os
import signal
import sys
import threading
import time

from attnlab import train

INTERVAL = 1.0  # seconds


def stop_with(parent: int) -> None:
    """Send this process a SIGTERM as soon as `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=stop_with, args=(os.getppid(),), name="attnlab-sweep", daemon=True).start()
    sys.exit(train.main())
