"""Pictures of attention: weights, masks, heads, alignments, curves. Studies and notebooks draw with these alone.

Every function returns a matplotlib figure; its title should state what the picture shows to be so.
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from attnlab.ops.masks import Mask

WEIGHTS = "magma"
LEVELS = ("#f4f1ea", "#2f6f8f")  # hidden, visible
MARK = "#39c5bb"
COLORS = ("#2f6f8f", "#d1495b", "#edae49", "#66a182", "#7d5ba6", "#3d3d3d", "#c58b5f", "#8d96a3")
STYLE = {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "figure.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.prop_cycle": plt.cycler(color=COLORS),
    "image.interpolation": "nearest",
}


def weights(
    values,
    title: str,
    *,
    queries: Sequence[str] = (),
    keys: Sequence[str] = (),
    marks=None,
    mark_label: str = "right key",
    label: str = "weight",
    x: str = "key: who is looked at",
    y: str = "query: who looks",
) -> Figure:
    """A heat map of one head: a row for each query, a column for each key.

    Args:
      values: `[Tq, Tk]`.
      title: what it shows.
      queries, keys: a label for each row and column; `keys` those of `queries` when left out; none for indices.
      marks: `[Tq]`, the key that each query ought to look at, −1 for none; drawn as rings.
      mark_label: what the rings are.
      label: of the colours; −inf stays white.
      x, y: labels of the axes.

    >>> figure = weights(np.eye(2), "Each word looks at itself", queries=["el", "gato"])
    >>> figure.axes[0].get_xlabel()
    'key: who is looked at'
    """
    values = np.asarray(values, np.float32)
    keys = keys or (queries if values.shape[0] == values.shape[1] else ())
    with plt.rc_context(STYLE):
        rows, columns = values.shape
        size = (1.9 + min(max(0.28 * columns, 2.4), 7), 1.2 + min(max(0.28 * rows, 2.0), 6))
        figure, axes = plt.subplots(figsize=size)
        image = _heat(axes, values, queries, keys, values)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if marks is not None:
            right = [(j, i) for i, j in enumerate(np.asarray(marks)) if j >= 0]
            axes.scatter(
                [j for j, _ in right],
                [i for _, i in right],
                s=70,
                facecolors="none",
                edgecolors=MARK,
                linewidths=1.4,
                label=mark_label,
            )
            figure.legend(loc="outside lower center", frameon=False)
        figure.colorbar(image, label=label, shrink=0.8)
        return _finished(figure, title)


def heads(
    values,
    title: str,
    *,
    tokens: Sequence[str] = (),
    names: Sequence[str] = (),
    columns: int = 4,
    label: str = "weight",
) -> Figure:
    """A heat map for each head, side by side, in one scale of colours.

    Args:
      values: `[H, Tq, Tk]`.
      title: what they show.
      tokens: labels of rows and columns.
      names: a title for each head; "head 0", … when left out.
      columns: heads in a row.
      label: of the colours.

    >>> len(heads(np.ones((3, 2, 2)) / 2, "Untrained heads look everywhere").axes)  # three heads and the colour bar
    4
    """
    values = np.asarray(values, np.float32)
    names = names or [f"head {h}" for h in range(len(values))]
    columns = min(columns, len(values))
    rows = -(-len(values) // columns)
    with plt.rc_context(STYLE):
        size = (0.8 + 2.6 * columns, 0.5 + 2.5 * rows)
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True)
        for head, axes in enumerate(grid.flat):
            if head >= len(values):
                axes.remove()
                continue
            image = _heat(axes, values[head], tokens, tokens, values)
            axes.set_title(names[head])
        figure.supxlabel("key: who is looked at")
        figure.supylabel("query: who looks")
        figure.colorbar(image, ax=[axes for axes in grid.flat if axes.figure], label=label, shrink=0.7)
        return _finished(figure, title)


def masks(shown: Mapping[str, Mask | np.ndarray], title: str, *, length: int = 16, columns: int = 4) -> Figure:
    """Who may look at whom: a square for each query and key, dark where it is visible.

    Args:
      shown: masks, or bool `[Tq, Tk]` arrays, by name; of a mask that differs between rows or heads, the first.
      title: what they show.
      length: Tq and Tk of the masks.
      columns: masks in a row.

    >>> from attnlab.masks import Causal, SlidingWindow
    >>> len(masks({"causal": Causal(), "window": SlidingWindow(left=3)}, "A window is a band").axes)
    2
    """
    drawn = {
        name: np.asarray(m.dense(length, length)).reshape(-1, length, length)[0]
        if isinstance(m, Mask)
        else np.asarray(m)
        for name, m in shown.items()
    }
    columns = min(columns, len(drawn))
    rows = -(-len(drawn) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, columns, figsize=(2.3 * columns + 0.4, 2.4 * rows + 0.5), squeeze=False)
        for axes in list(grid.flat)[len(drawn) :]:
            axes.remove()
        for (name, visible), axes in zip(drawn.items(), grid.flat):
            axes.imshow(visible, cmap=plt.matplotlib.colors.ListedColormap(LEVELS), vmin=0, vmax=1)
            axes.set_title(name)
            axes.set_xticks([])
            axes.set_yticks([])
            if max(visible.shape) <= 24:  # cells that can be told apart
                axes.set_xticks(np.arange(visible.shape[1] - 1) + 0.5, minor=True)
                axes.set_yticks(np.arange(visible.shape[0] - 1) + 0.5, minor=True)
                axes.grid(which="minor", color="white", linewidth=0.7)
                axes.tick_params(which="minor", length=0)
            for spine in axes.spines.values():
                spine.set_visible(False)
        figure.supxlabel("key index")
        figure.supylabel("query index")
        return _finished(figure, title)


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
    """Curves over one pair of axes.

    Args:
      series: (xs, ys) by name.
      title: what they show.
      x, y: labels of the axes, with the unit.
      log: "x", "y" or "xy": which axes are logarithmic.
      spread: of some names, a deviation for each point, drawn as a band.
      dashed: names drawn dashed, such as a theory.
      markers: whether the points are marked.

    >>> figure = lines({"loss": ([0, 1], [2.0, 1.0])}, "The loss halves", x="step", y="loss (nats per token)")
    >>> figure.axes[0].get_ylabel()
    'loss (nats per token)'
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4))
        curves(axes, series, x=x, y=y, log=log, spread=spread, dashed=dashed, markers=markers)
        return _finished(figure, title)


def panels(drawn: Mapping[str, Mapping], title: str, *, columns: int = 2) -> Figure:
    """Several panels of curves: for each panel's title, the arguments of `lines` without its own.

    >>> panel = {"series": {"a": ([1, 2], [1, 2])}, "x": "n (tokens)", "y": "time (ms)"}
    >>> len(panels({"first": panel, "second": panel}, "Both grow").axes)
    2
    """
    columns = min(columns, len(drawn))
    rows = -(-len(drawn) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, columns, figsize=(5.0 * columns, 3.6 * rows), squeeze=False)
        for axes in list(grid.flat)[len(drawn) :]:
            axes.remove()
        names = dict.fromkeys(name for panel in drawn.values() for name in panel["series"])
        colors = dict(zip(names, itertools.cycle(COLORS)))  # a name has one colour in all panels
        for (name, panel), axes in zip(drawn.items(), grid.flat):
            curves(axes, **panel, colors=colors)
            axes.set_title(name)
        return _finished(figure, title)


def training(runs: Mapping[str, Sequence[Mapping]], title: str, *, y: str = "loss (nats per token)") -> Figure:
    """Loss over steps from the records of `metrics.jsonl`: training as a line, validation as points.

    Args:
      runs: records, `{"step": …, "split": "train" | "val", "loss": …}`, by name of the run.
      title: what they show.
      y: label of the loss.

    >>> records = [{"step": s, "split": "train", "loss": 1 / s} for s in (1, 2, 3)]
    >>> len(training({"sancho": records}, "It learns").axes[0].lines)
    1
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4))
        for color, (name, records) in zip(itertools.cycle(COLORS), runs.items()):
            for split, look in (("train", {"linewidth": 1.2}), ("val", {"marker": "o", "linestyle": ":"})):
                chosen = [(r["step"], r["loss"]) for r in records if r["split"] == split and r["loss"] is not None]
                if chosen:
                    axes.plot(*zip(*chosen), color=color, label=f"{name}, {split}", **look)
        axes.set_xlabel("step (updates)")
        axes.set_ylabel(y)
        axes.legend(frameon=False)
        return _finished(figure, title)


def curves(axes: Axes, series, *, x, y, log="", spread=None, dashed=(), markers=True, colors=None) -> None:
    """Draws on `axes` what `lines` draws; see there. `colors` gives names their colours."""
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
        if len(points) <= 9 and points[-1] < 1000 * points[0]:  # few enough to name each
            axes.set_xticks(points, [f"{at:,}" for at in points])
            axes.xaxis.set_minor_locator(NullLocator())
    if "y" in log:
        axes.set_yscale("log")
        heights = [at for _, ys in series.values() for at in ys if at > 0]
        if heights and max(heights) < 30 * min(heights):  # too few powers of ten to read the scale by
            plain = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1235" else "")
            axes.yaxis.set_major_formatter(plain)
            axes.yaxis.set_minor_formatter(plain)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)


def _finished(figure, title):
    """With its title, in lines no wider than itself, and closed: a notebook shows it once, a script need not."""
    figure.suptitle(textwrap.fill(title, int(11.5 * figure.get_figwidth())))
    plt.close(figure)
    return figure


def _heat(axes, values, row_labels, column_labels, scale):
    """`scale`: values whose range the colours span, from 0 where none is below."""
    finite = scale[np.isfinite(scale)]
    low, high = min(0, finite.min(initial=0)), finite.max(initial=0)
    image = axes.imshow(
        values, cmap=WEIGHTS, vmin=low, vmax=high, aspect="auto" if values.shape[0] != values.shape[1] else None
    )
    if len(column_labels):
        axes.set_xticks(range(len(column_labels)), column_labels, rotation=60, ha="right", rotation_mode="anchor")
    if len(row_labels):
        axes.set_yticks(range(len(row_labels)), row_labels)
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image
