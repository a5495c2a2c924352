"""Peaks of memory, of the device that took most where the backend tells them."""

from unittest import mock

import jax
import pytest

from attnlab.training import memory


@pytest.mark.parametrize(
    "stats, peak",
    [
        ([{"peak_bytes_in_use": 2_000_000_000}, {"peak_bytes_in_use": 3_500_000_000}], 3_500_000_000),
        ([{"bytes_in_use": 5}], None),
        ([None], None),
        ([NotImplementedError()], None),
        ([jax.errors.JaxRuntimeError("UNIMPLEMENTED")], None),
    ],
    ids=str,
)
def test_peaks_are_told_where_the_backend_tells_them(stats, peak):
    found = memory.peaks([mock.Mock(jax.Device, memory_stats=mock.Mock(side_effect=[each])) for each in stats])
    assert found.get("device_peak_memory_bytes") == peak
    assert 50_000_000 < found["host_peak_memory_bytes"] < 1 << 40
    assert memory.in_words(found).startswith("peak device memory 3.50 GB" if peak else "peak memory ")
