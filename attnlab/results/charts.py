"""Figures of a page, as data URLs of images: charts that matplotlib draws as SVG, and existing PNG pictures."""

import base64
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from attnlab.support import documents, extras

if TYPE_CHECKING:
    import matplotlib.figure


SIZE = 5.2, 3.3  # inches of a chart on a page


class Figure(NamedTuple):
    """A figure of a page.

    Attributes:
      title: shown above the figure.
      alt: description for readers who cannot see the figure.
      draw: takes colours by name and returns a matplotlib figure; a page inverts its lightness in dark mode.
      png: a picture in place of `draw`, shown unchanged.
    """

    title: str
    alt: str
    draw: Callable[[Mapping[str, str]], "matplotlib.figure.Figure"] | None = None
    png: bytes = b""

    def address(self, names: Sequence[str]) -> str:
        """Return the image as a `data:…` URL; `names` lists all variants, in the order of their colours.

        Raises:
          UserError: matplotlib is not installed.
        """
        if self.draw is None:
            return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        plt = extras.require("matplotlib.pyplot", "plots", "a page with curves")
        from attnlab.plots import _style

        colors = dict(zip(map(documents.valid_unicode, names), itertools.cycle(_style.COLORS + _style.MORE_COLORS)))
        drawn = io.BytesIO()
        # Text stays text instead of outlines, and the same figure always gets the same ids.
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.title}):
            self.draw(colors).savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def curves(
    title: str,
    x: str,
    y: str,
    series: Mapping[str, tuple],
    spread: Mapping[str, tuple],
    log: str = "",
) -> Figure:
    """Plot lines on one pair of axes, from (xs, ys) and (lows, highs) by name; `log` "x" makes x logarithmic."""
    clean = documents.valid_unicode  # matplotlib fails on lone surrogates
    series, spread = ({clean(name): values for name, values in each.items()} for each in (series, spread))

    def draw(colors):
        import matplotlib.pyplot as plt

        from attnlab import plots

        with plt.rc_context(plots.STYLE):
            figure, axes = plt.subplots(figsize=SIZE)
            plots.curves(axes, series, x=x, y=y, log=log, spread=spread, labels="line", colors=colors)
            return plots.finished(figure, "")

    ends = ", ".join(f"{name} {ys[-1]:.4g}" for name, (_, ys) in series.items() if len(ys))
    return Figure(title, f"{y} over {x}. At the last point: {ends}.", draw)
