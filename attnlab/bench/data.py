"""Benchmark the data pipeline: how much faster batches come than a training step consumes them.

    python -m attnlab.bench data [--sizes=small,large] [--json=data.json]

Sizes as in `bench train`. Each round trains for --seconds, then draws --batches batches without training on them.

Figures: ratio_data_SIZE, batches a second over steps a second; data_wait_share_SIZE, the share of the training loop's
time spent waiting for the next batch; step_ms_SIZE and batch_ms_SIZE.
"""

import statistics

from attnlab.bench import options, timing, workers

COUNTS = {
    "rounds": (5, "rounds of each size"),
    "seconds": (3, "seconds of training a round, about"),
    "batches": (2000, "batches drawn without training, a round"),
}


def define(values, argv) -> None:
    """Define the flags."""
    options.define_common(values, workers.SIZES, COUNTS)


def main(values) -> int:
    """Measure, and print the table."""
    options.check_common(values, workers.SIZES, COUNTS)
    figures, rows = {}, {}
    for size in values.sizes:
        seconds, shares = _measure(values, size)
        ratio, share = timing.ratio(seconds, "step", "batch"), statistics.median(shares)
        step, batch = (1e3 * statistics.median(seconds[name]) for name in ("step", "batch"))
        figures |= {f"ratio_data_{size}": ratio, f"data_wait_share_{size}": share}
        figures |= {f"step_ms_{size}": step, f"batch_ms_{size}": batch}
        rows[size] = {
            "ms a step": f"{step:.2f}",
            "ms a batch": f"{batch:.3f}",
            "× faster": f"{ratio:.0f}",
            "waiting": f"{100 * share:.2f} %",
        }
    timing.table("data", rows, caption="medians; waiting: share of the loop's time spent waiting for a batch")
    options.keep(values.json, figures)
    return 0


def _measure(values, size: str) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds a step and a batch, and the share of the loop's time spent waiting, by round."""
    seconds, shares = {"step": [], "batch": []}, []
    with workers.started({"attnlab": {"peer": False}}, size, workers.SIZES[size]) as running:
        worker = running["attnlab"]
        steps = workers.calibrate(running, values.seconds)
        for _ in timing.rounds(size, values.rounds):
            trained = worker.ask("train", steps=steps)
            drawn = worker.ask("batches_alone", count=values.batches)
            seconds["step"].append(trained["seconds"] / steps)
            seconds["batch"].append(drawn["seconds"] / values.batches)
            shares.append(trained["waited"] / trained["seconds"])
    return seconds, shares
