"""Attention, forward and forward with backward: time and peak memory, against every peer that is installed.

python -m attnlab.bench attention [--lengths=1024,4096] [--masks=causal,window,documents] [--plot=attention.png]

Peers: jax.nn, and torch (SDPA, FlexAttention), tokamax and attnax where they are installed:
pip install torch tokamax attnax
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from attnlab import commands
from attnlab.bench import memory, options, peers, timing
from attnlab.errors import UserError

MASKS = ("causal", "window", "documents")


def define(values, argv) -> None:
    """The flags."""
    flags.DEFINE_list("lengths", ["256", "1024", "4096"], "sequence lengths to race over", flag_values=values)
    flags.DEFINE_list("masks", list(MASKS), "of " + ", ".join(MASKS), flag_values=values)
    flags.DEFINE_list("peers", None, "contenders, all that are installed when left out", flag_values=values)
    flags.DEFINE_integer("rounds", 5, "counted calls of each contender", flag_values=values)
    flags.DEFINE_integer("batch", 1, "sequences", flag_values=values)
    flags.DEFINE_integer("heads", 8, "heads", flag_values=values)
    flags.DEFINE_integer("head_dim", 64, "features a head", flag_values=values)
    flags.DEFINE_integer("window", 256, "keys before a query, for the window", flag_values=values)
    flags.DEFINE_integer("documents", 16, "documents in a row, of equal lengths", flag_values=values)
    flags.DEFINE_string("plot", None, "a new file for the picture, e.g. attention.png", flag_values=values)
    options.define_json(values)


def main(values) -> int:
    """Races and prints the table."""
    lengths = _checked(values)
    rows, peaks = {}, {}
    for mask in values.masks:
        for length in lengths:
            task = _task(values, mask, length)
            entered = _agreeing(values.peers or peers.installed(), task, f"{mask}, T = {length:,}")
            for what in ("forward", "backward"):
                label = f"{mask}, T = {length:,}, {'forward' if what == 'forward' else 'forward + backward'}"
                calls = {name: getattr(c, what) for name, c in entered.items() if getattr(c, what)}
                rows[label] = timing.alternate(calls, values.rounds)
                peaks[label] = {name: memory.peak(call) for name, call in calls.items()}
                print(timing.line(label, rows[label]), flush=True)
    shape = f"float32, B = {values.batch}, H = {values.heads}, D = {values.head_dim}"
    title = f"attention, {shape}, {jax.devices()[0].device_kind}"
    reference = "jax.nn" if not values.peers or "jax.nn" in values.peers else values.peers[0]
    timing.report(title, rows, reference)
    cells = {label: {name: timing.mib(peak) for name, peak in row.items()} for label, row in peaks.items()}
    timing.table("peak memory, MiB", cells)
    medians = {row: {name: statistics.median(s) for name, s in seconds.items()} for row, seconds in rows.items()}
    options.keep(values.json, {"title": title, "seconds": medians, "peak_mib": peaks})
    if values.plot:
        _plot(values.plot, title, values.masks, lengths, rows, peaks)
    return 0


def _checked(values) -> list[int]:
    try:
        lengths = [int(length) for length in values.lengths]
    except ValueError as error:
        raise UserError(f"--lengths={','.join(values.lengths)}: expected whole numbers, e.g. 256,1024") from error
    options.check_positive(values, "rounds", "batch", "heads", "head_dim", "window", "documents")
    if min(lengths, default=0) < 1:
        raise UserError(f"--lengths={','.join(values.lengths)}: expected lengths of 1 or more")
    options.check_known("masks", values.masks, MASKS)
    if values.peers:
        options.check_known("peers", values.peers, peers.PEERS)
    missing = [name for name in values.peers or [] if name not in peers.installed()]
    if missing:
        raise UserError(f"--peers: {missing[0]} is not installed: pip install {peers.PEERS[missing[0]][0]}")
    options.check_new(values, "plot", "json")
    if values.plot:
        _pyplot()
    return lengths


def _task(values, mask, length) -> peers.Task:
    shape = (values.batch, length, values.heads, values.head_dim)
    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, *shape))
    ids = jnp.broadcast_to(jnp.arange(length) * values.documents // length, (values.batch, length))
    return peers.Task(mask, q, k, v, d_out, values.window, ids.astype(jnp.int32))


def _agreeing(names, task, label):
    """Those that compute what was asked: a race against a wrong answer says nothing."""
    expected, agreeing = None, {}
    for name in names:
        try:
            contender = peers.enter(name, task)
            out = peers.output(contender)
        except Exception as error:
            if name.startswith("attnlab"):
                raise
            print(f"{name} is left out of {label}: {commands.one_line(error)}")  # whatever a peer fails with
            continue
        expected = out if expected is None else expected
        off = np.abs(out - expected).max()
        if off < 1e-4:
            agreeing[name] = contender
        else:
            print(f"{name} is left out of {label}: its output is off by {off:.1e}")
    return agreeing


def _pyplot():
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError('--plot needs matplotlib: pip install "attnlab[plots]"') from error
    return plt


def _plot(path, title, masks, lengths, rows, peaks):
    """Time and memory of forward + backward over the lengths, one column a mask."""
    plt = _pyplot()
    plt.switch_backend("agg")
    figure, axes = plt.subplots(2, len(masks), figsize=(4 * len(masks), 7), sharex=True, sharey="row", squeeze=False)
    for column, mask in zip(axes.T, masks):
        labels = [f"{mask}, T = {length:,}, forward + backward" for length in lengths]
        names = dict.fromkeys(name for label in labels for name in rows[label])
        for name in names:
            seconds = [statistics.median(rows[label][name]) if name in rows[label] else None for label in labels]
            mib = [peaks[label].get(name) for label in labels]
            style = {"marker": "o", "linewidth": 2.5 if name == "attnlab" else 1.2}
            column[0].plot(lengths, [float("nan") if s is None else 1e3 * s for s in seconds], label=name, **style)
            column[1].plot(lengths, [float("nan") if m is None else max(m, 0.1) for m in mib], label=name, **style)
        column[0].set_title(mask)
        column[1].set_xlabel("length T")
        for axis in column:
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("milliseconds")
    axes[1, 0].set_ylabel("peak memory, MiB")
    axes[0, 0].legend()
    figure.suptitle(f"forward + backward: {title}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"drawn: {path}")
