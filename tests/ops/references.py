"""Independent references: fla's naive files, and stick-breaking attention stick by stick."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest


def naive(name):
    """Load fla/ops/`name`/naive.py by its path, because importing the package needs Triton."""
    spec = importlib.util.find_spec("fla")
    path = spec and Path(spec.submodule_search_locations[0], "ops", name, "naive.py")
    if not path or not path.exists():
        pytest.skip("fla-core is not installed: make peers")
    module = importlib.util.module_from_spec(file_spec := importlib.util.spec_from_file_location("naive", path))
    file_spec.loader.exec_module(module)
    return module


def broken(q, k, v, visible):
    """(outputs, weights) of stick-breaking attention, computed stick by stick; `visible` is `[B, T, T]`."""
    batch, length, heads, size = q.shape
    weights = np.zeros((batch, heads, length, length))
    for b, h, i in np.ndindex(batch, heads, length):
        stick = 1.0
        for j in reversed(range(i)):
            if visible[b, i, j]:
                share = 1 / (1 + np.exp(-q[b, i, h] @ k[b, j, h * k.shape[2] // heads] / np.sqrt(size)))
                weights[b, h, i, j] = stick * share
                stick *= 1 - share
    return np.einsum("bhij,bjhd->bihd", weights, np.repeat(v, heads // v.shape[2], axis=2)), weights
