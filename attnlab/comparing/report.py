"""The sections of a comparison's page: a part's table, curves, and the configs of its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from attnlab import config as configs
from attnlab.comparing import page, table
from attnlab.comparing import protocol as protocols
from attnlab.comparing.parts import Part
from attnlab.study.report import mean_and_margin
from attnlab.sweeping.grid import Point
from attnlab.training import metrics

AXES = {"loss": "loss (nats per token)", "accuracy": "accuracy"}


def section(
    part: Part, rows: Sequence[Mapping], notes: Sequence[str], final: Mapping[str, list[Point]], measured: Mapping
) -> page.Section:
    """The section of a part, on its rows, the final runs of each variant, and their measurements."""
    measure, workdirs = part.protocol.measure, {}
    for name, points in final.items():
        workdirs[name] = [part.folder / point.name for point in points]
    charts = [_learning(workdirs), _against_state(rows, measure), *_against_length(measured)]
    shown = table.shown(rows)
    return page.Section(
        part.name or "text",
        table.cells(rows),
        [[row[name] for name in shown] for row in rows],
        notes,
        [chart for chart in charts if any(len(line.x) for line in chart.lines)],
        [_run(point, name, part.folder) for name, points in final.items() for point in points],
    )


def _run(point: Point, variant: str, folder: Path) -> page.Run:
    values = dict(point.values)
    for name in ("loss", "accuracy"):
        records = [
            r for r in metrics.read(folder / point.name / "metrics.jsonl") if r["split"] == "final" and name in r
        ]
        values |= {name: records[-1][name]} if records else {}
    declared, fields = configs.declared(), point.config.fields
    return page.Run(point.name, variant, values, {k: v for k, v in fields.items() if v != declared[k].default})


def _learning(workdirs: Mapping[str, Sequence[Path]]) -> page.Chart:
    """Mean validation loss over tokens, with the range of the seeds."""
    lines = []
    for name, of_variant in workdirs.items():
        found = [curve for workdir in of_variant if len(curve := protocols.curve(workdir))]
        shared = min(map(len, found), default=0)  # a run that diverged has fewer
        losses = np.array([curve[:shared, 2] for curve in found]).reshape(len(found), shared)
        if shared:
            tokens = found[0][:shared, 0].tolist()
            lines.append(page.Line(name, tokens, *(each(0).tolist() for each in (losses.mean, losses.min, losses.max))))
    return page.Chart("Learning: mean and range of the seeds", "tokens of training", AXES["loss"], lines)


def _against_state(rows: Sequence[Mapping], measure: str) -> page.Chart:
    lines = []
    for row in rows:
        value, half = row[measure], row[f"{measure}_interval"]
        if value is not None and row["decode_state_bytes_1x"]:
            around = ([value - half], [value + half]) if half is not None else (None, None)
            lines.append(page.Line(row["variant"], [row["decode_state_bytes_1x"]], [value], *around))
    title = f"{measure.capitalize()} against the state that decoding keeps of a full context"
    return page.Chart(title, "bytes", AXES[measure], lines, log_x=True)


def _against_length(measured: Mapping[str, Mapping]) -> list[page.Chart]:
    lines = []
    for name, found in measured.items():
        by_length = found.get("accuracies_by_length", {})
        means = [mean_and_margin(values) for values in by_length.values()]
        if means:
            around = [[mean + sign * (0 if np.isnan(half) else half) for mean, half in means] for sign in (-1, 1)]
            lines.append(page.Line(name, list(map(int, by_length)), [mean for mean, _ in means], *around))
    title = "Accuracy against length: answers in the second half of longer sequences"
    return [page.Chart(title, "tokens", AXES["accuracy"], lines, log_x=True)] if lines else []
