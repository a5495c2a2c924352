"""Training: tokens a second and peak memory against nanoGPT, on the same text, in turns.

python -m attnlab.bench train --peer_path=nanoGPT --peer_python=torch/bin/python [--sizes=small] [--json=train.json]
python -m attnlab.bench train --profile=trace --sizes=small

Sizes: small is nanoGPT's recipe for CPUs (4 layers, 4 heads, width 128, context 64, batch 12), large 6 layers, 6 heads,
width 384, context 256, batch 16. The peer runs its own model and loop, eager and compiled; the faster counts. Figures:
ratio_SIZE_PRECISION, our tokens a second over its; tokens_per_second_, step_ms_ and peak_mib_SIZE_CONTENDER.
With --profile attnlab runs alone, and its ten most expensive ops are told.
"""

import statistics
from pathlib import Path

from absl import flags

from attnlab.bench import options, profiling, timing, workers

PRECISIONS = ("float32", "bfloat16")


def define(values, argv) -> None:
    """The flags."""
    options.define_peer(values)
    flags.DEFINE_list("sizes", list(workers.SIZES), "of " + ", ".join(workers.SIZES), flag_values=values)
    flags.DEFINE_list("precisions", list(PRECISIONS), "ours, of " + ", ".join(PRECISIONS), flag_values=values)
    flags.DEFINE_bool("compiled", True, "let nanoGPT compile as well", flag_values=values)
    flags.DEFINE_integer("rounds", 7, "counted blocks of each contender", flag_values=values)
    flags.DEFINE_integer("seconds", 3, "of a block, about", flag_values=values)
    flags.DEFINE_string("profile", None, "a new folder for traces of our steps, instead of a race", flag_values=values)
    options.define_json(values)


def main(values) -> int:
    """Races and prints the table."""
    options.check_positive(values, "rounds", "seconds")
    options.check_known("sizes", values.sizes, workers.SIZES)
    options.check_known("precisions", values.precisions, PRECISIONS)
    options.check_new(values, "json")
    options.check_new(values, "profile", what="folder")
    options.check_peer(values)
    ours = {f"attnlab {p}": {"peer": False, "precision": p} for p in values.precisions}
    return _profile(values, ours) if values.profile else _race(values, ours)


def _race(values, ours) -> int:
    theirs = {"nanoGPT": {"peer": True, "compiled": False}} if values.peer_path else {}
    if values.peer_path and values.compiled:
        theirs["nanoGPT compiled"] = {"peer": True, "compiled": True}
    figures, rows = {}, {}
    for size in values.sizes:
        with workers.started(ours | theirs, workers.SIZES[size], values.peer_path, values.peer_python) as racing:
            steps = workers.block(racing, values.seconds)
            answers = workers.alternate(racing, "train", values.rounds, steps=steps)
            peaks = {name: worker.peak_mib for name, worker in racing.items()}
        seconds = {name: [answer["seconds"] / steps for answer in given] for name, given in answers.items()}
        print(timing.line(f"{size}, a step", seconds), flush=True)
        tokens = workers.SIZES[size]["batch_size"] * workers.SIZES[size]["context"]
        for name, times in seconds.items():
            step, label = statistics.median(times), f"{size}_{name.replace(' ', '_')}"
            figures[f"step_ms_{label}"] = 1e3 * step
            figures[f"tokens_per_second_{label}"] = tokens / step
            figures[f"peak_mib_{label}"] = peaks[name]
            row = {"ms a step": f"{1e3 * step:.2f}", "tokens/s": f"{tokens / step:,.0f}"}
            if theirs:
                ratio = timing.ratio(seconds, timing.fastest(seconds, theirs), name)
                row["× nanoGPT"] = f"{ratio:.2f}"
                if name in ours:
                    figures[f"ratio_{size}_{ours[name]['precision']}"] = ratio
            row["peak memory, MiB"] = timing.mib(peaks[name])
            rows[f"{size}, {name}"] = row
    timing.table("training", rows, caption="medians; × nanoGPT: over the faster nanoGPT's tokens/s, round by round")
    options.keep(values.json, figures)
    return 0


def _profile(values, ours, steps: int = 5) -> int:
    for size in values.sizes:
        for name, contender in ours.items():
            folder = Path(values.profile) / f"{size}-{contender['precision']}"
            with workers.started({name: contender}, workers.SIZES[size]) as racing:
                racing[name].ask("train", steps=3)  # compiles
                ops = racing[name].ask("profile", steps=steps, folder=str(folder.absolute()))["ops"]
            rows = {
                op.name: {"ms a step": f"{op.milliseconds:.3f}", "calls": f"{op.calls:g}", "what": op.what}
                for op in (profiling.Op(*op) for op in ops)
            }
            timing.table(f"{size}, {name}: the most expensive ops", rows, caption=f"trace: {folder}")
    return 0
