"""Plots of attention weights, masks, alignments and curves, as matplotlib figures.

A title should state the finding that the figure supports.
"""

# ruff: noqa: E402
from attnlab.support.extras import require

# Before the imports that need it.
require("matplotlib", "plots", "a figure")

from attnlab.plots._curves import curves, lines, panels, runs
from attnlab.plots._heatmaps import atlas, effects_grid, heads, masks, weights
from attnlab.plots._style import COLORS, STYLE, THUMBNAIL, finished

__all__ = [
    "COLORS",
    "STYLE",
    "THUMBNAIL",
    "atlas",
    "curves",
    "effects_grid",
    "finished",
    "heads",
    "lines",
    "masks",
    "panels",
    "runs",
    "weights",
]
