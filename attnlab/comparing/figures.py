"""The figures of a comparison: results with their intervals, and losses over tokens. They need matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.comparing import protocol as protocols

AXES = {"loss": "loss on held-out text (nats per token)", "accuracy": "accuracy on held-out sequences"}


def results(rows: Sequence[Mapping], seeds: Mapping[str, Sequence[float]], measure: str = "loss") -> Figure:
    """Each variant's mean result with its 95 % interval, the best on top, and the results of its seeds behind it."""
    sign = -1 if measure == "loss" else 1
    drawn = sorted((row for row in rows if row[measure] is not None), key=lambda row: sign * row[measure])
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 1.4 + 0.36 * len(drawn)))
        for place, row in enumerate(drawn):
            color = plots.COLORS[[r["variant"] for r in rows].index(row["variant"]) % len(plots.COLORS)]
            ended = [result for result in seeds[row["variant"]] if np.isfinite(result)]
            axes.plot(ended, [place] * len(ended), "o", color=color, alpha=0.35, markersize=4)
            error = {"xerr": row[f"{measure}_interval"], "capsize": 4}
            axes.errorbar(row[measure], place, fmt="D", color=color, markersize=5, **error)
        axes.set_yticks(range(len(drawn)), [_label(row) for row in drawn])
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        axes.set_xlabel(f"{AXES[measure]}, 95 % interval over seeds")
        axes.grid(axis="x", alpha=0.25)
        return plots.finished(figure, f"Verdicts against {rows[0]['variant']}, corrected for their number")


def _label(row: Mapping) -> str:
    return f"{row['variant']}\n{row['verdict']}" if row["verdict"] else row["variant"]


def curves(workdirs: Mapping[str, Sequence[Path]]) -> Figure:
    """Mean validation loss of each variant over the tokens it was trained on, with the range of its seeds."""
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(6.8, 4))
        for number, (name, of_variant) in enumerate(workdirs.items()):
            found = [curve for workdir in of_variant if len(curve := protocols.curve(workdir))]
            if not found:
                continue
            shared = min(map(len, found))  # a run that diverged has fewer
            values = np.array([curve[:shared, 2] for curve in found])
            tokens, color = found[0][:shared, 0], plots.COLORS[number % len(plots.COLORS)]
            axes.plot(tokens, values.mean(0), color=color, label=name, marker="o", markersize=3)
            axes.fill_between(tokens, values.min(0), values.max(0), color=color, alpha=0.18, linewidth=0)
        axes.set_xlabel("tokens of training")
        axes.set_ylabel(AXES["loss"])
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
        return plots.finished(figure, "Loss over tokens: mean and range of the seeds")
