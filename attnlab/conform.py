"""Check an attention function against the specification, feature by feature.

    attnlab conform jax.nn.dot_product_attention
    attnlab conform my_module:my_function --adapter=my_module:adapt --features=causal,window,sinks
    attnlab conform my_module:my_recurrence --recurrence --lengths=1,63,65,130 --head_dims=64,128 --dtype=bfloat16

Each feature is right, wrong (the smallest failing call is printed as code), ignored (the output is the same without
it), refused, or slow (memory grows with Tq·Tk). Without --adapter the function is called with keyword arguments, like
`attnlab.attention`; for functions of jax.nn, Flax, tokamax and torch, adapters are built in. Modules in the current
folder can be named. If the function ends its process, or does not return within --timeout seconds, this is reported and
the check continues. The function's output is not shown. If several features have the same fault, one failing call is
printed. With --recurrence the function is called like `attnlab.linear_recurrence`. float32 products have the precision
"highest", unless JAX_DEFAULT_MATMUL_PRECISION sets another.

--out writes the results to `conformance.json` and `conformance.html`. The exit code is 1 if a feature is wrong or
ignored, and 2 for an error or if everything was refused. `python -m attnlab.conform` is the same command.
"""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from absl import flags

from attnlab import commands
from attnlab.results import page
from attnlab.results.table import Column, Table
from attnlab.support import paths
from attnlab.support.errors import UserError
from attnlab.testing import report
from attnlab.testing.report import Row

FILES = ("conformance.json", "conformance.html")
START = 60.0  # extra seconds in which the checking process imports its modules


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = list(sys.argv if argv is None else argv)
    names = [word for word in argv[1:] if not word.startswith("-")]
    options = [word for word in argv[1:] if word.startswith("-")]
    return commands.run(_define, lambda values: _main(values, names), __doc__, [argv[0], *options])


def _define(values, argv):
    meaning = "module:name of a function that turns a call into keyword arguments"
    flags.DEFINE_string("adapter", None, meaning, flag_values=values)
    flags.DEFINE_string("features", "all", "features to check, separated by commas", flag_values=values)
    flags.DEFINE_integer("cases", 200, "number of calls over all features", lower_bound=1, flag_values=values)
    flags.DEFINE_bool("recurrence", False, "check a linear recurrence", flag_values=values)
    usual = "with --recurrence: "
    flags.DEFINE_list("lengths", ["75"], f"{usual}lengths of its calls, in tokens", flag_values=values)
    flags.DEFINE_list("head_dims", [], f"{usual}sizes of keys and values; by default 8 and 5", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], f"{usual}type of q, k and v", flag_values=values)
    flags.DEFINE_bool("gradients", True, "compare gradients as well", flag_values=values)
    meaning = "seconds after which a feature is wrong because the function has not returned"
    flags.DEFINE_float("timeout", 600.0, meaning, lower_bound=1.0, flag_values=values)
    flags.DEFINE_string("out", None, "a folder for conformance.json and conformance.html", flag_values=values)


def _main(values, names: list[str]) -> int:
    from attnlab.testing import FEATURES, RECURRENCE_FEATURES

    if len(names) != 1:
        raise UserError(
            f"{len(names)} functions are named ({', '.join(names)}): expected one, and options as --name=value, e.g. "
            "attnlab conform jax.nn.dot_product_attention --features=causal"
        )
    known = RECURRENCE_FEATURES if values.recurrence else FEATURES
    chosen = list(known) if values.features == "all" else [name.strip() for name in values.features.split(",")]
    chosen = list(dict.fromkeys(chosen))
    for name in chosen:
        if name not in known:
            other = "" if values.recurrence else "; features of a linear recurrence need --recurrence"
            raise UserError(f"--features: {name!r} is unknown: use some of {', '.join(known)}{other}")
    out = contextlib.nullcontext() if values.out is None else paths.claim(Path(values.out), "--out", _foreign)
    with out:
        return _conform(values, names[0], chosen)


def _foreign(names: list[str]) -> str:
    others = set(names) - set(FILES)
    return f"holds {min(others)}, which an earlier check did not write" if others else ""


def _conform(values, name: str, chosen: list[str]) -> int:
    """Check a function, print its rows, and write them to --out."""
    each = max(1, round(values.cases / len(chosen)))
    how = {"gradients": values.gradients, "cases": each, "recurrence": values.recurrence, "calls": _calls(values)}
    request = {"function": name, "adapter": values.adapter, **how}
    version, rows, meanings = checked(request, chosen, values.timeout)
    likes = report.likes(rows)
    record = {**request, "version": version, "rows": list(map(dataclasses.asdict, rows)), "meanings": meanings}
    record["rows"] = [row | {"worst": row["worst"] if math.isfinite(row["worst"]) else None} for row in record["rows"]]
    print("\n".join([*(f"{choice}: {meaning}" for choice, meaning in meanings.items()), report.counts(rows)]))
    for row in rows:
        if row.code and row.feature not in likes:
            print(f"\n{row.code}")
    if values.out is not None:
        figures, shown = (Path(values.out) / file for file in FILES)
        paths.write_text(figures, json.dumps(record, indent=1) + "\n")
        page.write(shown, f"{name} {version and f'({version})'}".strip(), {}, [section(rows, meanings)])
        print(f"written: {figures}, {shown}")
    outcomes = {row.outcome for row in rows}
    if outcomes == {"refused"}:
        raise UserError(f"{name} refused all features, so nothing was compared: see the reasons above")
    return int(bool(outcomes & {"wrong", "ignored"}))


def _calls(values) -> dict | None:
    """The type and the sizes (length, features of keys, of values) of a recurrence's calls; None for attention."""
    present = [name for name in ("lengths", "head_dims", "dtype") if values[name].present]
    if present and not values.recurrence:
        raise UserError(f"--{present[0]} needs --recurrence: add that, or remove --{present[0]}")
    numbers = {}
    for name in ("lengths", "head_dims"):
        if not all(word.isdigit() and int(word) for word in values[name].value):
            raise UserError(f"--{name}={','.join(values[name].value)}: expected positive numbers, such as 64,128")
        numbers[name] = list(map(int, values[name].value))
    sizes = [(dim, dim) for dim in numbers["head_dims"]] or [(8, 5)]
    shapes = [(length, *size) for size in sizes for length in numbers["lengths"]]
    return {"dtype": values.dtype, "shapes": shapes} if values.recurrence else None


def checked(request: dict, features: list[str], timeout: float) -> tuple[str, list[Row], dict[str, str]]:
    """(version, rows, meanings) of a check in another process, which is restarted if the function ends it.

    If the process is silent for `timeout` seconds, it is killed, and the feature counts as wrong.
    """
    version, rows, meanings, left, name = None, [], {}, list(features), request["function"]
    width = max(map(len, features))

    def add(row: Row) -> None:
        if row.feature in left:
            left.remove(row.feature)
        rows.append(row)
        print(row.line(width, report.likes(rows).get(row.feature, "")), flush=True)

    while left:
        command = [sys.executable, "-m", "attnlab.testing.worker", json.dumps(request | {"features": left})]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment()) as worker,
        ):
            silent = threading.Event()
            for message in _messages(worker, timeout, silent):
                if "error" in message:
                    raise UserError(message["error"])
                version = message.get("version", version)
                meanings |= message.get("meanings", {})
                if "row" in message:
                    add(Row(**message["row"]))
            worker.wait()
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["it printed nothing"])[-1][:160]
        why = f"it ended its process with exit code {worker.returncode}: {last}"
        if silent.is_set():
            why = f"it did not return within {timeout:g} s (--timeout)"
        if version is None or (worker.returncode and not left):
            raise UserError(f"{name}: {why}")
        if left:
            add(Row(left[0], "wrong", why, math.inf, fault=why))
    return version or "", rows, meanings


def _messages(worker: subprocess.Popen, timeout: float, silent: threading.Event) -> Iterator[dict]:
    """Yield the messages that a process prints; if it is silent for `timeout` seconds, kill it and set the event.

    It has `START` more seconds for the first line, because it first imports JAX and the function's module.
    """
    more = START

    def kill() -> None:
        silent.set()
        worker.kill()

    while True:
        timer = threading.Timer(timeout + more, kill)
        timer.start()
        try:
            line = worker.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            return
        yield json.loads(line)
        more = 0.0


def _environment() -> dict[str, str]:
    devices = "--xla_force_host_platform_device_count=4"  # for sharded calls
    highest = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # otherwise GPUs compute float32 products in TF32
    return highest | os.environ | {"XLA_FLAGS": f"{devices} {os.environ.get('XLA_FLAGS', '')}"}


def columns(likes: Mapping[str, str]) -> list[Column]:
    """The columns of a check's table; a feature that repeats the fault of an earlier feature refers to that feature."""

    def why(row: Row) -> str:
        return f"like {likes[row.feature]}: {row.fault}" if row.feature in likes else row.why

    def worst(row: dict) -> str:
        return "∞" if row["worst"] == math.inf else f"{row['worst']:,.2f}"

    return [
        Column("feature", "feature", lambda row: row.feature),
        Column("outcome", "outcome", lambda row: row.outcome, help="Ignored: the feature does not change the output."),
        Column("worst", "error", lambda row: row.worst, format=worst, help="In units of its bound; above 1 is wrong."),
        Column("cases", "calls", lambda row: row.cases),
        Column("why", "why", why, usual=""),
    ]


def section(rows: list[Row], meanings: Mapping[str, str]) -> page.Section:
    """A check's section of a page: its table, and the smallest failing call for each fault."""
    likes = report.likes(rows)
    return page.Section(
        "Features",
        [
            "Compared with the specification by attnlab conform. An error above 1, in units of its bound, is wrong.",
            report.counts(rows),
            *(f"{choice}: {meaning}" for choice, meaning in meanings.items()),
        ],
        table=Table.of(columns(likes), rows).shown(),
        opened={
            f"{row.feature}: the smallest failing call": row.code
            for row in rows
            if row.code and row.feature not in likes
        },
    )


if __name__ == "__main__":
    sys.exit(main())
