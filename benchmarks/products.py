"""Benchmark the matrix products of a training step, each alone: the sum of their times is the step's floor.

    python -m attnlab.bench products [--sizes=large] [--precisions=bfloat16] [--json=products.json]

`bench train` has the same sizes, and prints a step's time over its floor. Each product is timed in its shape, form and
type through XLA, as attnlab's modules call it, and through PyTorch if it is installed, in alternation. Products within
attention are not included, because their blocks are small.

Figures, for each size and precision: floor_ms_SIZE_PRECISION, the sum through XLA; floor_torch_ms_SIZE_PRECISION; and
gflop_SIZE_PRECISION.
"""

import contextlib
import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path

from .harness import contender, matrix_products, options, tables, workers
from .train import PRECISIONS

COUNTS = {"rounds": (7, "timed blocks of each library")}
LIBRARIES = {"xla": "XLA", "torch": "PyTorch"}


def define(values, argv) -> None:
    """Define the flags."""
    options.define_common(values, COUNTS, workers.SIZES)
    options.define_choices(values, "precisions", PRECISIONS, "types of the operands")


def main(values) -> int:
    """Benchmark, and print the tables."""
    options.check_common(values, COUNTS, workers.SIZES)
    options.check_known("precisions", values.precisions, PRECISIONS)
    cases = {
        f"{size}, {precision}": _measure(size, precision, values.rounds)
        for size in values.sizes
        for precision in values.precisions
    }
    options.keep_cases(values, "products", cases)
    return 0


def _measure(size: str, precision: str, rounds: int) -> dict:
    """Time the products of one step, and print their table; returns the figures."""
    counts = contender.experiment(vocab_size=65, precision=precision, **workers.SIZES[size])
    counts = matrix_products.of_program(counts.trace().jaxpr)
    with _started(list(counts)) as running:
        answers = workers.alternate(running, "time", rounds, f"{size}, {precision}")
    rows, figures = {}, {f"gflop_{size}_{precision}": sum(p.flops * n for p, n in counts.items()) / 1e9}
    sums = dict.fromkeys(running, 0.0)
    for at, (product, count) in enumerate(counts.items()):
        row = {"calls": str(count), "GFLOP": f"{product.flops * count / 1e9:.1f}"}
        for library, replies in answers.items():
            seconds = statistics.median(answer["seconds"][at] for answer in replies)
            sums[library] += seconds * count
            row |= {f"{LIBRARIES[library]}, ms": f"{1e3 * seconds * count:.2f}"}
            row |= {"GFLOP/s" + " " * (library == "torch"): f"{product.flops / seconds / 1e9:.0f}"}
        rows[str(product)] = row
    total = {"calls": str(counts.total()), "GFLOP": f"{figures[f'gflop_{size}_{precision}']:.1f}"}
    for library, seconds in sums.items():
        prefix = "floor_ms" if library == "xla" else f"floor_{library}_ms"
        figures[f"{prefix}_{size}_{precision}"] = 1e3 * seconds
        total[f"{LIBRARIES[library]}, ms"] = f"{1e3 * seconds:.2f}"
    caption = "calls and their milliseconds in a step; medians over rounds"
    tables.table(f"products of a step: {size}, {precision}", rows | {"the floor": total}, caption=caption)
    return figures


@contextlib.contextmanager
def _started(products: list):
    """A process for each library that is installed."""
    with tempfile.TemporaryDirectory(prefix="attnlab-products-") as folder, contextlib.ExitStack() as at_end:
        running = {}
        for library in LIBRARIES:
            if library == "torch" and not importlib.util.find_spec("torch"):
                print("torch is not installed: timing only XLA", file=sys.stderr)
                continue
            command = workers.command("harness.matrix_products")
            running[library] = workers.Worker(command, Path(folder) / f"{library}.log")
            at_end.callback(running[library].close)
            running[library].ask("start", found=products, library=library)
        yield running
