"""Report one part of a comparison: the section of its page, with notes, curves and the configs of its runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnlab import config as configs
from attnlab.comparing import protocol as protocols
from attnlab.comparing import table
from attnlab.comparing.protocol import Protocol
from attnlab.comparing.race import ROUNDS, Race
from attnlab.comparing.replication import Published
from attnlab.comparing.variants import Variant
from attnlab.config import RunConfig
from attnlab.results import charts, page, statistics
from attnlab.results.charts import Figure
from attnlab.results.table import Column, Table, decimals, minus
from attnlab.sweeping.grid import Point
from attnlab.training import metrics

AXES = {"loss": "loss (nats per token)", "accuracy": "accuracy"}
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
COLUMNS = ("tokens", "seconds", "FLOPs")  # x axes of the loss curves


class TaskComparison(NamedTuple):
    """A part of a comparison: a text or a task, with its own table.

    Attributes:
      name: name of the task; "" if the config's text is the only part.
      folder: holds its runs and its table.
      protocol: its config, learning rates and seeds.
      variants: the variants, with adjusted widths if sizes are matched.
      match: the size that is matched.
      published: published results for this part, if any.
    """

    name: str
    folder: Path
    protocol: Protocol
    variants: list[Variant]
    match: str
    published: Published | None

    def config_of(self, variant: Variant) -> RunConfig:
        """Return a variant's config, with the seed and learning rate of the protocol's config."""
        return variant.config(self.protocol.config)


def section(
    comparison: TaskComparison,
    whole: Table,
    final: Mapping[str, list[Point]],
    measured: Mapping,
    raced: Race | None,
    command: Callable[[int], str],
) -> page.Section:
    """Build the section of a part from its table, the final runs of each variant, their measurements, and their race.

    `command(n)` returns the command for a comparison over n seeds.
    """
    measure, rows = comparison.protocol.measure, whole.rows
    version = ["version"] * any(row["version"] for row in rows)
    answer = ["verdict", "difference_p", f"difference_{measure}", measure, table.COSTS[comparison.match]]
    speeds = {row["variant"]: row["train_tokens_per_second"] or np.nan for row in rows}
    curves = {
        name: [protocols.curve(comparison.folder / point.name, speeds[name]) for point in points]
        for name, points in final.items()
    }
    flops = {row["variant"]: row["flops_per_token_train"] for row in rows}
    timed = measure == "loss" and raced is not None
    needed = [row["difference_seeds_needed"] or 0 for row in rows]
    needed = max((count for count in needed if count < statistics.MOST_SEEDS), default=0)
    return page.Section(
        comparison.name or "text",
        sentences(rows, measure),
        command(needed) if needed else "",
        whole.only("variant", *version, *answer),
        [*_learning(curves, flops, timed), *_against_state(rows, measure), *_against_length(measured)],
        _notes(comparison, rows, raced),
        {"All columns": whole.shown(), "All runs": _runs(comparison, final)},
    )


def _notes(comparison: TaskComparison, rows: Sequence[Mapping], raced: Race | None) -> list[str]:
    """Explain how to read the table, beyond the help of its columns, and append `remarks`."""
    protocol, seeds, others = comparison.protocol, len(comparison.protocol.seeds), len(rows) - 1
    rates, tuning = ", ".join(f"{rate:g}" for rate in protocol.rates), len(protocol.tuning_seeds)
    extended = any(row["learning_rates_tried"] != " ".join(map("{:g}".format, protocol.rates)) for row in rows)
    rates += ", and more if the best one was the lowest or highest" if extended else ""
    on = "text" if protocol.measure == "loss" else "sequences"
    chosen = f"s {rates}, chosen with {tuning} other seed{'s' if tuning > 1 else ''} on other {on}"
    now, more = (statistics.quantile(count, statistics.LEVEL / others) for count in (seeds, 2 * seeds))
    false = 7 if tuning > 2 else 11
    noise = f" Intervals exclude the noise of that choice: up to {false} % of tables of equal variants have a verdict."
    notes = [
        f"Learning rate{f'{chosen}.{noise}' if len(protocol.rates) > 1 else f' {rates}, the same for all.'}",
        f"The interval of a difference is ± {now:.1f} standard errors (seeds: {seeds}, differences: {others}); with "
        f"{2 * seeds} seeds it is ± {more:.1f}. Curves are means, with the range over seeds.",
    ]
    if any(row["verdict"] == statistics.OPEN for row in rows):
        notes.append(
            "Adding seeds is a second look: if no variant differs, about 10 % of tables then have a verdict, not 5 %. "
            "Choose the number of seeds beforehand, or repeat the comparison with new seeds (config.seed)."
        )
    if raced:
        notes.append(
            f"Tokens/s and seconds come from one race of {ROUNDS} rounds, all variants in turn: {raced.hour}, "
            f"{raced.machine}. A verdict at equal time holds at the lowest, median and highest ratio of speeds."
        )
    if any(row["verdict"] == table.UNTRAINED for row in rows):
        guess = f"a guess among the tokens of a sequence ({rows[0]['blind']:.3f})"
        notes.append(f"Not trained far enough: neither variant beats {guess} by more than chance.")
    return [*notes, *remarks(comparison, rows)]


def remarks(comparison: TaskComparison, rows: Sequence[Mapping]) -> list[str]:
    """Return warnings about what went wrong or may mislead."""
    edge = (
        "its best learning rate is still the lowest or highest after "
        f"{comparison.protocol.extensions} extensions: allow more"
    )
    notes, horizon = [], rows[0]["tokens_per_parameter"]
    if horizon and horizon < table.EARLY:
        notes.append(
            f"Early: below {table.EARLY} tokens per parameter (here {horizon:.2g}), rankings may change with more."
        )
    models = {variant.name: comparison.config_of(variant).model for variant in comparison.variants}
    first, *others = models
    layers, positions = models[first].layers, models[first].position_encoding
    both = [name for name in others if models[name].layers != layers and models[name].position_encoding != positions]
    if both:
        notes.append(f"Two things differ from {first}, layers and positions ({positions}), in {', '.join(both)}.")
    for row in rows:
        name = row["variant"]
        notes += [f"{name}: {edge}, with --extensions."] * row["learning_rate_at_edge"]
        notes += [f"{name}: its operators do not conform."] * (row["conforms"] is False)
        notes += [f"{name}: no width makes it as large as the first variant."] * (not row["comparable"])
        notes += [f"{name}: {row['diverged']} runs diverged; each counts at chance level."] * (row["diverged"] > 0)
        notes += [f"{name}: {row['failed']} runs failed; the means exclude them."] * (row["failed"] > 0)
    return notes


def sentences(rows: Sequence[Mapping], measure: str) -> list[str]:
    """The answer: one sentence for each variant but the first."""
    return [_sentence(row, rows[0], measure) for row in rows[1:]]


def _sentence(row: Mapping, start: Mapping, measure: str) -> str:
    name, difference, verdict, first = row["variant"], row[f"difference_{measure}"], row["verdict"], start["variant"]
    if verdict == "failed":
        return f"{name} has no run to compare with {first}."
    count = WORDS[row["pairs"]] if row["pairs"] < len(WORDS) else f"{row['pairs']}"
    count += " seed" + "s" * (row["pairs"] != 1)
    half, p = row[f"difference_{measure}_interval"], row["difference_p"]
    digits, unit = decimals(half or difference, 4), " nats" if measure == "loss" else ""
    around = f" ± {half:.{digits}f}" if half is not None else ""
    if verdict == table.UNTRAINED:
        answers = f"accuracies {row[measure]:.3f} and {start[measure]:.3f}, blind guess {row['blind']:.3f}"
        return f"{name} and {first} are not trained far enough to compare: {answers} ({count})."
    horizon, after = start["tokens_per_parameter"], "after the same number of tokens"
    after += f", {horizon:.2g} per parameter" if horizon else ""
    evidence = f"{count}" if p is None else f"p {'' if p < 0.001 else '= '}{table.p_value(p)}, {count}"
    evidence += "; rate at the edge" * bool(row["rates_at_edge"])
    if verdict == statistics.OPEN:
        needed = row["difference_seeds_needed"] and table.seeds_needed(row).replace(" (", " seeds (")
        evidence += f"; {needed} would decide it" if needed else ""
        by = minus(f"{difference:+.{digits}f}{around}{unit}")
        text = f"{name} and {first} do not differ significantly {after}: {by} ({evidence})"
    else:
        by = f"{abs(difference):.{digits}f}{around}{unit}"
        text = f"{name} is {verdict} than {first} by {by} {after} ({evidence})"
    later = row["verdict_at_equal_time"] if measure == "loss" else None
    if later in ("better", "worse", statistics.OPEN):
        text += f", {'also' if later == verdict else f'but {statistics.in_words(later)}'} at equal time"
    return text + "."


def _runs(comparison: TaskComparison, final: Mapping[str, list[Point]]) -> Table:
    """Table of all runs: their results, and the fields of their configs that differ from the defaults."""
    measure, default = comparison.protocol.measure, RunConfig()

    def result(point: Point) -> float | None:
        last = [r for r in metrics.read(comparison.folder / point.name / "metrics.jsonl") if r["split"] == "final"][-1:]
        return last[0].get(measure) if last else None

    def config(point: Point) -> str:
        return " ".join(word.removeprefix("--config.") for word in configs.words(point.config, default))

    columns = [
        Column("variant", "variant", lambda point: point.values["variant"]),
        Column("seed", "seed", lambda point: point.values["seed"]),
        Column("learning_rate", "learning rate", lambda point: point.values["learning_rate"], format=".5g"),
        Column(measure, measure, result, table.MEASURES[measure][0], ".5g"),
        Column("folder", "folder", lambda point: point.name),
        Column("config", "changed config fields", config),
    ]
    return Table.of(columns, [point for points in final.values() for point in points])


def _learning(curves: Mapping, flops: Mapping[str, float | None], timed: bool) -> list[Figure]:
    """Plot mean validation loss and its range over seeds against tokens, seconds if timed, and FLOPs if they differ."""
    series, spread = [{} for _ in COLUMNS], [{} for _ in COLUMNS]
    for name, variant_curves in curves.items():
        drawn = [curve for curve in variant_curves if len(curve)]
        shared = min(map(len, drawn), default=0)  # a run that diverged has fewer validations
        if shared:
            losses = np.array([curve[:shared, 2] for curve in drawn])
            tokens, seconds = (np.mean([curve[:shared, at] for curve in drawn], axis=0) for at in (0, 1))
            for at, x in enumerate((tokens, seconds, tokens * (flops[name] or np.nan))):
                series[at][name], spread[at][name] = (x, losses.mean(0)), (losses.min(0), losses.max(0))
    wanted = [True, timed, len(set(flops.values())) > 1 and None not in flops.values()]
    return [
        charts.curves(f"Loss over {what}", f"{what} of training", AXES["loss"], lines, around)
        for what, lines, around, is_wanted in zip(COLUMNS, series, spread, wanted)
        if is_wanted and any(len(x) > 1 for x, _ in lines.values())
    ]


def _against_state(rows: Sequence[Mapping], measure: str) -> list[Figure]:
    """Plot the measure against the bytes of decoding state; return [] if all variants have states of one size."""
    known = [row for row in rows if row[measure] is not None and row["decode_state_bytes_1x"]]
    if len({row["decode_state_bytes_1x"] for row in known}) < 2:
        return []
    series = {row["variant"]: ([row["decode_state_bytes_1x"]], [row[measure]]) for row in known}
    halves = {row["variant"]: (row[measure], row[f"{measure}_interval"] or 0) for row in known}
    spread = {name: ([value - half], [value + half]) for name, (value, half) in halves.items()}
    title = f"{measure.capitalize()} against the size of the decoding state"
    return [charts.curves(title, "bytes for a full context", AXES[measure], series, spread, log="x")]


def _against_length(measured: Mapping[str, Mapping]) -> list[Figure]:
    series, spread = {}, {}
    for name, measurements in measured.items():
        by_length = measurements.get("accuracies_by_length", {})
        means = np.array([statistics.mean_and_margin(values) for values in by_length.values()]).reshape(-1, 2).T
        if by_length:
            half = np.nan_to_num(means[1])
            series[name], spread[name] = (list(map(int, by_length)), means[0]), (means[0] - half, means[0] + half)
    title = "Accuracy against length"
    return (
        [
            charts.curves(
                title, "length of the sequence (answers in the second half)", AXES["accuracy"], series, spread, log="x"
            )
        ]
        if series
        else []
    )
