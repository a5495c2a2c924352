"""Layers cost what Vaswani et al. 2017 say: n²·d, n·d², k·n·d² and r·n·d; restricted attention's time is linear in n.

The rows of Vaswani et al. 2017, table 1 (self-attention, recurrent (GRU), convolutional and restricted attention), and
two that the table leaves out: attention with its projections, and linear attention.

FLOPs are XLA's count for the compiled program. XLA counts a loop body once, so the GRU's step is multiplied by its trip
count, linear attention is one chunk times the number of chunks, and restricted attention is one compiled tile times the
number of tiles with a visible pair. Sequential steps are the trip count of a layer's longest loop, without tiling. The
path length is the number of layers until the last token depends on the first, derived from the reach of one layer's
gradient (for the GRU, its steps); log_k(n) holds only for convolutions whose dilation grows by k from layer to layer.
Memory is the size of the compiled program's temporaries.
"""

import functools
import math
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attnlab import LinearState, attention, linear_attention, plots
from attnlab.masks import SlidingWindow
from attnlab.nn import GRU, CausalConv, MultiHeadAttention
from attnlab.study.report import Options, Verdict
from attnlab.support import timing

LENGTHS = (256, 512, 1024, 2048, 4096)
WIDTHS = (64, 128, 256, 512)
PRINTED = {
    "self-attention": "n²·d",
    "recurrent (GRU)": "n·d²",
    "convolutional": "k·n·d²",
    "restricted attention": "r·n·d",
}
# Powers of n, d and, where present, k or r.
EXPONENTS = {
    "self-attention": (2, 1),
    "recurrent (GRU)": (1, 2),
    "convolutional": (1, 2, 1),
    "restricted attention": (1, 1, 1),
}
SEQUENTIAL = {"self-attention": "1", "recurrent (GRU)": "n", "convolutional": "1", "restricted attention": "1"}
PATH = {"self-attention": "1", "recurrent (GRU)": "n", "convolutional": "log_k(n)", "restricted attention": "n/r"}


def measure(options: Options) -> list[dict]:
    """One row per layer and size: FLOPs, sequential steps and path; then rows with the milliseconds of a call."""
    costs = _costs()
    lengths, rounds = ((*LENGTHS, 16384), 3) if options.fast else ((*LENGTHS, 8192, 16384), 15)
    advance = options.progress(len(costs) + sum(_timing_units(n, rounds) for n in lengths))
    rows = []
    for cost, *size in costs:
        rows.append(cost(*size))
        advance()
    for n in lengths:
        rows += _times(n, rounds)
        advance(_timing_units(n, rounds))
    return rows


# --------------------------------------------------------------------------------------------------------------- costs


def _costs() -> list[tuple]:
    """The measurements in order: a function that returns a row, and the sizes to call it with."""
    convolutions = [*((n, d, 3) for n, d in _sizes()), *((LENGTHS[0], WIDTHS[0], k) for k in (5, 9, 17))]
    # Windows of sixteen tiles, much shorter than the sequence: otherwise partial tiles dominate the count.
    windows = [*((n, d, 32) for n, d in _sizes()), *((2**16, WIDTHS[0], r) for r in (512, 1024, 2048, 4096))]
    return [
        *((cost, n, d) for n, d in _sizes() for cost in (_attention, _attention_by_tiles)),
        *((_recurrent, n, d) for n, d in _sizes()),
        *((_convolutional, *size) for size in convolutions),
        *((_restricted, *size) for size in windows),
        *((cost, n, d) for n, d in _sizes() for cost in (_attention_with_projections, _linear)),
    ]


def _row(layer, n, d, flops, steps=None, path=None, size=None, program=None) -> dict:
    row = {"layer": layer, "n": n, "d": d, "k or r": size, "flops": flops, "sequential steps": steps, "path": path}
    return row | {"temporaries": program and program.memory_analysis().temp_size_in_bytes}


def _attention(n, d):
    program = compiled_for(dense, *qkv(n, d))
    path = layers_for(n, reach(dense_of, n))
    return _row("self-attention", n, d, count_flops(program), count_trips(program), path, program=program)


def _attention_by_tiles(n, d):
    return _row("self-attention by tiles", n, d, None, program=compiled_for(_tiled, *qkv(n, d)))


def _recurrent(n, d):
    trips = count_trips(compiled_for(*layer_call(GRU(), n, d)))
    return _row("recurrent (GRU)", n, d, count_flops(gru_step(d)) * trips, trips, trips)


def _convolutional(n, d, k):
    program = compiled_for(*layer_call(CausalConv(kernel_size=k), n, d))
    return _row("convolutional", n, d, count_flops(program), count_trips(program), conv_path(n, k), k)


def _restricted(n, d, r):
    flops = _tile_flops(r // 16, d) * _tiles(n, r, r // 16)
    # Count the steps of the dense form, as for the other layers: loops over tiles only save memory.
    steps = count_trips(compiled_for(_windowed(r, "dense"), *qkv(n, d))) if n <= LENGTHS[1] else None
    visible = reach(lambda x: _windowed(r, "dense")(x, x, x), r + 1)
    return _row("restricted attention", n, d, flops, steps, layers_for(n, visible), r)


def _attention_with_projections(n, d):
    program = compiled_for(*layer_call(MultiHeadAttention(num_heads=1, impl="dense"), n, d))
    return _row("self-attention with projections", n, d, count_flops(program))


def _linear(n, d):
    return _row("linear attention", n, d, _linear_flops(n, d))


def _sizes():
    """All lengths at the smallest width, and all widths at the smallest length."""
    return [*((n, WIDTHS[0]) for n in LENGTHS), *((LENGTHS[0], d) for d in WIDTHS[1:])]


def qkv(n, d):
    """Queries, keys and values of one head, each `[n, 1, d]`."""
    return (jnp.zeros((n, 1, d)),) * 3


def dense(q, k, v):
    """Dense attention, O(n²)."""
    return attention(q, k, v, impl="dense")


def dense_of(x):
    """Self-attention of `x` `[n, 1, d]`, without projections."""
    return dense(x, x, x)


def _tiled(q, k, v):
    return attention(q, k, v, impl="blockwise")


def _windowed(r, impl):
    mask = SlidingWindow(left=r - 1)
    return lambda q, k, v: attention(q, k, v, mask=mask, impl=impl)


def layer_call(module, n, d):
    """A layer as a function of its input only, and an input `[1, n, d]`."""
    x = jnp.zeros((1, n, d))
    params = jax.jit(module.init)(jax.random.key(0), x)
    return lambda x: module.apply(params, x), x


@functools.cache
def gru_step(d):
    """The compiled program of one step. Its state is an argument: for constant zeros XLA drops half of the products."""
    x, gru = jnp.zeros((1, 1, d)), GRU()
    params = gru.init(jax.random.key(0), x)
    return compiled_for(lambda x, cache: gru.apply(params, x, cache=cache), x, gru.init_cache(1, d))


def compiled_for(function, *args):
    """`function` compiled for arguments like these."""
    return jax.jit(function).lower(*args).compile()


def count_flops(compiled) -> float:
    """XLA's FLOP count of a compiled program; XLA counts a loop body once."""
    return compiled.cost_analysis()["flops"]


def count_trips(compiled) -> int:
    """Trip count of the longest loop, 1 without loops."""
    return max((int(n) for n in re.findall(r'known_trip_count":?\{"n":"(\d+)"', compiled.as_text())), default=1)


def _tile_flops(tile, d) -> float:
    return count_flops(compiled_for(dense, *qkv(tile, d)))


def _tiles(n, r, tile) -> int:
    """Number of tiles with at least one visible pair."""
    some, _ = SlidingWindow(left=r - 1).tiles(n, n, (tile, tile))
    return int(np.sum(some))


def _linear_flops(n, d, chunk=64) -> float:
    """FLOPs of one chunk, from one state to the next, times the number of chunks."""
    state = LinearState(jnp.zeros((1, d, d)), jnp.zeros((1, d)))

    def step(q, k, v, state):
        return linear_attention(q, k, v, impl="naive", state=state, return_state=True)

    return count_flops(compiled_for(step, *qkv(chunk, d), state)) * (n // chunk)


def reach(function, length) -> int:
    """Number of tokens that the last output depends on, itself included, from its gradient; `x` is `[length, 1, 1]`."""
    x = jax.random.normal(jax.random.key(0), (length, 1, 1))
    reached = jax.jit(jax.grad(lambda x: function(x)[-1].sum()))(x)[:, 0, 0] != 0
    return length - int(reached.argmax())


def layers_for(n, visible) -> int:
    """Layers until the last of n tokens depends on the first, if one layer reaches `visible` tokens."""
    return max(math.ceil((n - 1) / (visible - 1)), 1)


def conv_reach(k, dilation=1) -> int:
    """The `reach` of a convolution."""
    conv = CausalConv(kernel_size=k, dilation=dilation)
    params = jax.jit(conv.init)(jax.random.key(0), jnp.ones((1, 1, 1)))
    return reach(lambda x: conv.apply(params, x[None, :, 0])[0], (k - 1) * dilation + 2)


def conv_path(n, k) -> int:
    """Layers until the last of n tokens depends on the first, with dilations 1, k, k², …"""
    reached, layers = 1, 0
    while reached < n:
        reached += conv_reach(k, k**layers) - 1
        layers += 1
    return layers


# --------------------------------------------------------------------------------------------------------------- times


def _timing_units(n, rounds) -> float:
    """Rough duration of `_times`, in units of one row of `_costs`."""
    return n * rounds / 2**14


def _times(n, rounds) -> list[dict]:
    """Forward milliseconds of the layers, measured in alternation; d = 64, k = 3, r = 256."""
    d, r = WIDTHS[0], 256
    q = jax.random.normal(jax.random.key(0), (n, 1, d))
    x = jax.random.normal(jax.random.key(1), (1, n, d))
    contenders = {
        "restricted attention": (_windowed(r, "blockwise"), q, q, q),
        "linear attention": (linear_attention, q, q, q),
        "convolutional": (layer_call(CausalConv(), n, d)[0], x),
        "recurrent (GRU)": (layer_call(GRU(), n, d)[0], x),
    }
    if n <= LENGTHS[-1]:
        contenders["self-attention"] = (dense, q, q, q)
    calls = {name: _call(*what) for name, what in contenders.items()}
    rows = []
    for name, seconds in timing.alternate(calls, rounds).items():
        size = {"restricted attention": r, "convolutional": 3}.get(name)
        time = 1e3 * statistics.median(seconds)
        rows.append({"layer": name, "n": n, "d": d, "k or r": size, "milliseconds": time})
    return rows


def _call(function, *args):
    program = compiled_for(function, *args)
    return lambda: program(*args)


# ------------------------------------------------------------------------------------------------------------- verdict


def exponents(rows: list[dict], value: str = "flops") -> dict[str, tuple[float, ...]]:
    """For each layer, the powers of n, d and (k or r), fitted by least squares on the logarithms."""
    fitted = {}
    for layer in dict.fromkeys(row["layer"] for row in rows if row.get(value)):
        points = [row for row in rows if row["layer"] == layer and row.get(value)]
        factors = [[row["n"], row["d"], row["k or r"] or 1] for row in points]
        varying = [column for column in zip(*factors) if len(set(column)) > 1]
        design = np.log(np.array(varying, float)).T
        design = np.concatenate([design, np.ones((len(points), 1))], axis=1)
        powers, *_ = np.linalg.lstsq(design, np.log([row[value] for row in points]), rcond=None)
        fitted[layer] = tuple(float(p) for p in powers[:-1])
    return fitted


def judge(rows: list[dict]) -> Verdict:
    """Held if powers are within 5 % of the printed powers, steps and paths are as printed, and time is linear."""
    fitted = exponents(rows)
    parts = []
    for layer, expected in EXPONENTS.items():
        names = ("n", "d", "k" if layer == "convolutional" else "r")
        shown = " · ".join(f"{name}^{power:.2f}" for name, power in zip(names, fitted[layer]))
        right = all(abs(power / e - 1) <= 0.05 for power, e in zip(fitted[layer], expected))
        parts.append((right, f"{layer}: printed {PRINTED[layer]}, measured {shown} FLOPs"))
    for layer in EXPONENTS:
        chosen = [row for row in rows if row["layer"] == layer and row.get("flops")]
        steps = all(row["sequential steps"] in (None, row["n"] if SEQUENTIAL[layer] == "n" else 1) for row in chosen)
        printed = [_path(layer, row["n"], row["k or r"]) for row in chosen]
        path = all(abs(row["path"] - p) <= 1 + 0.05 * p for row, p in zip(chosen, printed))
        text = f"{layer}: {SEQUENTIAL[layer]} sequential steps, path length {PATH[layer]} (within 5 % and one layer)"
        parts.append((steps and path, text))
    power = fitted["self-attention with projections"][0]
    parts.append((power < 1.9, f"with its projections, which the table leaves out, attention costs n^{power:.2f}"))
    memory = {layer: powers[0] for layer, powers in exponents(rows, "temporaries").items()}
    text = f"memory of dense attention grows as n^{memory['self-attention']:.2f}, by tiles"
    text += f" as n^{memory['self-attention by tiles']:.2f}"
    parts.append((memory["self-attention"] > 1.9 and memory["self-attention by tiles"] < 1.2, text))
    clock = exponents([row for row in rows if row["n"] >= 1024], "milliseconds")
    for layer in ("restricted attention", "linear attention"):
        parts.append((clock[layer][0] < 1.2, f"{layer}: time grows as n^{clock[layer][0]:.2f} from n = 1,024"))
    return Verdict.of(*parts)


def _path(layer, n, size):
    return {"1": 1, "n": n, "log_k(n)": math.log(n, size or 2), "n/r": n / (size or 1)}[PATH[layer]]


def draw(rows: list[dict]) -> Figure:
    """FLOPs, path and time against length, at d = 64, on logarithmic axes.

    On these axes a power of n is a straight line with the power as its slope: n² is twice as steep as n.
    """

    def over_length(value):
        series = {}
        for layer in dict.fromkeys(row["layer"] for row in rows if row.get(value)):
            chosen = {
                row["n"]: row[value]
                for row in rows
                if row["layer"] == layer
                and row.get(value)
                and row["d"] == WIDTHS[0]
                and row["n"] <= 2**14
                and row["k or r"] in (None, 3, 32, 256)
            }
            series[layer] = tuple(zip(*sorted(chosen.items())))
        return series

    n = "n, length (tokens)"
    path = {layer: points for layer, points in over_length("path").items() if layer in EXPONENTS}
    finding = "Attention's cost grows with n², all others' with n; only attention has a path length of 1"
    return plots.panels(
        {
            "cost": {"series": over_length("flops"), "x": n, "y": "FLOPs of a layer, d = 64", "log": "xy"},
            "longest path": {
                "series": path,
                "x": n,
                "y": "path from first to last (layers or steps)",
                "log": "xy",
            },
            "time": {"series": over_length("milliseconds"), "x": n, "y": "time forward (ms)", "log": "xy"},
        },
        judge(rows).title(finding),
        columns=3,
    )
