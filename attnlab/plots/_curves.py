"""Curves of measurements and of runs."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from attnlab.plots import _style
from attnlab.runs import metrics


def lines(
    series: Mapping[str, tuple],
    title: str,
    *,
    x: str,
    y: str,
    log: str = "",
    spread: Mapping[str, Sequence[float]] | None = None,
    dashed: Sequence[str] = (),
    markers: bool = True,
) -> Figure:
    """Curves on one pair of axes.

    Args:
      series: (xs, ys) by name.
      title: the finding.
      x, y: axis labels, with the unit.
      log: "x", "y" or "xy": logarithmic axes.
      spread: by name, a deviation for each point, drawn as a band.
      dashed: names of dashed curves, such as a theoretical one.
      markers: whether to mark the points.

    >>> figure = lines({"loss": ([0, 1], [2.0, 1.0])}, "The loss halves", x="step", y="loss (nats per token)")
    >>> figure.axes[0].get_ylabel()
    'loss (nats per token)'
    """
    with plt.rc_context(_style.STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4))
        curves(axes, series, x=x, y=y, log=log, spread=spread, dashed=dashed, markers=markers)
        return _style.finished(figure, title)


def panels(drawn: Mapping[str, Mapping], title: str, *, columns: int = 2) -> Figure:
    """Several panels of curves: panel titles mapped to the arguments of `lines`, except its title.

    >>> panel = {"series": {"a": ([1, 2], [1, 2])}, "x": "n (tokens)", "y": "time (ms)"}
    >>> len(panels({"first": panel, "second": panel}, "Both grow").axes)
    2
    """
    with plt.rc_context(_style.STYLE):
        figure, grid = _style.subplots(len(drawn), columns, (5.0, 3.6))
        names = dict.fromkeys(name for panel in drawn.values() for name in panel["series"])
        colors = dict(zip(names, itertools.cycle(_style.COLORS)))  # one colour per name in all panels
        for (name, panel), axes in zip(drawn.items(), grid):
            curves(axes, **panel, colors=colors)
            axes.set_title(name)
        return _style.finished(figure, title)


def runs(
    workdirs,
    title: str = "Loss of each run",
    *,
    y: str = "loss (nats per token)",
    groups: Mapping[str, str] | None = None,
) -> Figure:
    """Losses of runs over steps: validation as points on a line, training behind them in the same colour.

    A group of runs, such as several seeds, has one colour: a line with points for the mean validation loss, at the
    steps that all of them have, and a thin line for each run.

    Args:
      workdirs: as for `attnlab.metrics`: a folder, a glob, or several.
      title: the finding.
      y: label of the loss axis.
      groups: group by the run's name, both as in `attnlab.metrics`; a run without a group is drawn alone.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "metrics.jsonl").write_text('{"step": 10, "split": "val", "loss": 2.5}')
    >>> len(runs(folder).axes[0].lines)
    1
    """
    columns, members = metrics(workdirs), {}
    for name in dict.fromkeys(columns["run"]):
        members.setdefault((groups or {}).get(name, name), []).append(name)
    labels = [_wrapped(label) for label in members] if len(members) <= _style.MANY else list(members)
    markers = itertools.cycle("o" if len(members) <= len(_style.COLORS) else "osD^v")
    with plt.rc_context(_style.STYLE):
        figure, axes = _with_legend_beside(labels)
        for color, label, marker, names in zip(_distinct(len(members)), labels, markers, members.values()):
            look = {"color": color, "label": label, "marker": marker}
            if groups:
                _draw_group(axes, [_losses(columns, name, "val") for name in names], look)
            else:
                _draw_run(axes, columns, names[0], look)
        axes.set_xlabel("step (updates)")
        axes.set_ylabel(y)
        axes.grid(alpha=0.25)
        _legend_beside(axes)
        return _style.finished(figure, title)


def curves(axes: Axes, series, *, x, y, log="", spread=None, dashed=(), markers=True, colors=None) -> None:
    """Draw curves on `axes`; arguments as for `lines`, and `colors` by name."""
    for name, (xs, ys) in series.items():
        look = {"color": colors[name]} if colors else {}
        look |= {"linestyle": "--", "color": "#8d96a3", "zorder": 1} if name in dashed else {}
        if markers and name not in dashed:
            look |= {"marker": "o", "markersize": 3.5}
        (drawn,) = axes.plot(xs, ys, label=name, **look)
        if spread and name in spread:
            low, high = np.subtract(ys, spread[name]), np.add(ys, spread[name])
            axes.fill_between(xs, low, high, color=drawn.get_color(), alpha=0.18, linewidth=0)
    if "x" in log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        points = sorted({at for xs, _ in series.values() for at in xs})
        if len(points) <= 9 and points[-1] < 1000 * points[0]:
            axes.set_xticks(points, [f"{at:,}" for at in points])
            axes.xaxis.set_minor_locator(NullLocator())
    if "y" in log:
        axes.set_yscale("log")
        heights = [at for _, ys in series.values() for at in ys if at > 0]
        if heights and max(heights) < 30 * min(heights):  # too few powers of ten to label only these
            plain = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1235" else "")
            axes.yaxis.set_major_formatter(plain)
            axes.yaxis.set_minor_formatter(plain)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)


def _with_legend_beside(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with room for a legend of these labels beside its axes, where it covers no curve."""
    lines = "\n".join(labels).split("\n")
    return plt.subplots(
        figsize=(6.4 + _style.LEGEND[0] * max(map(len, lines)), max(4, 0.8 + _style.LEGEND[1] * len(lines)))
    )


def _legend_beside(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=_style.LABEL_SIZE, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def _distinct(count: int) -> Sequence:
    """`count` colours, easy to distinguish up to MANY."""
    if count <= _style.MANY:
        return _style.COLORS + _style.MORE_COLORS
    return list(plt.get_cmap("viridis")(np.linspace(0, 0.95, count)))


def _wrapped(label: str) -> str:
    """A name in lines for a legend, broken after its commas."""
    return "\n".join(textwrap.wrap(label.replace(",", ", "), _style.LINE)) if len(label) > _style.LINE else label


def _losses(columns: Mapping, name: str, split: str) -> dict[int, float]:
    """The finite losses of a run by step."""
    chosen = (columns["run"] == name) & (columns["split"] == split) & np.isfinite(columns["loss"])
    return dict(zip(columns["step"][chosen].tolist(), columns["loss"][chosen].tolist()))


def _draw_run(axes: Axes, columns: Mapping, name: str, look: dict) -> None:
    behind = {"marker": "", "alpha": 0.35, "zorder": 1}
    for split, style in (("val", {"markersize": 3.5}), ("train", behind)):
        if losses := _losses(columns, name, split):
            axes.plot(losses.keys(), losses.values(), **(look | style))
            look = look | {"label": None}  # on the first of the two lines


def _draw_group(axes: Axes, runs: Sequence[dict[int, float]], look: dict) -> None:
    """Draw the mean of the runs with a loss at their common steps, and each run behind."""
    runs = [losses for losses in runs if losses]
    for losses in runs if len(runs) > 1 else ():
        axes.plot(losses.keys(), losses.values(), color=look["color"], linewidth=0.7, alpha=0.45, zorder=1)
    if runs:
        steps = sorted(set.intersection(*map(set, runs)))
        axes.plot(steps, [np.mean([losses[step] for losses in runs]) for step in steps], markersize=3.5, **look)
