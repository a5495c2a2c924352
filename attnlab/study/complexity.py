"""The four layers cost n²·d, n·d², k·n·d² and r·n·d, as printed; and the restricted one's time is linear in n.

Vaswani et al. 2017, table 1: attention, recurrent (GRU), convolutional and restricted attention, and beside them what
the table leaves out: attention with its projections, and linear attention.

FLOPs are those that XLA counts in the compiled program. It counts the body of a loop once, so the GRU's step is
multiplied by its trips; linear attention is a chunk times the chunks, and restricted attention a compiled tile times
the tiles that the mask lets be visited. Sequential steps are the trips of the longest loop of a layer written out at
once. The path is counted in layers until the last token depends on the first, from how far the derivative of one layer
reaches (for the GRU in its steps); log_k(n) holds for convolutions whose dilation grows by k from layer to layer, and
for no others. Memory is that of a compiled program's temporaries.
"""

import math
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attnlab import LinearState, attention, linear_attention, plots
from attnlab.bench import timing
from attnlab.masks import SlidingWindow
from attnlab.nn import GRU, CausalConv, MultiHeadAttention
from attnlab.study.report import Options, Verdict

LENGTHS = (256, 512, 1024, 2048, 4096)
WIDTHS = (64, 128, 256, 512)
PRINTED = {
    "self-attention": "n²·d",
    "recurrent (GRU)": "n·d²",
    "convolutional": "k·n·d²",
    "restricted attention": "r·n·d",
}
# The powers of n, d and, where there is one, k or r.
EXPONENTS = {
    "self-attention": (2, 1),
    "recurrent (GRU)": (1, 2),
    "convolutional": (1, 2, 1),
    "restricted attention": (1, 1, 1),
}
SEQUENTIAL = {"self-attention": "1", "recurrent (GRU)": "n", "convolutional": "1", "restricted attention": "1"}
PATH = {"self-attention": "1", "recurrent (GRU)": "n", "convolutional": "log_k(n)", "restricted attention": "n/r"}


def measure(options: Options) -> list[dict]:
    """A row for each layer and size: FLOPs, sequential steps, path; and others with the milliseconds of a call."""
    return [*_costs(), *_times(options)]


# --------------------------------------------------------------------------------------------------------------- costs


def _costs() -> list[dict]:
    rows = []

    def add(layer, n, d, flops, steps=None, path=None, size=None, program=None):
        row = {"layer": layer, "n": n, "d": d, "k or r": size, "flops": flops, "sequential steps": steps, "path": path}
        rows.append(row | {"temporaries": program and program.memory_analysis().temp_size_in_bytes})

    for n, d in _sizes():
        program = compiled_for(dense, *qkv(n, d))
        path = layers_for(n, reach(dense_of, n))
        add("self-attention", n, d, count_flops(program), count_trips(program), path, program=program)
        add("self-attention by tiles", n, d, None, program=compiled_for(_tiled, *qkv(n, d)))

    for d in WIDTHS:
        step = count_flops(gru_step(d))
        for n in LENGTHS:
            if (n, d) in _sizes():
                trips = count_trips(compiled_for(*layer_call(GRU(), n, d)))
                add("recurrent (GRU)", n, d, step * trips, trips, trips)

    for n, d, k in [*((n, d, 3) for n, d in _sizes()), *((LENGTHS[0], WIDTHS[0], k) for k in (5, 9, 17))]:
        program = compiled_for(*layer_call(CausalConv(kernel_size=k), n, d))
        add("convolutional", n, d, count_flops(program), count_trips(program), conv_path(n, k), k)

    # Windows of sixteen tiles, much shorter than the text: else its ragged ends are what is measured.
    for n, d, r in [*((n, d, 32) for n, d in _sizes()), *((2**16, WIDTHS[0], r) for r in (512, 1024, 2048, 4096))]:
        flops = _tile_flops(r // 16, d) * _tiles(n, r, r // 16)
        # Written out at once, as for the other layers; the tiles' own loops are a matter of memory.
        steps = count_trips(compiled_for(_windowed(r, "dense"), *qkv(n, d))) if n <= LENGTHS[1] else None
        seen = reach(lambda x, r=r: _windowed(r, "dense")(x, x, x), r + 1)
        add("restricted attention", n, d, flops, steps, layers_for(n, seen), r)

    for n, d in _sizes():
        program = compiled_for(*layer_call(MultiHeadAttention(num_heads=1, impl="dense"), n, d))
        add("self-attention with projections", n, d, count_flops(program))
        add("linear attention", n, d, _linear_flops(n, d))
    return rows


def _sizes():
    """The lengths at the smallest width, and the widths at the smallest length."""
    return [*((n, WIDTHS[0]) for n in LENGTHS), *((LENGTHS[0], d) for d in WIDTHS[1:])]


def qkv(n, d):
    """Queries, keys and values of one head, each `[n, 1, d]`."""
    return (jnp.zeros((n, 1, d)),) * 3


def dense(q, k, v):
    """Attention written out, O(n²)."""
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
    """A layer as a function of its input alone, and an input `[1, n, d]`."""
    x = jnp.zeros((1, n, d))
    params = module.init(jax.random.key(0), x)
    return lambda x: module.apply(params, x), x


def gru_step(d):
    """The program for one token after others: from a state of zeros XLA would leave half of the products out."""
    x, gru = jnp.zeros((1, 1, d)), GRU()
    params = gru.init(jax.random.key(0), x)
    return compiled_for(lambda x, state: gru.apply(params, x, cache=state), x, x[0])


def compiled_for(function, *args):
    """The program that XLA makes for arguments like these."""
    return jax.jit(function).lower(*args).compile()


def count_flops(compiled) -> float:
    """What XLA counts in a compiled program; the body of a loop once."""
    return compiled.cost_analysis()["flops"]


def count_trips(compiled) -> int:
    """How many steps follow one another: the trips of the longest loop."""
    return max((int(n) for n in re.findall(r'known_trip_count":?\{"n":"(\d+)"', compiled.as_text())), default=1)


def _tile_flops(tile, d) -> float:
    return count_flops(compiled_for(dense, *qkv(tile, d)))


def _tiles(n, r, tile) -> int:
    """Tiles of the mask in which anything is visible."""
    some, _ = SlidingWindow(left=r - 1).tiles(n, n, (tile, tile))
    return int(np.sum(some))


def _linear_flops(n, d, chunk=64) -> float:
    """One chunk's, from one state to the next, times the chunks."""
    state = LinearState(jnp.zeros((1, d, d)), jnp.zeros((1, d)))

    def step(q, k, v, state):
        return linear_attention(q, k, v, impl="naive", state=state, return_state=True)

    return count_flops(compiled_for(step, *qkv(chunk, d), state)) * (n // chunk)


def reach(function, length) -> int:
    """How many tokens the last one sees, itself included, by the derivative; of `x` `[length, 1, 1]`."""
    x = jax.random.normal(jax.random.key(0), (length, 1, 1))
    seen = jax.jit(jax.grad(lambda x: function(x)[-1].sum()))(x)[:, 0, 0] != 0
    return length - int(seen.argmax())


def layers_for(n, seen) -> int:
    """Layers until the last of n tokens sees the first, each of which sees so many."""
    return max(math.ceil((n - 1) / (seen - 1)), 1)


def conv_reach(k, dilation=1) -> int:
    """`reach` of a convolution."""
    conv = CausalConv(kernel_size=k, dilation=dilation)
    params = conv.init(jax.random.key(0), jnp.ones((1, 1, 1)))
    return reach(lambda x: conv.apply(params, x[None, :, 0])[0], (k - 1) * dilation + 2)


def conv_path(n, k) -> int:
    """Layers until the last of n tokens sees the first, where the dilation is 1, k, k², …

    >>> conv_path(81, k=3)
    4
    """
    seen, layers = 1, 0
    while seen < n:
        seen += conv_reach(k, k**layers) - 1
        layers += 1
    return layers


# --------------------------------------------------------------------------------------------------------------- times


def _times(options) -> list[dict]:
    """Milliseconds forward, the layers and lengths taking turns; d = 64, k = 3, r = 256."""
    lengths, rounds = ((*LENGTHS, 16384), 5) if options.fast else ((*LENGTHS, 8192, 16384), 15)
    d, r = WIDTHS[0], 256
    rows = []
    for n in lengths:
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
    """For each layer the powers of n, d and (k or r) by least squares on the logarithms."""
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
    """Each fitted power within 5 % of the printed one, steps and paths as printed, the restricted time linear."""
    fitted = exponents(rows)
    parts = []
    for layer, expected in EXPONENTS.items():
        names = ("n", "d", "k" if layer == "convolutional" else "r")
        shown = " · ".join(f"{name}^{power:.2f}" for name, power in zip(names, fitted[layer]))
        right = all(abs(power / e - 1) <= 0.05 for power, e in zip(fitted[layer], expected))
        parts.append((right, f"{layer}: printed {PRINTED[layer]}, measured {shown} FLOPs"))
    for layer in EXPONENTS:
        there = [row for row in rows if row["layer"] == layer and row.get("flops")]
        steps = all(row["sequential steps"] in (None, row["n"] if SEQUENTIAL[layer] == "n" else 1) for row in there)
        printed = [_path(layer, row["n"], row["k or r"]) for row in there]
        path = all(abs(row["path"] - p) <= 1 + 0.05 * p for row, p in zip(there, printed))
        text = f"{layer}: {SEQUENTIAL[layer]} sequential steps, a path of {PATH[layer]} (within 5 % and a layer)"
        parts.append((steps and path, text))
    power = fitted["self-attention with projections"][0]
    parts.append((power < 1.9, f"with its projections, which the table leaves out, attention grows as n^{power:.2f}"))
    memory = {layer: powers[0] for layer, powers in exponents(rows, "temporaries").items()}
    text = f"attention written out takes memory as n^{memory['self-attention']:.2f}, by tiles"
    text += f" as n^{memory['self-attention by tiles']:.2f}"
    parts.append((memory["self-attention"] > 1.9 and memory["self-attention by tiles"] < 1.2, text))
    clock = exponents([row for row in rows if row["n"] >= 1024], "milliseconds")
    for layer in ("restricted attention", "linear attention"):
        parts.append((clock[layer][0] < 1.2, f"{layer}: its time grows as n^{clock[layer][0]:.2f} from n = 1,024"))
    return Verdict.of(*parts)


def _path(layer, n, size):
    return {"1": 1, "n": n, "log_k(n)": math.log(n, size or 2), "n/r": n / (size or 1)}[PATH[layer]]


def draw(rows: list[dict]) -> Figure:
    """FLOPs, path and time over the length, at d = 64."""

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
    finding = "Attention's cost grows with n², that of all others with n; for attention alone the path is 1"
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
