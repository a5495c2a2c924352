"""Where the time of a compiled program goes: a trace of some calls, and the ops that take most of it."""

import collections
import contextlib
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import jax


class Op(NamedTuple):
    """An instruction of a compiled program, in a trace.

    Attributes:
      name: as the compiled text has it, "fusion.7".
      milliseconds: a step.
      calls: a step.
      what: its shape and kind, and what it came from: "f32[384,256] fusion of jvp(GPT)/block_1/mlp/up/dot_general".
    """

    name: str
    milliseconds: float
    calls: float
    what: str


@contextlib.contextmanager
def trace(folder: str):
    """Whatever runs inside is traced into a folder, for `most_expensive` and for TensorBoard's or XProf's viewer."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would take longer than small steps do
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def most_expensive(folder: str, compiled: str, steps: int, count: int = 10) -> list[Op]:
    """The ops that took most time, most expensive first.

    An op that runs others, such as `while`, counts their time as well; ops may run side by side.

    Args:
      folder: what `trace` wrote into.
      compiled: the program's text, `jitted.lower(…).compile().as_text()`.
      steps: how often it was called inside the trace.
      count: how many ops.
    """
    module = re.match(r"HloModule ([^\s,]+)", compiled)[1]
    nanoseconds, calls = collections.Counter(), collections.Counter()
    for path in Path(folder).rglob("*.xplane.pb"):
        data = jax.profiler.ProfileData.from_file(str(path))
        for event in (event for plane in data.planes for line in plane.lines for event in line.events):
            with warnings.catch_warnings():  # Python 3.12 deprecates how jaxlib makes the type of stats
                warnings.simplefilter("ignore", DeprecationWarning)
                stats = dict(event.stats)
            if "hlo_op" in stats and stats.get("hlo_module") == module:
                nanoseconds[stats["hlo_op"]] += event.duration_ns
                calls[stats["hlo_op"]] += 1
    return [
        Op(name, total / steps / 1e6, calls[name] / steps, describe(name, compiled))
        for name, total in nanoseconds.most_common(count)
    ]


def describe(name: str, compiled: str) -> str:
    """What the compiled text says of an op: its shape, its kind, where it comes from; "" where it does not know it.

    >>> describe("exp.1", "  %exp.1 = f32[8]{0} exponential(%x)")
    'f32[8] exponential'
    """
    found = re.search(rf"^\s*(?:ROOT )?%{re.escape(name)} = (\(.*?\)|\S+) ([\w-]+)\((.*)", compiled, re.MULTILINE)
    if not found:
        return ""
    shape, kind, rest = found.groups()
    origin = re.search(r'op_name="(?:jit\(\w+\)/)?([^"]*)"', rest)
    shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape)  # without memory orders
    return f"{shape} {kind}" + (f" of {origin[1]}" if origin else "")
