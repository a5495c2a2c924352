"""The table of a comparison: a row a variant, as records, sentences, texts of columns, CSV and Markdown."""

import csv
import math
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.comparing import protocol as protocols
from attnlab.comparing import race as races
from attnlab.comparing import statistics
from attnlab.comparing.protocol import Protocol
from attnlab.comparing.race import LONGER, SPEEDS
from attnlab.comparing.variants import Variant
from attnlab.data.tasks import named
from attnlab.study.report import mean_and_margin
from attnlab.support import paths
from attnlab.support.errors import UserError
from attnlab.training import overrides

TABLE, TEXT = "table.csv", "table.md"
FACTS = ("parameters", "flops_per_token_train", "flops_per_token_decode", "peak_memory_bytes")
LENGTHS = {"loss": (1, 2, 4), "accuracy": (1, 2, 4, 8)}  # over the training's, at which a measure is recorded
# The names of columns in a table; one without news is left out.
NAMES = {
    "variant": "variant",
    "accuracy": "accuracy",
    "difference_accuracy": "difference",
    "loss": "loss",
    "difference_loss": "difference",
    "difference_p": "p",
    "verdict": "verdict",
    "version": "version",
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
# The cost that a comparison's question is about, by --match: the last of the six columns that come first.
COSTS = {
    "none": "train_tokens_per_second",
    "parameters": "parameters",
    "flops": "flops_per_token_train",
    "state": "decode_state_bytes_1x",
}
INTERVALS = ("loss", "accuracy", "difference_loss", "difference_accuracy", "loss_at_equal_time")
UNTRAINED = "not trained far enough"
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def rows(
    protocol: Protocol,
    variants: Sequence[Variant],
    folder: Path,
    rates: Mapping[str, tuple[float, bool]],
    measured: Mapping[str, Mapping],
    speeds: Mapping[str, Mapping[str, Sequence[float]]] = types.MappingProxyType({}),
) -> list[dict[str, Any]]:
    """The records of a comparison with the first variant, one a variant, in their order.

    `measured` and `speeds`, of one race, are by variant and column.
    """
    points = [protocol.final(variant, rates[variant.name][0]) for variant in variants]
    workdirs = [[folder / point.name for point in of_variant] for of_variant in points]
    results = {
        measure: np.array([[protocols.result(workdir, measure) for workdir in of_variant] for of_variant in workdirs])
        for measure in dict.fromkeys((protocol.measure, "loss"))
    }
    raced = [speeds.get(variant.name, {}) for variant in variants]
    at_time, in_time = races.at_equal_time(workdirs, [each.get(SPEEDS[0], [math.nan]) for each in raced])
    sign = -1 if protocol.measure == "accuracy" else 1  # the lower result is the better one
    config = points[0][0].config
    resolution = protocols.resolution(config, protocol.measure)
    steps = {"loss": 0.0, protocol.measure: resolution}
    compared = [None, *statistics.differences(sign * results[protocol.measure], resolution)]
    means = [
        {key: x for name, of in results.items() for key, x in _mean(name, of[n], steps[name]).items()}
        for n in range(len(variants))
    ]
    task = named.parse(config.data.name)
    blind = task.blind(config.model.context) if task else None
    # A guess on as many answers is better by chance, by two of its standard deviations at most.
    guessed = blind + 2 * (blind * (1 - blind) * resolution) ** 0.5 if task else math.nan
    are_blind = [means[n].get("accuracy") is not None and means[n]["accuracy"] <= guessed for n in range(len(means))]
    return [
        {
            "variant": variant.name,
            **means[n],
            "seeds": int((~np.isnan(results["loss"][n])).sum()),
            "pairs": int((~np.isnan(results["loss"][n] - results["loss"][0])).sum()),
            **_difference(compared[n], protocol.measure, sign),
            **({"verdict": UNTRAINED} if n and are_blind[0] and are_blind[n] else {}),
            **({"blind": blind} if task else {}),
            "version": overrides.version(points[n][0].config) or None,
            "diverged": sum(map(protocols.diverged, workdirs[n])),
            "failed": int(np.isnan(results["loss"][n]).sum()),
            "learning_rate": rates[variant.name][0],
            "learning_rate_at_edge": rates[variant.name][1],
            "comparable": variant.comparable,
            **_mean("loss_at_equal_time", at_time[n]),
            "verdict_at_equal_time": in_time[n],
            **_measured(measured.get(variant.name, {}), protocol.measure),
            **_speeds(raced[n]),
        }
        for n, variant in enumerate(variants)
    ]


def _speeds(raced: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """The median speeds of a variant, and the range of the training's."""
    found = {name: float(np.median(raced[name])) if name in raced else None for name in SPEEDS}
    trained = raced.get(SPEEDS[0])
    ends = (min(trained), max(trained)) if trained else (None, None)
    return found | {f"{SPEEDS[0]}_{end}": value for end, value in zip(("low", "high"), ends)}


def _mean(name: str, results: np.ndarray, resolution: float = 0.0) -> dict:
    mean, half = mean_and_margin(results[~np.isnan(results)], resolution=resolution)
    return {name: _number(mean), f"{name}_interval": _number(half)}


def _difference(found: statistics.Difference | None, measure: str, sign: int) -> dict:
    names = (f"difference_{measure}", f"difference_{measure}_interval", "difference_p", "verdict")
    names += ("difference_detectable", *(f"difference_seeds_needed{end}" for end in ("", "_low", "_high")))
    if found is None:
        return dict.fromkeys(names)
    detectable = _number(found.detectable) if found.verdict == statistics.OPEN else None
    values = (_number(sign * found.mean + 0.0), *map(_number, found[1:3]), found.verdict, detectable)
    return dict(zip(names, (*values, *(found.seeds_needed or (None, None, None)))))


def _measured(found: Mapping, measure: str) -> dict:
    """Of the measurements of a variant, what a table has: costs, lengths, and whether its operators conform."""
    lengths = [f"{measure}_{times}x" for times in LENGTHS[measure]]
    sizes = [f"decode_state_bytes_{times}x" for times in LONGER]
    certificate = found.get("certificate") or {}
    conforms = {"conforms": certificate.get("conforms"), "conforms_worst": certificate.get("worst")}
    return conforms | {name: found.get(name) for name in (*FACTS, *lengths, *sizes)}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


# In words ------------------------------------------------------------------------------------------------------------


def sentences(found: Sequence[Mapping], measure: str) -> list[str]:
    """The answer, a sentence for each variant but the first."""
    return [_sentence(row, found[0], measure) for row in found[1:]]


def _sentence(row: Mapping, start: Mapping, measure: str) -> str:
    name, difference, verdict, first = row["variant"], row[f"difference_{measure}"], row["verdict"], start["variant"]
    if verdict == "failed":
        return f"{name} has no run to compare with {first}."
    count = WORDS[row["pairs"]] if row["pairs"] < len(WORDS) else f"{row['pairs']}"
    count += " seed" + "s" * (row["pairs"] != 1)
    half, p = row[f"difference_{measure}_interval"], row["difference_p"]
    digits = _digits(half or difference, 3)
    around = f" ± {half:.{digits}f}" if half is not None else ""
    if verdict == UNTRAINED:
        answers = f"they answer {row[measure]:.3f} and {start[measure]:.3f} rightly, a blind guess {row['blind']:.3f}"
        return f"{name} and {first} are not trained far enough to compare: {answers} ({count})."
    evidence = f"{count}" if p is None else f"p {_p(p) if p < 0.001 else f'= {_p(p)}'}, {count}"
    if verdict == statistics.OPEN:
        needed = row["difference_seeds_needed"] and _cell("difference_seeds_needed", row).replace(" (", " seeds (")
        evidence += f"; {needed} would decide it" if needed else ""
        by = f"{difference:+.{digits}f}{around}{_unit(measure)}"
        text = f"{name} and {first} are not told apart after as many tokens: {by} ({evidence})"
    else:
        by = f"{abs(difference):.{digits}f}{around}{_unit(measure)}"
        text = f"{name} is {verdict} than {first} by {by} after as many tokens ({evidence})"
    later = row["verdict_at_equal_time"] if measure == "loss" else None
    if later in ("better", "worse", statistics.OPEN):
        text += f", {'also' if later == verdict else f'but {later}'} after as many seconds"
    return text + "."


def _digits(size: float | None, least: int) -> int:
    """Decimals that show the first digit of an interval, or of a difference without one."""
    return least if not size else min(9, max(least, -math.floor(math.log10(abs(size)))))


def _p(p: float) -> str:
    """p to two digits, or to as many as it takes to show on which side of `statistics.LEVEL` it lies."""
    if p < 0.001:
        return "< 0.001"
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))
    return next(text for text in texts if (float(text) < statistics.LEVEL) == (p < statistics.LEVEL))


def _unit(measure: str) -> str:
    return " nats" if measure == "loss" else ""


# As texts ------------------------------------------------------------------------------------------------------------


def first_columns(found: Sequence[Mapping], measure: str, match: str = "none") -> list[str]:
    """The six columns that answer the question: variant, result, difference, p, verdict, and the cost it is about."""
    names = ["variant", measure, f"difference_{measure}", "difference_p", "verdict", COSTS[match]]
    return [*names[:1], *["version"] * any(row["version"] for row in found), *names[1:]]


def all_columns(found: Sequence[Mapping]) -> list[str]:
    """The columns of `NAMES` that a table has and that have news."""
    return [name for name in NAMES if name in found[0] and _has_news(name, [row[name] for row in found])]


def cells(found: Sequence[Mapping], names: Sequence[str]) -> list[list[str]]:
    """Columns as texts, their names first; losses and accuracies with their intervals."""
    return [[NAMES[name] for name in names], *([_cell(name, row) for name in names] for row in found)]


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
        sign, digits = "+" if name.startswith("difference") else "", _digits(half, 4)
        return f"{value:{sign}.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None else "")
    if name == SPEEDS[0]:
        return f"{value:,.0f} ({row[f'{name}_low']:,.0f} to {row[f'{name}_high']:,.0f})"
    if name == "learning_rate":
        return f"{value:.3g}" + (" (edge)" if row["learning_rate_at_edge"] else "")
    if name == "difference_p":
        return _p(value)
    if name == "difference_detectable" or name.startswith(("loss_", "accuracy_")):
        return f"{value:.4f}"
    if name == "difference_seeds_needed":
        ends = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
        needed, low, high = (f"{end}" if end < statistics.MOST_SEEDS else f"≥ {end:,}" for end in ends)
        return f"{needed} ({low} to {high})"
    if name == "comparable":
        return "yes" if value else "no"
    if name == "conforms":
        return f"{row['conforms_worst']:.2f}" if value else "no"
    return value if isinstance(value, str) else f"{value:,.0f}" if value < 1e6 else f"{value:.3g}"


def write(found: Sequence[Mapping], folder: Path, sentences: Sequence[str], notes: Sequence[str]) -> None:
    """Write `table.csv`, and `table.md` with the answer above the table and notes below it."""
    paths.write_csv(folder / TABLE, found)
    paths.write_text(folder / TEXT, markdown(cells(found, all_columns(found)), sentences, notes))


def markdown(cells: Sequence[Sequence[str]], before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """A table of texts, names of its columns first, between paragraphs."""
    heads, *lines = [[_plain(cell) for cell in line] for line in cells]
    table = "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines])
    return "\n\n".join([*map(_plain, before), table, *map(_plain, after)]) + "\n"


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
    if name in ("variant", "version") or name.startswith("verdict"):
        return text
    if text in ("True", "False"):
        return text == "True"
    number = float(text)
    return int(number) if text.lstrip("-").isdigit() else number
