"""The figures of a comparison's page, by matplotlib, as SVG that takes its colours from the page."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

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
    ends = ", ".join(f"{name} {ys[-1]:.4g}" for name, (_, ys) in chart.series.items() if len(ys))
    label = f"{chart.title}: {chart.y} over {chart.x}. At the last point: {ends}."
    return _for_page(ElementTree.fromstring(text.getvalue()), label)


def _for_page(drawn: ElementTree.Element, label: str) -> str:
    """The drawing within HTML, which needs no namespaces; without metadata and ids that nothing refers to.

    A page's policy forbids styles of elements: their properties become attributes.
    """
    elements = list(drawn.iter())
    used = {name for each in elements for value in each.attrib.values() for name in re.findall(r"#([\w-]+)", value)}
    for element in elements:
        element.tag = element.tag.rpartition("}")[2]
        for child in list(element):
            if child.tag.endswith(("}metadata", "}style")):
                element.remove(child)
        if element.get("id") not in used:
            element.attrib.pop("id", None)
        for name in [name for name in element.attrib if "}" in name]:  # xlink:href
            element.set(name.rpartition("}")[2], element.attrib.pop(name))
        for name, value in re.findall(rf"(?:^|[; ])({PROPERTIES}): ([^;]*)", element.attrib.pop("style", "")):
            element.set(name, value)
    drawn.attrib.clear()
    drawn.attrib.update({"viewBox": f"0 0 {72 * WIDE:g} {72 * HIGH:g}", "role": "img", "aria-label": label})
    return ElementTree.tostring(drawn, encoding="unicode")
