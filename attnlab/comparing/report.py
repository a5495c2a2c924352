"""The report of a part of a comparison: the section of its page, with notes, curves and the configs of its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnlab import config as configs
from attnlab.comparing import page, statistics, table
from attnlab.comparing import protocol as protocols
from attnlab.comparing.charts import Chart
from attnlab.comparing.protocol import Protocol
from attnlab.comparing.race import ROUNDS, Race
from attnlab.comparing.replication import Published
from attnlab.comparing.variants import Variant
from attnlab.config import RunConfig
from attnlab.study.report import mean_and_margin
from attnlab.sweeping.grid import Point
from attnlab.training import metrics

AXES = {"loss": "loss (nats per token)", "accuracy": "accuracy"}
MEASURES = {"loss": "Losses in nats per token", "accuracy": "Accuracies: shares of right answers"}
COLUMNS = ("tokens", "seconds", "FLOPs")  # of training, over which losses are drawn


class Part(NamedTuple):
    """A part of a comparison: a text or a task, with a table of its own.

    Attributes:
      name: of the task; "" for the config's text alone.
      folder: of its runs, and its table.
      protocol: its config, learning rates and seeds.
      variants: with widths that match, if sizes are matched.
      match: the size that is matched.
      published: the results of others, if there are some of this part.
    """

    name: str
    folder: Path
    protocol: Protocol
    variants: list[Variant]
    match: str
    published: Published | None

    def config_of(self, variant: Variant) -> RunConfig:
        """A variant's config, with the config's seed and learning rate."""
        return variant.config(self.protocol.config)


def section(
    part: Part, rows: Sequence[Mapping], final: Mapping[str, list[Point]], measured: Mapping, raced: Race | None
) -> page.Section:
    """The section of a part, on its rows, the final runs of each variant, their measurements, and their race."""
    measure = part.protocol.measure
    first, every = table.first_columns(rows, measure, part.match), table.all_columns(rows)
    speeds = {row["variant"]: row["train_tokens_per_second"] or np.nan for row in rows}
    curves = {
        name: [protocols.curve(part.folder / point.name, speeds[name]) for point in points]
        for name, points in final.items()
    }
    flops = {row["variant"]: row["flops_per_token_train"] for row in rows}
    timed = measure == "loss" and raced is not None
    charts = [*_learning(curves, flops, timed), *_against_state(rows, measure), *_against_length(measured)]
    return page.Section(
        part.name or "text",
        table.sentences(rows, measure),
        _table(rows, first),
        _notes(part, rows, raced),
        charts,
        {"All columns": _table(rows, every), "All runs": _runs(part, final)},
    )


def _table(rows: Sequence[Mapping], names: Sequence[str]) -> page.Table:
    return page.Table(table.cells(rows, names), [[row[name] for name in names] for row in rows])


def _notes(part: Part, rows: Sequence[Mapping], raced: Race | None) -> list[str]:
    protocol = part.protocol
    rates, tuning = ", ".join(f"{rate:g}" for rate in protocol.rates), len(protocol.tuning_seeds)
    on = "text" if protocol.measure == "loss" else "sequences"
    chosen = f"s {rates}, chosen with {tuning} other seed{'s' if tuning > 1 else ''} on other {on}"
    notes = [
        f"{MEASURES[protocol.measure]}, means of {len(protocol.seeds)} seeds ± 95 % intervals; differences are paired "
        f"by seed, with simultaneous intervals for {len(rows) - 1} variant{'s' if len(rows) > 2 else ''}; a verdict is "
        f"an interval without 0; curves are means, with the range of the seeds. "
        f"Learning rate{chosen if len(protocol.rates) > 1 else f' {rates}, the same for all'}."
    ]
    if any(row["verdict"] == statistics.OPEN for row in rows):
        notes.append(
            "Not told apart: 'detectable' is the smallest difference that these seeds show with probability 80 %; "
            "'seeds needed' would show the difference found, by the spread of these seeds and the ends of its interval."
        )
    if protocol.measure == "accuracy" and rows[0].get("accuracy_2x") is not None:
        notes.append("Accuracies at 2× and more are of the answers in the second half of sequences of that length.")
    if raced:
        notes.append(
            f"Tokens/s and seconds are of one race of all variants in turn, medians (lowest to highest) of {ROUNDS} "
            f"rounds, {raced.hour}, {raced.machine}; a verdict after as many seconds holds in every round."
        )
    if any(row["verdict"] == table.UNTRAINED for row in rows):
        guess = f"a guess among the tokens of a sequence, {rows[0]['blind']:.3f}"
        notes.append(f"Not trained far enough: neither variant is better than {guess}, by more than chance.")
    if any(row["conforms"] is not None for row in rows):
        notes.append("Conforms: the largest error of a variant's operators, in units of its bound.")
    return [*notes, *remarks(part, rows)]


def remarks(part: Part, rows: Sequence[Mapping]) -> list[str]:
    """Sentences on what went wrong, or may."""
    notes = []
    if len(part.protocol.rates) > 1 and any(row["learning_rate_at_edge"] for row in rows):
        notes.append("(edge): the best learning rate is the smallest or largest one: widen the learning rates.")
    for row in rows:
        name = row["variant"]
        notes += [f"{name}: its operators do not conform."] * (row["conforms"] is False)
        notes += [f"{name}: no width makes its size equal to the first variant's within 5 %."] * (not row["comparable"])
        notes += [f"{name}: {row['diverged']} diverged, with the loss of chance."] * (row["diverged"] > 0)
        notes += [f"{name}: {row['failed']} failed, and no part of the means."] * (row["failed"] > 0)
    return notes


def _runs(part: Part, final: Mapping[str, list[Point]]) -> page.Table:
    """All runs: their results, and the fields of their configs that differ from the defaults."""
    keys, default = [], RunConfig()
    for name, points in final.items():
        for point in points:
            last = [r for r in metrics.read(part.folder / point.name / "metrics.jsonl") if r["split"] == "final"][-1:]
            result = last[0].get(part.protocol.measure) if last else None
            words = configs.words(point.config, default)
            config = " ".join(word.removeprefix("--config.") for word in words)
            keys.append([name, point.values["seed"], point.values["learning_rate"], result, point.name, config])
    head = ["variant", "seed", "learning rate", part.protocol.measure, "folder", "config, where it differs"]
    texts = [
        ["" if key is None else f"{key:.5g}" if isinstance(key, float) else f"{key}" for key in row] for row in keys
    ]
    return page.Table([head, *texts], keys)


def _learning(curves: Mapping, flops: Mapping[str, float | None], timed: bool) -> list[Chart]:
    """Mean validation losses with the range of the seeds: over tokens, seconds, and FLOPs where these differ."""
    series, spread = [{} for _ in COLUMNS], [{} for _ in COLUMNS]
    for name, of_variant in curves.items():
        found = [curve for curve in of_variant if len(curve)]
        shared = min(map(len, found), default=0)  # a run that diverged has fewer
        if shared:
            losses = np.array([curve[:shared, 2] for curve in found])
            tokens, seconds = (np.mean([curve[:shared, at] for curve in found], axis=0) for at in (0, 1))
            for at, x in enumerate((tokens, seconds, tokens * (flops[name] or np.nan))):
                series[at][name], spread[at][name] = (x, losses.mean(0)), (losses.min(0), losses.max(0))
    wanted = [True, timed, len(set(flops.values())) > 1 and None not in flops.values()]
    return [
        Chart(f"Loss over {what}", f"{what} of training", AXES["loss"], lines, around)
        for what, lines, around, is_wanted in zip(COLUMNS, series, spread, wanted)
        if is_wanted and any(len(x) > 1 for x, _ in lines.values())
    ]


def _against_state(rows: Sequence[Mapping], measure: str) -> list[Chart]:
    """The measure against the bytes that decoding keeps; nothing where they are equal."""
    known = [row for row in rows if row[measure] is not None and row["decode_state_bytes_1x"]]
    if len({row["decode_state_bytes_1x"] for row in known}) < 2:
        return []
    series = {row["variant"]: ([row["decode_state_bytes_1x"]], [row[measure]]) for row in known}
    halves = {row["variant"]: (row[measure], row[f"{measure}_interval"] or 0) for row in known}
    spread = {name: ([value - half], [value + half]) for name, (value, half) in halves.items()}
    title = f"{measure.capitalize()} against the state that decoding keeps"
    return [Chart(title, "bytes of a full context", AXES[measure], series, spread, log="x")]


def _against_length(measured: Mapping[str, Mapping]) -> list[Chart]:
    series, spread = {}, {}
    for name, found in measured.items():
        by_length = found.get("accuracies_by_length", {})
        means = np.array([mean_and_margin(values) for values in by_length.values()]).reshape(-1, 2).T
        if by_length:
            half = np.nan_to_num(means[1])
            series[name], spread[name] = (list(map(int, by_length)), means[0]), (means[0] - half, means[0] + half)
    title = "Accuracy against length"
    return (
        [Chart(title, "tokens, of which the second half is answered", AXES["accuracy"], series, spread, log="x")]
        if series
        else []
    )
