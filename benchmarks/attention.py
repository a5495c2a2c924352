"""Benchmark the attention operator, forward and forward + backward, against every installed peer: time, peak memory.

    python -m attnlab.bench attention [--lengths=1024,4096] [--masks=causal,window,documents] [--dtype=bfloat16]

Contenders alternate in this process. attnlab always takes part, and times are also shown as multiples of its time.
The peers are jax.nn and, if they are installed (pip install torch tokamax attnax), torch's SDPA and FlexAttention,
tokamax and attnax; --peers selects some. All compute in the inputs' type, --dtype. A contender whose output differs
from attnlab's is left out, with a message.

Figures, by benchmark and contender: seconds (medians), ratio (a contender's time over attnlab's, median over rounds)
and peak_mib.
"""

import itertools
import statistics

import jax
import numpy as np
from absl import flags

from attnlab import commands
from attnlab.support import timing
from attnlab.support.errors import UserError

from .harness import memory, options, peers, recording, tables

MASKS = ("causal", "window", "documents")
DTYPES = ("float32", "bfloat16")
PASSES = {"forward": "forward", "backward": "forward + backward"}
COUNTS = {
    "rounds": (5, "timed calls of each contender"),
    "batch": (1, "batch size"),
    "heads": (8, "heads"),
    "head_dim": (64, "features per head"),
    "window": (256, "keys before each query that the window mask keeps visible"),
    "documents": (16, "documents packed in a sequence, all of the same length, for the documents mask"),
}


def define(values, argv) -> None:
    """Define the flags."""
    flags.DEFINE_enum("dtype", "float32", DTYPES, "type of the inputs", flag_values=values)
    flags.DEFINE_list("lengths", ["256", "1024", "4096"], "sequence lengths", flag_values=values)
    options.define_choices(values, "masks", MASKS, "masks")
    known = ", ".join(name for name in peers.PEERS if name != "attnlab")
    meaning = f"contenders beside attnlab: any of {known}; by default all that are installed"
    flags.DEFINE_list("peers", None, meaning, flag_values=values)
    options.define_common(values, COUNTS)


def main(values) -> int:
    """Benchmark, and print the tables."""
    lengths = _checked(values)
    names = ["attnlab", *(name for name in values.peers or peers.installed() if name != "attnlab")]
    rows, peaks = {}, {}
    cases = list(itertools.product(values.masks, lengths))
    for number, (mask, length) in enumerate(cases, 1):
        task = _task(values, mask, length)
        entered = _agreeing(names, task, f"{mask}, T = {length:,}")
        for which in PASSES:
            label = _label(mask, length, which)
            calls = {name: getattr(c, which) for name, c in entered.items() if getattr(c, which)}
            rows[label] = timing.alternate(calls, values.rounds)
            peaks[label] = {name: memory.peak(call) for name, call in calls.items()}
            print(f"[{number}/{len(cases)}] {tables.line(label, rows[label])}", flush=True)
    shape = f"{values.dtype}, B = {values.batch}, H = {values.heads}, D = {values.head_dim}"
    title = f"attention, {shape}, {jax.devices()[0].device_kind}"
    tables.report(title, rows, "attnlab")
    cells = {label: {name: memory.cell(peak) for name, peak in row.items()} for label, row in peaks.items()}
    tables.table("peak memory, MiB", cells)
    medians = {row: {name: statistics.median(s) for name, s in seconds.items()} for row, seconds in rows.items()}
    ratios = {row: {name: tables.ratio(s, name, "attnlab") for name in s} for row, s in rows.items()}
    figures = {"seconds": medians, "ratio": ratios, "peak_mib": peaks}
    options.keep(values.json, {"title": title} | figures)
    sizes = {"window": f"window of {values.window}, ", "documents": f"{values.documents} documents, "}
    case = {label: f"{label}, {sizes.get(label.partition(',')[0], '')}{shape}" for label in rows}
    recording.add(values, "attention", {case[row]: {name: f[row] for name, f in figures.items()} for row in rows})
    return 0


def _checked(values) -> list[int]:
    lengths = options.whole_numbers(values, "lengths")
    options.check_common(values, COUNTS)
    options.check_known("masks", values.masks, MASKS)
    if values.peers is not None:
        options.check_known("peers", values.peers, peers.PEERS)
    missing = [name for name in values.peers or [] if name not in peers.installed()]
    if missing:
        raise UserError(f"--peers: {missing[0]} is not installed: pip install {peers.PEERS[missing[0]][0]}")
    return lengths


def _label(mask, length, which) -> str:
    return f"{mask}, T = {length:,}, {PASSES[which]}"


def _task(values, mask, length) -> peers.Task:
    shape = (values.batch, length, values.heads, values.head_dim)
    arrays = jax.random.normal(jax.random.key(0), (4, *shape)).astype(values.dtype)
    return peers.task(mask, arrays, values.window, values.documents)


def _agreeing(names, task, label) -> dict[str, peers.Contender]:
    """The contenders with the same output as the first, attnlab; prints why others are left out."""
    expected, agreeing = None, {}
    for name in names:
        try:
            contender = peers.enter(name, task)
            out = peers.output(contender)
        except Exception as error:  # peers fail in their own ways
            if name.startswith("attnlab"):
                raise
            print(f"{name} is left out of {label}: {commands.one_line(error)}")
            continue
        expected = out if expected is None else expected
        difference, allowed = _difference(out, expected, task.q.dtype)
        if difference < allowed:
            agreeing[name] = contender
        else:
            print(f"{name} is left out of {label}: its output differs by {difference:.1e}")
    return agreeing


def _difference(out: np.ndarray, expected: np.ndarray, dtype) -> tuple[float, float]:
    """(The difference of two outputs, the allowed difference)."""
    if dtype == np.float32:
        return float(np.abs(out - expected).max()), 1e-4
    # A value is rounded to 8 bits at most four times (q·scale, scores, probabilities, output), each with a relative
    # error of at most u = 2⁻⁸; scores are of order 1, so nothing amplifies the errors. In two outputs they may have
    # opposite signs: 8u = 0.03 of the output's norm. One key too many among 257 gives 0.06.
    return peers.relative_error(out, expected), 8 * peers.UNIT["bfloat16"]
