"""The table of a comparison: a row a variant, as records, CSV, Markdown and text."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.comparing import protocol as protocols
from attnlab.comparing import statistics
from attnlab.comparing.protocol import Protocol
from attnlab.comparing.variants import Variant
from attnlab.study.report import mean_and_margin
from attnlab.support import paths
from attnlab.support.errors import UserError

TABLE, TEXT = "table.csv", "table.md"
FACTS = ("parameters", "flops_per_token_train", "flops_per_token_decode", "peak_memory_bytes")
SPEEDS = ("prefill_tokens_per_second", "decode_tokens_per_second", "decode_state_bytes")
LENGTHS = {"loss": (1, 2, 4), "accuracy": (1, 2, 4, 8)}  # over the training's, at which a measure is told
# The shown columns of a table, with short names; a column without any value is left out.
SHOWN = {
    "variant": "variant",
    "accuracy": "accuracy",
    "difference_accuracy": "difference",
    "loss": "loss",
    "difference_loss": "difference",
    "verdict": "verdict",
    "difference_detectable": "detectable",
    "difference_seeds_needed": "seeds needed",
    "diverged": "diverged",
    "failed": "failed",
    "learning_rate": "learning rate",
    "loss_at_equal_time": "loss at equal time",
    "loss_2x": "loss to 2×",
    "loss_4x": "loss to 4×",
    "accuracy_2x": "accuracy at 2×",
    "accuracy_4x": "at 4×",
    "accuracy_8x": "at 8×",
    "parameters": "parameters",
    "flops_per_token_train": "FLOPs/token",
    "train_tokens_per_second": "training tokens/s",
    "prefill_tokens_per_second_1x": "prefill tokens/s",
    "decode_tokens_per_second_1x": "decode tokens/s",
    "decode_tokens_per_second_8x": "at 8×",
    "decode_state_bytes_1x": "state bytes",
    "peak_memory_bytes": "peak bytes",
    "conforms": "conforms",
    "comparable": "comparable",
}
INTERVALS = ("loss", "accuracy", "difference_loss", "difference_accuracy", "loss_at_equal_time")


def rows(
    protocol: Protocol,
    variants: Sequence[Variant],
    folder: Path,
    rates: Mapping[str, tuple[float, bool]],
    measured: Mapping[str, Mapping],
) -> list[dict[str, Any]]:
    """The records of a comparison with the first variant, one a variant, in their order."""
    points = [protocol.final(variant, rates[variant.name][0]) for variant in variants]
    workdirs = [[folder / point.name for point in of_variant] for of_variant in points]
    results = {name: _results(name, workdirs) for name in dict.fromkeys((protocol.measure, "loss"))}
    curves = [[protocols.curve(workdir) for workdir in of_variant] for of_variant in workdirs]
    ends = [curve[-1, 1] for curve in curves[0] if len(curve)]
    seconds = min(ends, default=math.nan)
    sign = -1 if protocol.measure == "accuracy" else 1  # the lower result is the better one
    resolution = protocols.resolution(points[0][0].config, protocol.measure)
    compared = [None, *statistics.differences(sign * results[protocol.measure], resolution)]
    return [
        {
            "variant": variant.name,
            **{key: value for name, of in results.items() for key, value in _mean(name, of[n]).items()},
            "seeds": int((~np.isnan(results["loss"][n])).sum()),
            **_difference(compared[n], protocol.measure, sign),
            "diverged": sum(map(protocols.diverged, workdirs[n])),
            "failed": int(np.isnan(results["loss"][n]).sum()),
            "learning_rate": rates[variant.name][0],
            "learning_rate_at_edge": rates[variant.name][1],
            "comparable": variant.comparable,
            **_conforms(measured.get(variant.name, {}).get("certificate")),
            **_at_equal_time(curves[n], seconds),
            **_measured(measured.get(variant.name, {}), protocol.measure),
            "train_tokens_per_second": _median([protocols.speed(workdir) for workdir in workdirs[n]]),
        }
        for n, variant in enumerate(variants)
    ]


def _results(measure: str, workdirs) -> np.ndarray:
    return np.array([[protocols.result(workdir, measure) for workdir in of_variant] for of_variant in workdirs])


def _mean(name: str, results: np.ndarray) -> dict:
    mean, half = mean_and_margin(results[~np.isnan(results)])
    return {name: _number(mean), f"{name}_interval": _number(half)}


def _difference(found: statistics.Difference | None, measure: str, sign: int) -> dict:
    names = (f"difference_{measure}", f"difference_{measure}_interval", "difference_p", "verdict")
    names += ("difference_detectable", *(f"difference_seeds_needed{end}" for end in ("", "_low", "_high")))
    if found is None:
        return dict.fromkeys(names)
    detectable = _number(found.detectable) if found.verdict == statistics.OPEN else None
    values = (_number(sign * found.mean), *map(_number, found[1:3]), found.verdict, detectable)
    return dict(zip(names, (*values, *(found.seeds_needed or (None, None, None)))))


def _at_equal_time(curves: Sequence[np.ndarray], seconds: float) -> dict:
    losses = [protocols.loss_at(curve, seconds) for curve in curves]
    # Without the seeds that ended sooner it would be the mean of the slowest alone.
    mean, half = mean_and_margin([] if any(map(math.isnan, losses)) else losses)
    return {"loss_at_equal_time": _number(mean), "loss_at_equal_time_interval": _number(half)}


def _conforms(certificate: Mapping | None) -> dict:
    """Whether a variant's operators conform, and their largest error; None without a specification."""
    certificate = certificate or {}
    return {"conforms": certificate.get("conforms"), "conforms_worst": certificate.get("worst")}


def _measured(found: Mapping, measure: str) -> dict:
    lengths = [f"{measure}_{times}x" for times in LENGTHS[measure]]
    speeds = [f"{name}_{times}x" for name in SPEEDS for times in (1, 8)]
    return {name: found.get(name) for name in (*FACTS, *lengths, *speeds)}


def _median(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def write(found: Sequence[Mapping], folder: Path, notes: Sequence[str]) -> None:
    """Write `table.csv`, and `table.md` with notes below the table."""
    paths.write_csv(folder / TABLE, found)
    paths.write_text(folder / TEXT, markdown(cells(found), notes))


def markdown(cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A table of texts, names of its columns first, with notes below it."""
    heads, *lines = [[_plain(cell) for cell in line] for line in cells]
    table = "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines])
    return table + "\n\n" + "\n".join(f"{_plain(note)}\n" for note in notes)


def _plain(text: str) -> str:
    """One line of Markdown that shows the text as it is."""
    return re.sub(r"[\\|`*<\[$~&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The records of a comparison's `table.csv`: numbers, texts and booleans, None for empty cells.

    Raises:
      UserError: there is none, or it is damaged.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "table.csv").write_text("variant,loss,verdict,comparable\\nalibi,1.5,,True\\n")
    >>> read(folder)
    [{'variant': 'alibi', 'loss': 1.5, 'verdict': None, 'comparable': True}]
    """
    path = Path(folder) / TABLE
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file, strict=True))
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no {TABLE}: name the --workdir of attnlab compare") from error
    except (OSError, csv.Error, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): repeat the command that wrote it") from error
    return [{name: _value(name, text) for name, text in row.items()} for row in found]


def _value(name: str, text: str | None):
    if not text:
        return None
    if name in ("variant", "verdict"):
        return text
    if text in ("True", "False"):
        return text == "True"
    number = float(text)
    return int(number) if text.lstrip("-").isdigit() else number


def shown(found: Sequence[Mapping]) -> list[str]:
    """The columns of `SHOWN` that a table has and that have news."""
    return [name for name in SHOWN if name in found[0] and _has_news(name, [row[name] for row in found])]


def cells(found: Sequence[Mapping]) -> list[list[str]]:
    """The shown columns as texts, names first; losses and accuracies with their intervals."""
    names = shown(found)
    return [[SHOWN[name] for name in names], *([_cell(name, row) for name in names] for row in found)]


def _has_news(name: str, values: Sequence) -> bool:
    if name in ("diverged", "failed"):
        return any(values)
    return not all(values) if name == "comparable" else any(value is not None for value in values)


def _cell(name: str, row: Mapping) -> str:
    value = row[name]
    if value is None:
        return ""
    if name in INTERVALS:
        half = row[f"{name}_interval"]
        return f"{value:{'+' if name.startswith('difference') else ''}.4f}" + (
            f" ± {half:.4f}" if half is not None else ""
        )
    if name == "learning_rate":
        return f"{value:.3g}" + (" (edge)" if row["learning_rate_at_edge"] else "")
    if name == "difference_detectable" or name.startswith(("loss_", "accuracy_")):
        return f"{value:.4f}"
    if name == "difference_seeds_needed":
        ends = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
        found, low, high = (f"{end}" if end < statistics.MOST_SEEDS else f"≥ {end:,}" for end in ends)
        return f"{found} ({low} to {high})"
    if name == "comparable":
        return "yes" if value else "no"
    if name == "conforms":
        return f"{row['conforms_worst']:.2f}" if value else "no"
    return value if isinstance(value, str) else f"{value:,.0f}" if value < 1e6 else f"{value:.3g}"


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """A table of texts with aligned columns, for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        ).rstrip()
        for line in lines
    )
