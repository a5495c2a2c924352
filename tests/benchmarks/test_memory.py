"""Peak memory of a call."""

import numpy as np
import pytest

from attnlab._benchmarks.harness import memory


@pytest.mark.skipif(memory.peak(lambda: 0) is None, reason="this system does not report peak memory")
def test_peak_counts_temporaries():
    def call():
        held = np.ones(2**24)  # 128 MiB
        return held[:1].copy()

    assert 120 < memory.peak(call) < 140
