"""Profile a compiled program: trace some calls, and list the most expensive ops."""

import collections
import contextlib
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import jax


class Op(NamedTuple):
    """An instruction of a compiled program, as traced.

    Attributes:
      name: as in the compiled text, "fusion.7".
      milliseconds: per step, of the time in which it was the only op; of other time its equal share.
      calls: per step.
      what: its shape, kind and origin: "f32[384,256] fusion of jvp(GPT)/block_1/mlp/up/dot_general".
    """

    name: str
    milliseconds: float
    calls: float
    what: str


@contextlib.contextmanager
def trace(folder: str):
    """Trace what runs inside into a folder, for `most_expensive` and for the viewers of TensorBoard and XProf."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would take longer than a small step
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def most_expensive(folder: str, compiled: str, steps: int, count: int | None = 10) -> list[Op]:
    """The ops that took the most time, most expensive first; ops that run others, such as `while`, are not among them.

    Args:
      folder: the folder of `trace`.
      compiled: the program's text, `jitted.lower(…).compile().as_text()`.
      steps: calls of the program inside the trace.
      count: how many ops to list; None for all.
    """
    running = set(re.findall(r"%([\w.-]+) = [^\n]* (?:while|call|conditional)\(", compiled))
    events = [event for event in _events(folder, compiled) if event[2] not in running]
    calls, nanoseconds = collections.Counter(name for *_, name in events), _shares(events)
    return [
        Op(name, total / steps / 1e6, calls[name] / steps, describe(name, compiled))
        for name, total in nanoseconds.most_common(count)
    ]


def _events(folder: str, compiled: str) -> list[tuple[float, float, str]]:
    """(Start, end, name) of the program's ops in a trace, in nanoseconds."""
    module, events = re.match(r"HloModule ([^\s,]+)", compiled)[1], []
    for path in Path(folder).rglob("*.xplane.pb"):
        data = jax.profiler.ProfileData.from_file(str(path))
        for event in (event for plane in data.planes for line in plane.lines for event in line.events):
            with warnings.catch_warnings():  # Python 3.12 deprecates the way in which jaxlib creates the type of stats
                warnings.simplefilter("ignore", DeprecationWarning)
                stats = dict(event.stats)
            if "hlo_op" in stats and stats.get("hlo_module") == module:
                events.append((event.start_ns, event.start_ns + event.duration_ns, stats["hlo_op"]))
    return events


def _shares(events: list[tuple[float, float, str]]) -> collections.Counter:
    """Nanoseconds of each op, where those at a time share it equally.

    >>> _shares([(0, 10, "a"), (4, 6, "b")])
    Counter({'a': 9.0, 'b': 1.0})
    """
    shares, active, last = collections.Counter(), collections.Counter(), 0
    changes = [(start, 1, name) for start, _, name in events] + [(end, -1, name) for _, end, name in events]
    for time, change, name in sorted(changes):
        for running, times in active.items():
            shares[running] += (time - last) * times / active.total()
        active[name] += change
        active, last = +active, time
    return shares


def describe(name: str, compiled: str) -> str:
    """An op's shape, kind and origin according to the compiled text; "" if the op is not in it.

    >>> describe("exp.1", "  %exp.1 = f32[8]{0} exponential(%x)")
    'f32[8] exponential'
    """
    found = re.search(rf"^\s*(?:ROOT )?%{re.escape(name)} = (\(.*?\)|\S+) ([\w-]+)\((.*)", compiled, re.MULTILINE)
    if not found:
        return ""
    shape, kind, rest = found.groups()
    origin = re.search(r'op_name="(?:jit\(\w+\)/)?([^"]*)"', rest)
    shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape)  # without memory layouts
    return f"{shape} {kind}" + (f" of {origin[1]}" if origin else "")
