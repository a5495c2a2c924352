"""Adapter to FlashAttention-4's kernels for JAX (fa4-jax), which run on NVIDIA's GPUs from Ampere to Blackwell.

For causal masks and windows the kernels skip whole tiles; any other mask becomes a predicate that they evaluate at each
pair of the remaining tiles. On CPUs the library's reference runs instead, for tests. The kernels have been compiled for
attnlab but never run, so "auto" never chooses them.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from attnlab.ops import hidden_keys, jaxprs
from attnlab.ops.call import AttentionCall
from attnlab.ops.mask_algebra import And, conjuncts
from attnlab.ops.masks import Band, Causal, SlidingWindow, as_band
from attnlab.ops.meshes import is_checked_manual, over_shards
from attnlab.ops.mosaic.programs import CALLS, Operand, RefusedError, mask_program
from attnlab.ops.platforms import platform_of
from attnlab.support.extras import reason_against_version
from attnlab.types import Array

VERSION = "0.1.0"
HAS_LSE = False  # the backward kernels take no gradient of the lse


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    q, k, v = call.q, call.k, call.v
    sizes = q.shape[-1], v.shape[-1]
    reasons = {
        "it needs an NVIDIA GPU": platform_of(q, k, v) == "tpu",
        f"it has no {q.dtype}, only float16 and bfloat16": q.dtype not in (jnp.float16, jnp.bfloat16),
        "q, k and v must have one type": not q.dtype == k.dtype == v.dtype,
        f"heads of {sizes[0]} and {sizes[1]} features: it supports equal multiples of 8 up to 256": not (
            sizes[0] == sizes[1] and sizes[0] % 8 == 0 and sizes[0] <= 256
        ),
        "it has no score mods": bool(call.score_mods),
        "it has no bias": call.bias is not None,
        "it has no sinks": call.sinks is not None,
        "it has no dropout": bool(call.dropout_rate),
        "it chooses its own tile sizes": call.block_sizes is not None,
        "it needs a static scale": isinstance(call.scale, jax.Array),
        "within shard_map it needs check_vma=False": is_checked_manual(q, k, v),
        "an axis has length 0": 0 in (*q.shape, *k.shape),
    }
    missing = reason_against_version("fa4-jax", VERSION, "fa4")
    if reason := missing or next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    try:
        _predicate(call)
    except RefusedError as refusal:
        return f"the mask cannot run in a kernel: {refusal}"
    return None


def untried(call: AttentionCall) -> str | None:
    """The reason why "auto" leaves a call to other backends."""
    return "no recorded GPU run has checked it: it runs only if named"


def attend(call: AttentionCall) -> tuple[Array, None]:
    """Return (out, None)."""
    from fa4_jax import flash_attn

    band, predicate, operands = _predicate(call)
    k, v = hidden_keys.zeroed(call)

    def kernel(q, k, v, operands):
        flat = [x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)]
        operands = tuple(x.reshape(-1, *x.shape[len(call.batch) :]) for x in operands)
        out = flash_attn(
            *flat,
            window_size=(band.left, band.right),
            scale=None if call.scale is None else float(call.scale),
            mask_mod=None if predicate is None else _mask_mods()(operands, predicate),
            backend="cute" if platform_of(q) == "gpu" else "reference",
        )
        return out.reshape(q.shape)

    return over_shards(kernel, call.q, k, v, operands), None


@dataclass(frozen=True)
class Predicate:
    """A mask as a program on scalars: (query index, key index, a number from each operand) → is the pair visible?

    Predicates with equal programs are equal, so that each program compiles once.
    """

    program: ClosedJaxpr
    operands: tuple[Operand, ...]
    splits: tuple[tuple[bool, bool], ...]  # for each operand, whether it differs by example, and by head

    def _key(self):
        consts = tuple(np.asarray(x).item() for x in self.program.consts)
        return str(self.program.jaxpr), consts, self.operands, self.splits

    def __eq__(self, other):
        return isinstance(other, Predicate) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __call__(self, arrays, example, head, q, k) -> Any:
        """Evaluate the mask at indices, which are JAX arrays, or CuTe numbers while a kernel is traced."""
        values = [q, k]
        for array, operand, (by_example, by_head) in zip(arrays, self.operands, self.splits):
            index = [example if by_example else 0, head if by_head else 0]
            index += {"queries": [q], "keys": [k], "": []}.get(operand.along, [q // max(operand.rows, 1), k])
            values.append(array[tuple(index)])
        if isinstance(q, jax.Array):
            return jnp.vectorize(lambda *values: jaxprs.evaluate(self.program, values)[0])(*values)
        return jaxprs.evaluate(self.program, values, _in_cute)[0]


def _predicate(call: AttentionCall) -> tuple[Band, Predicate | None, list[Array]]:
    """Return the band that the kernels take, the predicate for the rest of the mask or None, and its operands.

    Raises:
      RefusedError: the mask cannot run inside a kernel.
    """
    bands, others = [], []
    for term in conjuncts(call.mask):  # the kernels align the last query with the last key
        is_known = isinstance(term, Causal | SlidingWindow) and call.is_aligned
        (bands if is_known else others).append(term)
    band = as_band(functools.reduce(And, bands) if bands else None)
    if not others:
        return band, None, []
    program, operands = mask_program(call.replace(mask=functools.reduce(And, others)))
    traced = program.trace(())
    _require_known(traced)
    first = len(call.batch)
    splits = tuple((any(n > 1 for n in x.shape[:first]), x.shape[first] > 1) for x in operands)
    operands = [
        jnp.broadcast_to(x, (*call.batch, *x.shape[first:])) if split else x for x, (split, _) in zip(operands, splits)
    ]
    return band, Predicate(traced, program.operands, splits), operands


@functools.cache  # a function, because the base class is imported only when used
def _mask_mods() -> Callable:
    from fa4_jax import MaskMod, static

    @dataclass(frozen=True)
    class Mask(MaskMod):
        operands: tuple[Array, ...]
        predicate: Predicate = static()  # noqa: RUF009

        def __call__(self, b, h, q, k):
            return self.predicate(self.operands, b, h, q, k)

    return Mask


# A predicate's operations on CuTe numbers; if all operands of an operation are constants, JAX computes it.


def _require_known(closed: ClosedJaxpr) -> None:
    for equation in closed.jaxpr.eqns:
        name = equation.primitive.name
        if name in CALLS:
            _require_known(jaxprs.inner(equation))
            continue
        types = {x.aval.dtype.name for x in (*equation.invars, *equation.outvars)}
        is_known = equation.params["y"] > 0 if name == "integer_pow" else name in _OPERATIONS
        if not is_known or (name == "select_n" and equation.invars[0].aval.dtype != bool):
            raise RefusedError(f"a function has {name}")
        if unknown := types - {"bool", "int32", "float32"}:
            raise RefusedError(f"a function computes in {unknown.pop()}")


def _in_cute(equation, values) -> list:
    name, values = equation.primitive.name, [_plain(x) for x in values]
    if name in CALLS:
        return jaxprs.evaluate(jaxprs.inner(equation), values, _in_cute)
    if all(isinstance(x, bool | int | float) for x in values):
        with jax.ensure_compile_time_eval():
            return jaxprs.bind(equation, [np.asarray(x, atom.aval.dtype) for x, atom in zip(values, equation.invars)])
    if name == "integer_pow":
        return [math.prod(equation.params["y"] * values)]
    return [_OPERATIONS[name](_number(equation.outvars[0].aval.dtype), *values)]


def _plain(x):
    """Convert constants of JAX and NumPy to Python numbers, which CuTe's operators accept."""
    return np.asarray(x).item() if isinstance(x, np.generic | np.ndarray | jax.Array) else x


def _number(dtype) -> Callable:
    """The CuTe type for numbers of a dtype."""
    import cutlass

    return {"bool": cutlass.Boolean, "int32": cutlass.Int32, "float32": cutlass.Float32}[dtype.name]


def _chosen(number, condition, if_true, if_false):
    import cutlass

    if isinstance(condition, bool):
        return if_true if condition else if_false
    return number(cutlass.select_(condition, number(if_true), number(if_false)))


def _untyped(operation: Callable) -> Callable:
    return lambda number, *x: operation(*x)


_UNTYPED = ("add", "sub", "mul", "neg", "eq", "ne", "lt", "le", "gt", "ge")
# (type of the result, *operands) → the result. CuTe truncates quotients and remainders, as JAX does.
_OPERATIONS = {name: _untyped(getattr(operator, name)) for name in _UNTYPED} | {
    "and": _untyped(operator.and_),
    "or": _untyped(operator.or_),
    "xor": lambda number, x, y: x != y if number.width == 1 else x ^ y,
    "not": lambda number, x: _chosen(number, x, False, True) if number.width == 1 else -1 - x,
    "rem": _untyped(operator.mod),
    "div": lambda number, x, y: x / y if number.is_float else x // y,
    "max": lambda number, x, y: _chosen(number, x > y, x, y),
    "min": lambda number, x, y: _chosen(number, x < y, x, y),
    "abs": lambda number, x: _chosen(number, x < 0, -x, x),
    "sign": lambda number, x: _chosen(number, x < 0, -1, _chosen(number, x > 0, 1, 0)),
    "clamp": lambda number, low, x, high: _chosen(number, x < low, low, _chosen(number, x > high, high, x)),
    "select_n": lambda number, condition, if_false, if_true: _chosen(number, condition, if_true, if_false),
    "convert_element_type": lambda number, x: number(x),
}
