"""Data: how many times faster batches come than a training step takes them, and how long steps wait for them.

python -m attnlab.bench data [--sizes=small,large] [--json=data.json]

Sizes as in `attnlab.bench train`. Blocks of training and blocks of batches that nobody trains on take turns. Figures:
ratio_data_SIZE, batches a second over steps a second; data_wait_share_SIZE, of the loop's time, in the call for the
next batch; step_ms_SIZE and batch_ms_SIZE.
"""

import statistics

from absl import flags

from attnlab.bench import options, timing, workers


def define(values, argv) -> None:
    """The flags."""
    flags.DEFINE_list("sizes", list(workers.SIZES), "of " + ", ".join(workers.SIZES), flag_values=values)
    flags.DEFINE_integer("rounds", 5, "blocks of each kind", flag_values=values)
    flags.DEFINE_integer("seconds", 3, "of a block of training, about", flag_values=values)
    flags.DEFINE_integer("batches", 2000, "in a block of batches", flag_values=values)
    options.define_json(values)


def main(values) -> int:
    """Measures and prints the table."""
    options.check_positive(values, "rounds", "seconds", "batches")
    options.check_known("sizes", values.sizes, workers.SIZES)
    options.check_new(values, "json")
    figures, rows = {}, {}
    for size in values.sizes:
        with workers.started({"attnlab": {"peer": False}}, workers.SIZES[size]) as racing:
            steps = workers.block(racing, values.seconds)
            seconds, shares = {"step": [], "batch": []}, []
            for _ in range(values.rounds):
                trained = racing["attnlab"].ask("train", steps=steps)
                drawn = racing["attnlab"].ask("batches_alone", count=values.batches)
                seconds["step"].append(trained["seconds"] / steps)
                seconds["batch"].append(drawn["seconds"] / values.batches)
                shares.append(trained["waited"] / trained["seconds"])
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
    timing.table("data", rows, caption="medians; waiting: for the next batch, of the loop's time")
    options.keep(values.json, figures)
    return 0
