"""Benchmark the linear recurrence against causal softmax attention, forward and forward + backward, by length.

    python -m attnlab.bench recurrence [--lengths=2048,4096,16384] [--members=gated_delta,gla]
        [--impls=chunked,parallel] [--chunks=16,32,64]

Members: plain (linear attention), mamba2 (a decay per head), gla (per feature), gated_delta, kda (per feature) and
general (separate e and r, as in RWKV-7). Contenders alternate; times are also shown as multiples of the softmax's.

Figures: seconds (medians) and us_a_token, by length, pass and contender.
"""

import functools
import itertools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import flags

import attnlab
from attnlab import masks
from attnlab.ops.recurrence import CHUNKS
from attnlab.support import timing

from .harness import options, recording, tables

# By member: its decay (per head or per feature) and its erasure.
MEMBERS = {
    "plain": (None, None),
    "mamba2": ("head", None),
    "gla": ("feature", None),
    "gated_delta": ("head", "beta"),
    "kda": ("feature", "beta"),
    "general": ("feature", "erase"),
}
COUNTS = {
    "rounds": (7, "timed calls of each contender"),
    "batch": (1, "batch size"),
    "heads": (8, "heads"),
    "head_dim": (64, "features per head, of keys and of values"),
}


def define(values, argv) -> None:
    """Define the flags."""
    flags.DEFINE_list("lengths", ["2048", "4096", "16384"], "sequence lengths", flag_values=values)
    flags.DEFINE_list("chunks", [], "tokens per chunk; by default chosen by the schedule", flag_values=values)
    flags.DEFINE_list("impls", ["chunked"], "schedules: chunked, parallel", flag_values=values)
    flags.DEFINE_integer("longest_softmax", 4096, "the longest sequence for the softmax", flag_values=values)
    options.define_choices(values, "members", MEMBERS, "members")
    options.define_common(values, COUNTS)


def main(values) -> int:
    """Benchmark, and print the tables."""
    lengths = options.whole_numbers(values, "lengths")
    chunks = options.whole_numbers(values, "chunks") if values.chunks else [None]
    options.check_known("members", values.members, MEMBERS)
    options.check_known("impls", values.impls, CHUNKS)
    options.check_common(values, COUNTS)
    rows, a_token = {}, {}
    for length in lengths:
        shape = (values.batch, length, values.heads, values.head_dim)
        functions = {}
        if length <= values.longest_softmax:
            functions["softmax"] = _softmax(shape)
        for member in values.members:
            for impl, chunk in itertools.product(values.impls, chunks):
                several = [impl] * (len(values.impls) > 1) + [str(chunk)] * (len(chunks) > 1)
                functions[", ".join([member, *several])] = _recurrence(shape, *MEMBERS[member], impl, chunk)
        for which, passes in {"forward": _forward, "forward + backward": _backward}.items():
            label = f"T = {length:,}, {which}"
            rows[label] = timing.alternate({name: passes(*f) for name, f in functions.items()}, values.rounds)
            tokens = values.batch * length
            a_token[label] = {name: 1e6 * statistics.median(s) / tokens for name, s in rows[label].items()}
            print(tables.line(label, rows[label]), flush=True)
    sizes = f"float32, B = {values.batch}, H = {values.heads}, K = V = {values.head_dim}"
    tables.report(f"linear recurrence, {sizes}, {jax.devices()[0].device_kind}", rows, "softmax")
    beside = [length for length in lengths if length <= values.longest_softmax]
    for which, name in itertools.product(("forward", "forward + backward") if beside else (), functions):
        if name != "softmax":
            print(f"{name}, {which}: {_pays(rows, beside, which, name)}")
    cells = {label: {name: f"{t:.2f}" for name, t in row.items()} for label, row in a_token.items()}
    tables.table("microseconds per token", cells)
    seconds = {label: {name: statistics.median(s) for name, s in row.items()} for label, row in rows.items()}
    options.keep(values.json, {"seconds": seconds, "us_a_token": a_token})
    cases = {f"{label}, {sizes}": {"seconds": seconds[label], "us_a_token": a_token[label]} for label in rows}
    recording.add(values, "recurrence", cases)
    return 0


def _pays(rows, lengths, which, name) -> str:
    """The shortest length from which on a member takes less time than the softmax, in words."""
    first = None
    for length in sorted(lengths, reverse=True):
        row = rows[f"T = {length:,}, {which}"]
        if statistics.median(row[name]) >= statistics.median(row["softmax"]):
            break
        first = length
    return "at no length faster than the softmax" if first is None else f"faster than the softmax from T = {first:,} on"


def _softmax(shape) -> tuple[Callable, dict]:
    q, k, v = jax.random.normal(jax.random.key(0), (3, *shape))
    return (lambda x: attnlab.attention(**x, mask=masks.Causal())), {"q": q, "k": k, "v": v}


def _recurrence(shape, decay, erasure, impl, chunk) -> tuple[Callable, dict]:
    """(A function of a dictionary of arguments, the arguments): unit keys, decays of e⁻¹ in about eight tokens."""
    normal = jax.random.normal(jax.random.key(0), (4, *shape))
    unit = normal / jnp.linalg.norm(normal, axis=-1, keepdims=True)
    arguments = {"q": normal[0], "k": unit[1], "v": normal[2]}
    by_feature = -jax.nn.softplus(normal[3] - 2)
    if decay:
        arguments["g"] = by_feature if decay == "feature" else by_feature[..., 0]
    if erasure == "beta":
        arguments["beta"] = jax.nn.sigmoid(normal[3, ..., 1])
    if erasure == "erase":
        arguments["erase"] = (0.5 * unit[1], unit[3])
    call = functools.partial(attnlab.linear_recurrence, impl=impl, chunk_size=chunk)
    return (lambda x: call(**x)), arguments


def _forward(function, arguments) -> Callable:
    return functools.partial(jax.jit(function), arguments)


def _backward(function, arguments) -> Callable:
    return functools.partial(jax.jit(jax.grad(lambda x: function(x).sum())), arguments)
