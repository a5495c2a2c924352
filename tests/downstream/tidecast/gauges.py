"""Synthetic tide gauges: the constituents that dominate real ones, and some weather."""

import numpy as np

PERIODS = (12.42, 12.00, 25.82, 23.93)  # hours, of M2, S2, O1 and K1
AMPLITUDES = (1.0, 0.3, 0.15, 0.2)  # metres


def levels(seed: int, stations: int, hours: int) -> np.ndarray:
    """Water levels in metres, hour by hour, float32 `[stations, hours]`."""
    rng = np.random.default_rng(seed)
    amplitudes = rng.uniform(0.5, 1.5, (stations, 1, 4)) * AMPLITUDES
    phases = rng.uniform(0, 2 * np.pi, (stations, 1, 4))
    tide = (amplitudes * np.sin(2 * np.pi * np.arange(hours)[:, None] / PERIODS + phases)).sum(axis=-1)
    return (tide + rng.normal(0, 0.02, tide.shape)).astype(np.float32)
