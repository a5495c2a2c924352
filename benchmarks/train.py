"""Benchmark training speed and peak memory against nanoGPT, on the same text.

    python -m attnlab.bench train --peer_path=nanoGPT --peer_python=torch/bin/python [--sizes=small] [--json=train.json]

Size small is nanoGPT's recipe for CPUs (4 layers, 4 heads, width 128, context 64, batch size 12); large has 6 layers,
6 heads, width 384, context 256, batch size 16. nanoGPT runs its own model and loop, eager and compiled, in float32 and,
if attnlab's precisions include bfloat16, under torch.autocast in bfloat16. Like is compared with like: attnlab's
float32 with the faster float32 nanoGPT, its bfloat16 with the faster autocast nanoGPT. The contenders alternate, each
in a process of its own. Without --peer_path attnlab runs alone.

Figures: ratio_SIZE_PRECISION, attnlab's tokens a second over the faster float32 nanoGPT's, and
ratio_SIZE_bfloat16_over_autocast, over the faster autocast nanoGPT's; tokens_per_second_SIZE_CONTENDER,
step_ms_SIZE_CONTENDER and peak_mib_SIZE_CONTENDER; for attnlab also floor_ms_SIZE_CONTENDER, the time of the matrix
products of a step, each alone (`bench products`), and step_over_floor_SIZE_CONTENDER.
"""

import statistics

from absl import flags

from .harness import memory, options, tables, workers

PRECISIONS = ("float32", "bfloat16")
CAPTION = (
    "medians; × float32: tokens/s over the faster nanoGPT in float32; × autocast: over the faster nanoGPT in bfloat16. "
    "Like with like: × float32 for attnlab float32, × autocast for attnlab bfloat16"
)
COUNTS = {"rounds": (7, "timed blocks of each contender"), "seconds": (6, "approximate seconds per block")}


def define(values, argv) -> None:
    """Define the flags."""
    options.define_peer(values)
    options.define_common(values, COUNTS, workers.SIZES)
    options.define_choices(values, "precisions", PRECISIONS, "attnlab's precisions")
    flags.DEFINE_bool("compiled", True, "benchmark nanoGPT compiled as well", flag_values=values)


def main(values) -> int:
    """Benchmark, and print the table."""
    options.check_common(values, COUNTS, workers.SIZES)
    options.check_known("precisions", values.precisions, PRECISIONS)
    options.check_peer(values)
    ours = {f"attnlab {p}": {"peer": False, "precision": p} for p in values.precisions}
    theirs = _theirs(values) if values.peer_path else {}
    cases, rows = {}, {}
    for size in values.sizes:
        peer, figures = (values.peer_path, values.peer_python), cases.setdefault(size, {})
        with workers.started(ours | theirs, size, workers.SIZES[size], *peer) as running:
            steps = workers.calibrate(running, values.seconds)
            peaks = {name: worker.peak_mib for name, worker in running.items()}  # before the floor's operands exist
            answers, floors = {name: [] for name in running}, {name: [] for name in ours}
            for _ in tables.rounds(size, values.rounds):
                for name, worker in running.items():
                    worker.ask("train", steps=1)  # the caches are cold after another contender's block
                    answers[name].append(worker.ask("train", steps=steps))
                    if name in ours:
                        floors[name].append(worker.ask("floor")["seconds"])
        seconds = {name: [answer["seconds"] / steps for answer in replies] for name, replies in answers.items()}
        print(tables.line(f"{size}, a step", seconds), flush=True)
        for name in seconds:
            row = _speed(size, name, seconds[name], figures) | _ratios(size, name, seconds, ours, theirs, figures)
            if name in ours:
                row |= _over_floor(size, name, seconds[name], floors[name], figures)
            figures[f"peak_mib_{_label(size, name)}"] = peaks[name]
            rows[f"{size}, {name}"] = row | {"peak memory, MiB": memory.cell(peaks[name])}
    tables.table("training", rows, caption=CAPTION if theirs else "medians")
    options.keep_cases(values, "train", cases)
    return 0


def _theirs(values) -> dict[str, dict]:
    """nanoGPT's contenders, as `workers.started` takes them."""
    autocast = {"": False, " autocast": True} if "bfloat16" in values.precisions else {"": False}
    compiled = {"": False, " compiled": True} if values.compiled else {"": False}
    return {
        f"nanoGPT{precision}{mode}": {"peer": True, "compiled": compiled[mode], "bfloat16": autocast[precision]}
        for precision in autocast
        for mode in compiled
    }


def _label(size: str, name: str) -> str:
    return f"{size}_{name.replace(' ', '_')}"


def _speed(size: str, name: str, times: list[float], figures: dict) -> dict[str, str]:
    """A contender's speed cells; adds their figures."""
    step, tokens = statistics.median(times), workers.SIZES[size]["batch_size"] * workers.SIZES[size]["context"]
    figures[f"step_ms_{_label(size, name)}"] = 1e3 * step
    figures[f"tokens_per_second_{_label(size, name)}"] = tokens / step
    return {"ms a step": f"{1e3 * step:.2f}", "tokens/s": f"{tokens / step:,.0f}"}


def _ratios(size: str, name: str, seconds: dict, ours: dict, theirs: dict, figures: dict) -> dict[str, str]:
    """A contender's ratios over the faster float32 nanoGPT, and in bfloat16 also over the faster autocast nanoGPT."""
    row, in_bfloat16 = {}, "autocast" in name or "bfloat16" in name
    for column, autocast, suffix in (("× float32", False, ""), ("× autocast", True, "_over_autocast")):
        peers = [peer for peer, options in theirs.items() if options["bfloat16"] == autocast]
        if not peers:
            continue
        row[column] = ""
        if in_bfloat16 or not autocast:
            ratio = tables.ratio(seconds, min(peers, key=lambda peer: statistics.median(seconds[peer])), name)
            row[column] = f"{ratio:.2f}"
            if name in ours:
                figures[f"ratio_{size}_{ours[name]['precision']}{suffix}"] = ratio
    return row


def _over_floor(size: str, name: str, times: list[float], floors: list[float], figures: dict) -> dict[str, str]:
    """The cell of a step's time over that of its matrix products; adds its figures."""
    over = statistics.median(step / floor for step, floor in zip(times, floors))
    figures[f"floor_ms_{_label(size, name)}"] = 1e3 * statistics.median(floors)
    figures[f"step_over_floor_{_label(size, name)}"] = over
    return {"× floor": f"{over:.2f}"}
