"""The figures of a comparison's page, by matplotlib, as SVG that takes its colours from the page."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from attnlab.support import documents, extras

# Of CSS: what a page may style by an attribute. Fonts are the page's.
PROPERTIES = "fill|fill-opacity|opacity|stroke|stroke-dasharray|stroke-dashoffset|stroke-linecap|stroke-linejoin"
PROPERTIES += "|stroke-opacity|stroke-width|text-anchor"
WIDE, HIGH = 5.2, 3.3  # inches


class Chart(NamedTuple):
    """Lines on one pair of axes.

    Attributes:
      title: the question.
      x, y: labels of the axes.
      series: (xs, ys) by variant.
      spread: (lows, highs) by variant.
      log: "x" for a logarithmic axis.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    spread: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log: str = ""


def svg(chart: Chart, names: Sequence[str]) -> str:
    """The chart as `<svg>`, in which each of the names of all variants has its colour.

    Raises:
      UserError: matplotlib is not installed.
    """
    plt = extras.require("matplotlib.pyplot", "plots", "a page's curves")
    from attnlab import plots
    from attnlab.plots import _style

    clean = documents.valid_unicode  # matplotlib fails at lone surrogates
    chart = chart._replace(
        series={clean(name): points for name, points in chart.series.items()},
        spread={clean(name): ends for name, ends in chart.spread.items()},
    )
    colors = dict(zip(map(clean, names), itertools.cycle(_style.COLORS + _style.MORE_COLORS)))
    text = io.StringIO()
    # Texts stay texts, and ids are the same for the same chart.
    with plt.rc_context(plots.STYLE | {"svg.fonttype": "none", "svg.hashsalt": chart.title}):
        figure, axes = plt.subplots(figsize=(WIDE, HIGH))
        lines = {"x": chart.x, "y": chart.y, "log": chart.log, "spread": chart.spread, "labels": "line"}
        plots.curves(axes, chart.series, colors=colors, **lines)
        plots.finished(figure, "").savefig(text, format="svg", transparent=True, metadata={"Date": None})
    drawn = re.search("<svg.*</svg>", text.getvalue(), re.DOTALL)[0]
    drawn = re.sub("<(metadata|style).*?</\\1>|<!--.*?-->", "", drawn, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", drawn))
    drawn = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", drawn)
    # The page's policy admits no style of an element: its properties become attributes.
    drawn = re.sub(' style="([^"]*)"', lambda style: _attributes(style[1]), drawn)
    ends = ", ".join(f"{name} {ys[-1]:.4g}" for name, (_, ys) in chart.series.items() if len(ys))
    label = escape(f"{chart.title}: {chart.y} over {chart.x}. At the last point: {ends}.")
    head = f'<svg viewBox="0 0 {72 * WIDE:g} {72 * HIGH:g}" role="img" aria-label="{label}">'
    return re.sub("<svg[^>]*>", lambda _: head, drawn, count=1)


def _attributes(style: str) -> str:
    found = re.findall(rf"(?:^|[; ])({PROPERTIES}): ([^;]*)", style)
    return "".join(f' {name}="{value}"' for name, value in found)
