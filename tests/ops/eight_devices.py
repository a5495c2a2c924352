"""Random calls of the operator over eight virtual devices, compared with the same calls unsplit.

`python -m tests.ops.eight_devices 0 10` prints, for the cases of seeds 0 to 9 and each number of devices along the
sequence, one JSON line: the largest difference of out, lse and each gradient, over the largest element, and the same of
the unsplit call and one in float64, its rounding.
"""

import json
import os
import sys

if __name__ == "__main__":
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    os.environ["XLA_FLAGS"] = flags + os.environ.get("XLA_FLAGS", "")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import attnlab
from tests.ops import cases

MESHES = {2: (2, 2, 2), 4: (2, 1, 4), 8: (1, 1, 8)}


def difference(found: dict, expected: dict) -> float:
    """The largest over all results, over their largest element or 1; infinite where only one of two is finite."""
    worst = 0.0
    for name, x in expected.items():
        finite = np.isfinite(x)
        if (finite != np.isfinite(found[name])).any():
            return np.inf
        largest = max(abs(x[finite]).max(initial=0), 1)
        apart = abs(found[name][finite] - x[finite]) / (largest + abs(x[finite]))
        worst = max(worst, float(apart.max(initial=0)))
    return worst


def results(case: cases.Case) -> dict:
    return cases.results(case.arrays, case.run, "blockwise", jnp.float32)


def compare(case: cases.Case) -> None:
    expected = results(case)
    with jax.enable_x64(True):
        rounding = difference(expected, cases.results(case.arrays, case.run, "dense", jnp.float64))
    for devices, shape in MESHES.items():
        mesh = jax.make_mesh(shape, ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
        with jax.set_mesh(mesh), attnlab.context_parallel("context"):
            found = difference(results(case), expected)
        line = {"case": str(case), "devices": devices, "difference": found, "rounding": rounding}
        print(json.dumps(line), flush=True)


def main(first: int, last: int) -> None:
    for seed in range(first, last):
        compare(cases.draw(seed, multiple=8))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
