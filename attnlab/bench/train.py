"""Training: tokens a second and peak memory against nanoGPT, on the same text, in turns.

python -m attnlab.bench train --peer_path=nanoGPT --peer_python=torch/bin/python [--sizes=small,large] [--json=train.json]

Sizes: small is nanoGPT's recipe for CPUs (4 layers, 4 heads, width 128, context 64, batch 12), large 6 layers, 6 heads,
width 384, context 256, batch 16. The peer runs its own model and loop, eager and compiled; the faster counts.
"""

import statistics

from absl import flags

from attnlab.bench import timing, workers


def define(values, argv) -> None:
    """The flags."""
    flags.DEFINE_string("peer_path", None, "a checkout of nanoGPT; without it attnlab races alone", flag_values=values)
    flags.DEFINE_string("peer_python", "python3", "a Python that has torch", flag_values=values)
    flags.DEFINE_list("sizes", ["small", "large"], "of small, large", flag_values=values)
    flags.DEFINE_list("precisions", ["float32", "bfloat16"], "ours", flag_values=values)
    flags.DEFINE_bool("compiled", True, "let nanoGPT compile as well", flag_values=values)
    flags.DEFINE_integer("rounds", 7, "counted blocks of each contender", flag_values=values)
    flags.DEFINE_integer("seconds", 3, "of a block, about", flag_values=values)
    flags.DEFINE_string("json", None, "a new file for the figures", flag_values=values)


def main(values) -> int:
    """Races and prints the table."""
    figures, rows = {}, {}
    for size in values.sizes:
        contenders = {f"attnlab {p}": {"peer": False, "precision": p} for p in values.precisions}
        if values.peer_path:
            contenders["nanoGPT"] = {"peer": True, "compiled": False}
            if values.compiled:
                contenders["nanoGPT compiled"] = {"peer": True, "compiled": True}
        with workers.started(contenders, workers.SIZES[size], values.peer_path, values.peer_python) as racing:
            for worker in racing.values():
                worker.ask("train", steps=3)  # compiles
            one = {name: worker.ask("train", steps=3)["seconds"] / 3 for name, worker in racing.items()}
            block = max(1, round(values.seconds / max(one.values())))
            seconds = workers.alternate(racing, "train", values.rounds, steps=block)
            memory = {name: worker.ask("memory")["mib"] for name, worker in racing.items()}
        rows[size] = {name: [s / block for s in blocks] for name, blocks in seconds.items()}
        print(timing.line(size, rows[size]), {name: round(mib) for name, mib in memory.items()}, flush=True)
        peers = [name for name in rows[size] if name.startswith("nanoGPT")]
        if peers:
            best = min(peers, key=lambda name: statistics.median(rows[size][name]))
            for precision in values.precisions:
                figures[f"ratio_{size}_{precision}"] = timing.ratio(rows[size], best, f"attnlab {precision}")
    print(figures)
    return 0
