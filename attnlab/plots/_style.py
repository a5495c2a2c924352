"""Colours, sizes and helpers that all figures share."""

import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

WEIGHTS = "magma"
LEVELS = ("#f4f1ea", "#2f6f8f")  # masked, visible
LABEL_SIZE, LABEL_ROOM = 8.0, 8.0  # points: font size of labels, and least distance between labels
SIZES, SIGNED = "Blues", "PuOr"  # for values from 0, and for both signs; readable for the colour-blind
THUMBNAIL, ATLAS = 64, 512  # pixels, at most: the side of a thumbnail, and the width of an atlas
MASKED = "#d5d8dc"  # a grey that does not occur among the colours of weights
MARK = "#39c5bb"
COLORS = ("#2f6f8f", "#d1495b", "#edae49", "#66a182", "#7d5ba6", "#3d3d3d", "#c58b5f", "#8d96a3")
MORE_COLORS = ("#1fb5c9", "#c03fa0", "#8f9b1a", "#6b3a24")  # if COLORS are too few
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
HEAT = STYLE | {  # for heat maps: cells have no frame
    **dict.fromkeys(("axes.spines.left", "axes.spines.bottom"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "xtick.minor.size", "ytick.minor.size"), 0),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), LABEL_SIZE),
}


def distinct(count: int) -> Sequence:
    """Return `count` distinct colours."""
    known = COLORS + MORE_COLORS
    return known[:count] if count <= len(known) else list(plt.get_cmap("viridis")(np.linspace(0, 0.95, count)))


def finished(figure, title):
    """Add the title, wrapped to the figure's width, and close the figure, so that a notebook shows it only once.

    Text with a dollar sign is drawn literally. Ticks may still be formulas, because they have no text yet.
    """
    if title:
        figure.suptitle(textwrap.fill(title, int(11.5 * figure.get_figwidth())))
    for text in figure.findobj(Text):
        text.set_parse_math("$" not in text.get_text())
    plt.close(figure)
    return figure


def subplots(count: int, columns: int, size, border=(0, 0), **shared) -> tuple[Figure, list[Axes]]:
    """Create a figure with `count` axes of a size in inches, in up to `columns` columns."""
    columns = min(columns, count)
    rows = -(-count // columns)
    inches = (size[0] * columns + border[0], size[1] * rows + border[1])
    figure, grid = plt.subplots(rows, columns, figsize=inches, squeeze=False, **shared)
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, list(grid.flat[:count])
