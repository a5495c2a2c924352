"""The figures of a page: charts that matplotlib draws as SVG, and pictures of others, as addresses of images."""

import base64
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from attnlab.support import documents, extras

if TYPE_CHECKING:
    import matplotlib.figure


SIZE = 5.2, 3.3  # inches of a chart, which a page shows as they are


class Figure(NamedTuple):
    """A figure of a page.

    Attributes:
      title: stands above it.
      alt: what it shows, in words, for those who cannot see it.
      draw: makes a figure of matplotlib, in which names have some colours; a page inverts its lightness in the dark.
      png: a picture, in place of `draw`, which no page changes.
    """

    title: str
    alt: str
    draw: Callable[[Mapping[str, str]], "matplotlib.figure.Figure"] | None = None
    png: bytes = b""

    def address(self, names: Sequence[str]) -> str:
        """The image as an address, `data:…`; the names of all variants have their colours in this order.

        Raises:
          UserError: matplotlib is not installed.
        """
        if self.draw is None:
            return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        plt = extras.require("matplotlib.pyplot", "plots", "a page's curves")
        from attnlab.plots import _style

        colors = dict(zip(map(documents.valid_unicode, names), itertools.cycle(_style.COLORS + _style.MORE_COLORS)))
        drawn = io.BytesIO()
        # Texts stay texts, and ids are the same for the same figure.
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
    """Lines on one pair of axes: (xs, ys) and (lows, highs) by name; `log` is "x" for a logarithmic axis."""
    clean = documents.valid_unicode  # matplotlib fails at lone surrogates
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
