"""Curves of measurements and of runs."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator, ScalarFormatter
from scipy.optimize import isotonic_regression

from attnlab.plots import _style
from attnlab.records import metrics


def curves(
    axes: Axes,
    series: Mapping[str, tuple],
    *,
    x: str,
    y: str,
    log: str = "",
    spread: Mapping[str, Sequence | np.ndarray] | None = None,
    dashed: Sequence[str] = (),
    markers: bool = True,
    labels: str = "legend",
    colors: Mapping[str, str] | None = None,
) -> None:
    """Draw curves on `axes`.

    Args:
      axes: matplotlib axes.
      series: (xs, ys) by name; NaN leaves a gap.
      x, y: axis labels, with the unit.
      log: "x", "y" or "xy": logarithmic axes.
      spread: by name, a deviation for each point, or a pair (low, high) of the ends at each point, drawn as a band.
      dashed: names of dashed curves, such as a theoretical curve.
      markers: whether to mark the points.
      labels: where the names go: in a "legend", or at the right end of each "line".
      colors: colours by name; `COLORS` by default.

    >>> figure, axes = plt.subplots()
    >>> curves(axes, {"a": ([0, 1], [2, 1])}, x="step", y="loss", labels="line")
    >>> [text.get_text() for text in axes.texts]
    ['a']
    """
    colors, ends = dict(zip(series, _style.distinct(len(series)))) | dict(colors or {}), {}
    for name, (xs, ys) in series.items():
        look = {"color": colors[name], "marker": "o" if markers else "", "markersize": 3.5}
        if name in dashed:
            look = {"color": "#8d96a3", "linestyle": "--", "zorder": 1}
        (line,) = axes.plot(xs, ys, label=name, **look)
        if spread and name in spread:
            is_pair = np.ndim(spread[name]) == 2
            low, high = spread[name] if is_pair else (np.subtract(ys, spread[name]), np.add(ys, spread[name]))
            width = 0 if len(xs) > 1 else 1.5  # the band of a single point is a bar
            axes.fill_between(xs, low, high, color=look["color"], alpha=0.18, linewidth=width)
        points = line.get_xydata()  # numbers, even if an axis has words
        if len(drawn := points[np.isfinite(points).all(axis=1)]):
            ends[name] = *drawn[-1], look["color"]
    _scale(axes, series, log)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    if labels == "line" and ends:
        _label_ends(axes, ends)
    elif len(series) > 1:
        axes.legend(frameon=False, fontsize=_style.LABEL_SIZE)


def lines(series: Mapping[str, tuple], title: str, **options) -> Figure:
    """Draw curves on one pair of axes.

    Args:
      series: (xs, ys) by name.
      title: the finding.
      options: as for `curves`; `x` and `y` are required.

    >>> figure = lines({"loss": ([0, 1], [2.0, 1.0])}, "The loss halves", x="step", y="loss (nats per token)")
    >>> figure.axes[0].get_ylabel()
    'loss (nats per token)'
    """
    with plt.rc_context(_style.STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4))
        curves(axes, series, **options)
        return _style.finished(figure, title)


def panels(drawn: Mapping[str, Mapping], title: str, *, columns: int = 2) -> Figure:
    """Draw several panels of curves; a name has the same colour in all of them.

    Args:
      drawn: the arguments of `curves`, except `axes`, by the panel's title.
      title: the finding; "" for none.
      columns: panels per row.

    >>> panel = {"series": {"a": ([1, 2], [1, 2])}, "x": "n (tokens)", "y": "time (ms)"}
    >>> len(panels({"first": panel, "second": panel}, "Both grow").axes)
    2
    """
    with plt.rc_context(_style.STYLE):
        figure, grid = _style.subplots(len(drawn), columns, (5.0, 3.6))
        names = dict.fromkeys(name for panel in drawn.values() for name in panel["series"])
        colors = dict(zip(names, _style.distinct(len(names))))
        for (name, panel), axes in zip(drawn.items(), grid):
            curves(axes, **({"colors": colors} | panel))
            axes.set_title(name)
        return _style.finished(figure, title)


def runs(
    workdirs,
    title: str = "Loss of each run",
    *,
    y: str = "loss (nats per token)",
    groups: Mapping[str, str] | None = None,
    colors: Mapping[str, str] | None = None,
) -> Figure:
    """Losses of runs by step: points on a line for validation and, without `groups`, a thin line for training.

    A group of runs, such as several seeds, has one colour: a line with points shows the mean validation loss at the
    steps that all runs of the group have, and a thin line shows each run. Runs without validation show training losses.

    Args:
      workdirs: as for `attnlab.metrics`: a folder, a glob, or several.
      title: the finding.
      y: label of the loss axis.
      groups: the group of each run, by the run's name in `attnlab.metrics`; a run without a group is drawn alone.
      colors: colours by the name of a run or group; `COLORS` by default.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "metrics.jsonl").write_text('{"step": 10, "split": "val", "loss": 2.5}')
    >>> len(runs(folder).axes[0].lines)
    1
    """
    columns, members, series = metrics(workdirs), {}, {}
    for name in dict.fromkeys(columns["run"]):
        members.setdefault((groups or {}).get(name, name), []).append(name)
    colors = dict(zip(members, _style.distinct(len(members)))) | dict(colors or {})
    size = 6.4 + 0.066 * max(map(len, members)), max(4, 0.8 + 0.14 * len(members))  # inches, with room for the names
    with plt.rc_context(_style.STYLE):
        figure, axes = plt.subplots(figsize=size)
        for label, names in members.items():
            train, validation = ([_losses(columns, name, split) for name in names] for split in ("train", "val"))
            validation = list(filter(None, validation)) or train
            for losses in validation if len(names) > 1 else () if groups else filter(None, train):
                axes.plot(losses.keys(), losses.values(), color=colors[label], linewidth=0.8, alpha=0.4, zorder=1)
            steps = sorted(set.intersection(*map(set, validation)))
            series[label] = steps, [np.mean([losses[step] for losses in validation]) for step in steps]
        curves(axes, series, x="step (updates)", y=y, labels="line", colors=colors)
        return _style.finished(figure, title)


def _losses(columns: Mapping, name: str, split: str) -> dict[int, float]:
    """Return the finite losses of a run by step."""
    chosen = (columns["run"] == name) & (columns["split"] == split) & np.isfinite(columns["loss"])
    return dict(zip(columns["step"][chosen].tolist(), columns["loss"][chosen].tolist()))


def _scale(axes: Axes, series: Mapping[str, tuple], log: str) -> None:
    """Make the axes in `log` logarithmic, and all ticks readable."""
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), ScalarFormatter):  # the axis shows neither words nor powers of ten
            axis.set_major_formatter(FuncFormatter(lambda value, _, axis=axis: _tick(value, axis)))
            axis.get_major_locator().set_params(nbins=6)  # room for long numbers
    if "x" in log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        points = sorted({at for xs, _ in series.values() for at in xs if at > 0})
        if 0 < len(points) <= 9 and points[-1] < 1000 * points[0]:
            ticks = points[:1]
            for at in points[1:]:
                # A label takes about a tenth of the axis.
                ticks += [at] * (math.log(at / ticks[-1]) >= 0.1 * math.log(points[-1] / points[0]))
            axes.set_xticks(ticks, [f"{at:,}" for at in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
    if "y" in log:
        axes.set_yscale("log")
        heights = [at for _, ys in series.values() for at in ys if at > 0]
        if heights and max(heights) < 30 * min(heights):  # too few powers of ten to label only these
            plain = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1235" else "")
            axes.yaxis.set_major_formatter(plain)
            axes.yaxis.set_minor_formatter(plain)


def _tick(value: float, axis: Axis) -> str:
    """Format a number with separators, in units of 10⁶ or 10⁹ if the axis has large values."""
    most = max(map(abs, axis.get_view_interval()))
    unit, name = next(
        ((10**power, name) for power, name in ((9, " G"), (6, " M")) if most >= 10 ** (power + 1)), (1, "")
    )
    return f"{value / unit:,.10g}{name}".replace("-", "−")


def _label_ends(axes: Axes, ends: Mapping[str, tuple]) -> None:
    """Write each name at its curve's end, (x, y, color), moving names up or down just enough not to overlap."""
    axes.autoscale_view()
    names, size, right, points = list(ends), _style.LABEL_SIZE, -math.inf, 72 / axes.figure.dpi
    places = points * axes.transData.transform([ends[name][:2] for name in names])
    columns: list[list[int]] = []
    for at in np.argsort(places[:, 0]):
        if places[at, 0] > right:
            columns.append([])
        columns[-1].append(at)
        right = max(right, places[at, 0] + 0.6 * size * len(names[at]))
    for column in columns:
        column.sort(key=lambda at: places[at, 1])
        heights, offsets = places[column, 1], 1.2 * size * np.arange(len(column))
        fitted = np.maximum(isotonic_regression(heights - offsets).x, points * axes.bbox.ymin + size / 2) + offsets
        for at, moved in zip(column, fitted - heights):
            x, y, color = ends[names[at]]
            look = {"color": color, "fontsize": size, "va": "center", "annotation_clip": False}
            axes.annotate(names[at], (x, y), (5, moved), textcoords="offset points", **look)
