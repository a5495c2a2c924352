"""The table of a comparison: the results behind each row, and the columns, each declared once."""

import csv
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab.comparing import protocol as protocols
from attnlab.comparing import race as races
from attnlab.comparing.protocol import Protocol, Rate
from attnlab.comparing.race import SPEEDS
from attnlab.comparing.variants import Variant
from attnlab.data.tasks import named
from attnlab.results import statistics
from attnlab.results.statistics import OPEN, Difference, in_words, known, mean_and_margin
from attnlab.results.table import Column, with_interval
from attnlab.support.errors import UserError
from attnlab.training import overrides

TABLE, TEXT = "table.csv", "table.md"
# The cost that matters for each --match: the last column of the short table.
COSTS = {
    "none": "train_tokens_per_second",
    "parameters": "parameters",
    "flops": "flops_per_token_train",
    "state": "decode_state_bytes_1x",
}
LENGTHS = {"loss": (1, 2, 4), "accuracy": (1, 2, 4, 8)}  # recorded lengths, in multiples of the training length
EARLY = 5  # tokens per parameter; about 20 are compute-optimal (Hoffmann et al. 2022)
UNTRAINED = "not trained far enough"


class VariantResults(NamedTuple):
    """All results of a variant, from which its table row is built.

    Attributes:
      results: values of the compared measure and of the loss, by seed; NaN where a run failed.
      resolution: the step between two results of the compared measure.
      pairs: differences of the compared measure from the first variant, by seed; NaN where either run failed.
      difference: statistics of `pairs`, with a verdict (higher accuracy is better); None for the first variant.
      verdict: the difference's verdict, or `UNTRAINED`; None for the first variant.
      edge: whether the learning rate of this variant, or of the first, is at an edge of the tried rates.
      at_time: losses after equal training time, by seed, and the verdict on them.
      blind: accuracy of the best guess; None for a text.
      tokens: number of tokens that each run trains on.
      measured: measurements from `measuring`, by column.
      speeds: tokens per second in each round of the race, by column.
    """

    variant: Variant
    rate: Rate
    version: str | None
    diverged: int
    results: Mapping[str, np.ndarray]
    resolution: float
    pairs: np.ndarray
    difference: Difference | None
    verdict: str | None
    edge: bool
    at_time: tuple[np.ndarray, str | None]
    blind: float | None
    tokens: int
    measured: Mapping[str, Any]
    speeds: Mapping[str, Sequence[float]]


def results(
    protocol: Protocol,
    variants: Sequence[Variant],
    folder: Path,
    rates: Mapping[str, Rate],
    measured: Mapping[str, Mapping],
    speeds: Mapping[str, Mapping[str, Sequence[float]]] = types.MappingProxyType({}),
) -> list[VariantResults]:
    """Collect all variants' results in order; `measured` and `speeds` (from one race) are by variant, then column."""
    measure, points = protocol.measure, [protocol.final(variant, rates[variant.name].chosen) for variant in variants]
    workdirs = [[folder / point.name for point in variant_points] for variant_points in points]
    values = {
        name: np.array(
            [[protocols.result(workdir, name) for workdir in variant_workdirs] for variant_workdirs in workdirs]
        )
        for name in dict.fromkeys((measure, "loss"))
    }
    raced = [speeds.get(variant.name, {}) for variant in variants]
    at_time, in_time = races.at_equal_time(workdirs, [each.get(SPEEDS[0], [np.nan]) for each in raced])
    sign = -1 if measure == "accuracy" else 1  # after this, lower is better
    config = points[0][0].config
    resolution = protocols.resolution(config, measure)
    compared = [None, *statistics.differences(sign * values[measure], resolution)]
    task = named.parse(config.data.name)
    blind = task.blind(config.model.context) if task else None
    untrained = [task is not None and _is_blind(row, blind, resolution) for row in values[measure]]
    return [
        VariantResults(
            variant=variant,
            rate=rates[variant.name],
            version=overrides.version(points[n][0].config) or None,
            diverged=sum(map(protocols.diverged, workdirs[n])),
            results={name: rows[n] for name, rows in values.items()},
            resolution=resolution,
            pairs=values[measure][n] - values[measure][0],
            difference=compared[n] and compared[n]._replace(mean=sign * compared[n].mean + 0.0),
            verdict=None if not n else UNTRAINED if untrained[0] and untrained[n] else compared[n].verdict,
            edge=rates[variant.name].at_edge or rates[variants[0].name].at_edge,
            at_time=(at_time[n], in_time[n]),
            blind=blind,
            tokens=config.steps * config.batch_size * config.model.context,
            measured=measured.get(variant.name, {}),
            speeds=raced[n],
        )
        for n, variant in enumerate(variants)
    ]


def _is_blind(accuracies: np.ndarray, blind: float, resolution: float) -> bool:
    """Whether the mean accuracy is at most two standard deviations above a blind guess."""
    accuracies = known(accuracies)
    return len(accuracies) > 0 and bool(accuracies.mean() <= blind + 2 * (blind * (1 - blind) * resolution) ** 0.5)


# Columns -------------------------------------------------------------------------------------------------------------

NATS, SHARES = "nats", "share of answers"
MEASURES = {
    "loss": (NATS, "Nats per token, on the second half of the held-out text."),
    "accuracy": (SHARES, "At the answers of held-out sequences of the training length."),
}


def columns(measure: str, seeds: int, variants: int) -> list[Column]:
    """Define the columns of a table that compares variants by "loss" or "accuracy" over seeds."""
    over, others = f"± 95 % over {seeds} seeds", variants - 1
    joint = over if others < 2 else f"± 95 % for all {others}, over {seeds} seeds"
    return [
        *_answer(measure, over, joint),
        *_certainty(MEASURES[measure][0]),
        *_training(over),
        *_measurements(measure),
    ]


def _answer(measure: str, over: str, joint: str) -> list[Column]:
    unit, _ = MEASURES[measure]
    return [
        Column("variant", "variant", lambda of: of.variant.name),
        Column("version", "version", lambda of: of.version, help="Six hex digits that identify a layer's program."),
        Column(
            "verdict",
            "verdict",
            lambda of: of.verdict,
            format=lambda row: in_words(row["verdict"]) + ", rate at the edge" * bool(row["rates_at_edge"]),
            help="Better or worse if the interval of the difference excludes 0. With 'rate at the edge' the best "
            "learning rate of the variant, or of the first, may lie beyond those that were tried.",
        ),
        Column(
            "difference_p",
            "p",
            lambda of: of.difference and _number(of.difference.p),
            format=lambda row: p_value(row["difference_p"]),
            help="Of the paired t-test of the difference, times the number of differences.",
        ),
        *with_interval(
            f"difference_{measure}",
            "difference",
            lambda of: of.difference and of.difference[:2],
            f"{unit}, {joint}",
            "+",
            "From the first variant, paired by seed. With 95 % probability all intervals contain their true values.",
        ),
        *_mean(measure, over, measure),
        *(_mean("loss", over, measure) if measure != "loss" else ()),
        *(
            [Column("blind", "", lambda of: of.blind, help="The accuracy of the best guess.")]
            if measure != "loss"
            else ()
        ),
        Column(
            "rates_at_edge",
            "",
            lambda of: of.edge,
            help="Whether the learning rate of this variant, or of the first, is at an edge.",
        ),
    ]


def _mean(name: str, over: str, measure: str) -> list[Column]:
    unit, help = MEASURES[name]

    def read(of: VariantResults) -> tuple[float, float]:
        return mean_and_margin(known(of.results[name]), resolution=of.resolution if name == measure else 0.0)

    return with_interval(name, name, read, f"{unit}, {over}", help=help)


def _certainty(unit: str) -> list[Column]:
    def when_open(value: Callable[[Difference], Any]) -> Callable[[VariantResults], Any]:
        return lambda of: value(of.difference) if of.verdict == OPEN else None

    def needed(at: int) -> Callable[[VariantResults], int | None]:
        return when_open(lambda difference: difference.seeds_needed and difference.seeds_needed[at])

    return [
        Column(
            "difference_detectable",
            "detectable",
            when_open(lambda difference: _number(difference.detectable)),
            unit,
            ".4f",
            "The smallest difference that these seeds would detect with 80 % power.",
        ),
        Column(
            "difference_seeds_needed",
            "seeds needed",
            needed(0),
            format=seeds_needed,
            help="To show the observed difference with probability 80 %, by the spread of these seeds, and by the ends "
            "of its 95 % interval.",
        ),
        Column("difference_seeds_needed_low", "", needed(1), help="By the lower end."),
        Column("difference_seeds_needed_high", "", needed(2), help="By the upper end."),
        Column("seeds", "", lambda of: len(known(of.results["loss"])), help="Runs with a result."),
        Column("pairs", "", lambda of: len(known(of.pairs)), help="Seeds for which both runs have a result."),
    ]


def _training(over: str) -> list[Column]:
    return [
        Column(
            "diverged",
            "diverged",
            lambda of: of.diverged,
            help="Runs whose loss was not finite; they count at chance level.",
            usual=0,
        ),
        Column(
            "failed",
            "failed",
            lambda of: len(of.pairs) - len(known(of.results["loss"])),
            help="Runs without a result; the means exclude them.",
            usual=0,
        ),
        Column(
            "learning_rate",
            "learning rate",
            lambda of: of.rate.chosen,
            format=lambda row: f"{row['learning_rate']:.3g}" + " (edge)" * row["learning_rate_at_edge"],
            help="The best on the first half of the held-out text, with seeds that are not used again.",
        ),
        Column("learning_rates_tried", "", lambda of: " ".join(map("{:g}".format, of.rate.tried)), help="With a loss."),
        Column(
            "learning_rate_at_edge",
            "",
            lambda of: of.rate.at_edge,
            help="Whether it is the lowest or highest.",
        ),
        *with_interval(
            "loss_at_equal_time",
            "loss at equal time",
            lambda of: mean_and_margin(known(of.at_time[0])),
            f"{NATS}, {over}",
            help="After the training time of the fastest variant, at the speeds of the race.",
        ),
        Column("verdict_at_equal_time", "", lambda of: of.at_time[1], help="The same at all speed ratios of the race."),
    ]


def _measurements(measure: str) -> list[Column]:
    measured = [
        *((f"{measure}_{times}x", *_at_length(measure, times)) for times in LENGTHS[measure]),
        ("parameters", "parameters", "", "The number of parameters."),
        ("flops_per_token_train", "FLOPs/token", "", "Of training, counted in the traced program."),
        ("flops_per_token_decode", "", "", "Of decoding with a full context."),
        ("peak_memory_bytes", "peak bytes", "", "Of a training step, as the compiler allocates them."),
        ("decode_state_bytes_1x", "state bytes", "", "Of the decoding state for one text that fills the context."),
        ("decode_state_bytes_8x", "", "", "For a text eight times as long."),
    ]

    def measurement(key: str) -> Callable[[VariantResults], Any]:
        return lambda of: of.measured.get(key)

    def certificate(key: str) -> Callable[[VariantResults], Any]:
        return lambda of: (of.measured.get("certificate") or {}).get(key)

    return [
        *(Column(key, title, measurement(key), format=format, help=help) for key, title, format, help in measured),
        Column(
            "tokens_per_parameter",
            "tokens/parameter",
            lambda of: of.tokens / of.measured["parameters"] if "parameters" in of.measured else None,
            format=".2g",
            help=f"Of training. Below {EARLY}, rankings may change with more.",
        ),
        *_speeds(),
        Column(
            "conforms",
            "conforms",
            certificate("conforms"),
            format=lambda row: f"{row['conforms_worst']:.2f}" if row["conforms"] else "no",
            help="The largest error of the variant's operators, in units of its bound by the specification.",
        ),
        Column("conforms_worst", "", certificate("worst"), help="The largest error, whether or not it conforms."),
        Column(
            "comparable",
            "comparable",
            lambda of: of.variant.comparable,
            help="Whether the matched size is within 2 % of the first variant's; a state within 5 %.",
            usual=True,
        ),
    ]


def _at_length(measure: str, times: int) -> tuple[str, str, str]:
    """Title, format and help of the column for a measure at `times` contexts."""
    if times == 1:
        return (
            "",
            ".4f",
            "Within the context." if measure == "loss" else "In the second half of sequences as long as the context.",
        )
    if measure == "loss":
        return f"loss to {times}×", ".4f", f"At positions between {times // 2} and {times} contexts."
    return f"accuracy at {times}×", ".4f", f"In the second half of sequences {times} times as long."


def _speeds() -> list[Column]:
    def speed(name: str, reduce: Callable = np.median) -> Callable[[VariantResults], float | None]:
        return lambda of: float(reduce(of.speeds[name])) if name in of.speeds else None

    trained, *others = SPEEDS
    titles = dict(zip(others, ("prefill tokens/s", "", "decode tokens/s", "decode tokens/s at 8×"), strict=True))
    return [
        Column(
            trained,
            "training tokens/s",
            speed(trained),
            format=lambda row: "{:,.0f} ({:,.0f} to {:,.0f})".format(
                *(row[f"{trained}{end}"] for end in ("", "_low", "_high"))
            ),
            help="The median of the race's rounds, and the slowest and fastest round.",
        ),
        Column(f"{trained}_low", "", speed(trained, min), help="Of the slowest round."),
        Column(f"{trained}_high", "", speed(trained, max), help="Of the fastest round."),
        *(Column(name, title, speed(name), help="For one text, median.") for name, title in titles.items()),
    ]


def seeds_needed(row: Mapping[str, Any]) -> str:
    """Format the number of seeds that would decide a row's difference, with its uncertainty."""
    ends = [row[f"difference_seeds_needed{end}"] for end in ("", "_low", "_high")]
    needed, low, high = (f"{end}" if end < statistics.MOST_SEEDS else f"≥ {end:,}" for end in ends)
    return f"{needed} ({low} to {high})"


def p_value(p: float) -> str:
    """Format p to two digits, or to more if needed to show on which side of `statistics.LEVEL` it lies."""
    if p < 0.001:
        return "< 0.001"
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))
    return next(text for text in texts if (float(text) < statistics.LEVEL) == (p < statistics.LEVEL))


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


# Files ---------------------------------------------------------------------------------------------------------------


def read(folder: str | Path) -> list[dict[str, Any]]:
    """Read the records of a comparison's `table.csv`: numbers, strings and booleans, None for empty cells.

    Raises:
      UserError: the file is missing or damaged.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "table.csv").write_text("variant,loss,verdict,comparable\\nalibi,1.5,,True\\n")
    >>> read(folder)
    [{'variant': 'alibi', 'loss': 1.5, 'verdict': None, 'comparable': True}]
    """
    path = Path(folder) / TABLE
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                {name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file, strict=True)
            ]
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no {TABLE}: name the --workdir of attnlab compare") from error
    except (OSError, csv.Error, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}): repeat the command that wrote it") from error


def _value(name: str, text: str | None):
    if not text:
        return None
    if name in ("variant", "version", "learning_rates_tried") or name.startswith("verdict"):
        return text
    if text in ("True", "False"):
        return text == "True"
    number = float(text)
    return int(number) if text.lstrip("-").isdigit() else number
