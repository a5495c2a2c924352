"""Pictures of attention weights, masks and effects."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from attnlab.ops.masks import Mask
from attnlab.plots import _style


def weights(
    values,
    title: str,
    *,
    queries: Sequence[str] = (),
    keys: Sequence[str] = (),
    mask: Mask | np.ndarray | None = None,
    marks=None,
    mark_label: str = "correct key",
    label: str = "weight",
    x: str = "key",
    y: str = "query",
) -> Figure:
    """A heat map of one head: one row per query, one column per key.

    Args:
      values: `[Tq, Tk]`.
      title: the finding.
      queries, keys: row and column labels; on a square map, `keys` defaults to `queries`.
      mask: which keys each query may attend to, a mask or bool `[Tq, Tk]`; masked and non-finite cells are grey.
      marks: `[Tq]`, the correct key of each query, −1 for none; drawn as rings.
      mark_label: legend of the rings.
      label: label of the colour bar.
      x, y: axis labels.

    >>> figure = weights(np.eye(2), "Each word attends to itself", queries=["el", "gato"])
    >>> figure.axes[0].get_xlabel()
    'key'
    """
    values = _masked(values, mask)
    keys = keys or (queries if values.shape[0] == values.shape[1] else ())
    height, width = np.clip(0.28 * np.array(values.shape), (2, 2.4), (6, 7))
    with plt.rc_context(_style.HEAT):
        figure, axes = plt.subplots(figsize=(1.9 + width, 1.2 + height))
        image, legend = _heat(axes, values, values), []
        _label_cells(axes, queries, keys, height, width)
        axes.set(xlabel=x, ylabel=y)
        if marks is not None:
            rows = np.flatnonzero(np.asarray(marks) >= 0)
            look = {"s": 70, "facecolors": "none", "edgecolors": _style.MARK, "linewidths": 1.4, "label": mark_label}
            legend.append(axes.scatter(np.asarray(marks)[rows], rows, **look))
        return _explained(figure, image, axes, values, legend, label, title)


def heads(
    values,
    title: str,
    *,
    tokens: Sequence[str] = (),
    mask: Mask | np.ndarray | None = None,
    names: Sequence[str] = (),
    columns: int = 4,
    label: str = "weight",
) -> Figure:
    """One heat map per head, in a grid, on a common colour scale.

    Args:
      values: `[H, Tq, Tk]`.
      title: the finding.
      tokens: row and column labels; if there are too many, only every n-th is shown.
      mask: which keys each query may attend to, a mask or bool `[Tq, Tk]` or `[H, Tq, Tk]`; masked cells are grey.
      names: a title for each head; "head 0", … if empty.
      columns: heads per row.
      label: label of the colour bar.

    >>> len(heads(np.ones((3, 2, 2)) / 2, "Untrained heads attend to all keys").axes)  # three heads and the colour bar
    4
    """
    values = _masked(values, mask)
    names = names or [f"head {h}" for h in range(len(values))]
    side = min(max(_style.LABEL_ROOM / 72 * len(tokens) + 0.4, 2.5), 3.2)
    with plt.rc_context(_style.HEAT):
        figure, grid = _style.subplots(len(values), columns, (side + 0.1, side), (0.8, 0.6), sharex=True, sharey=True)
        for head, name, axes in zip(values, names, grid):
            image = _heat(axes, head, values)
            _label_cells(axes, tokens, tokens, side - 0.4, side - 0.4)
            axes.set_title(name)
        figure.supxlabel("key")
        figure.supylabel("query")
        return _explained(figure, image, grid, values, [], label, title)


def atlas(patterns, title: str, *, causal: bool = False) -> Figure:
    """All heads of a model as thumbnails: one row per layer, one column per head, on a common colour scale.

    Colours follow the square root of the weights, which separates small weights from zero. In long sequences, a pixel
    shows the largest weight of its block.

    Args:
      patterns: `[L, H, Tq, Tk]`, or for each layer `[H, Tq, Tk]`; layers may differ in H.
      title: the finding.
      causal: whether to hide the cells above the diagonal.

    >>> figure = atlas(np.ones((2, 3, 4, 4)) / 4, "Untrained heads attend to all keys")
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
    ['layer 0', 'layer 1']
    """
    heads = max(map(len, patterns))
    pixels = min(_style.THUMBNAIL, max(_style.ATLAS // heads, 8))
    thumbnails = [_thumbnails(np.asarray(layer, np.float32), causal, pixels) for layer in patterns]
    height, width = thumbnails[0].shape[1:]
    gap = max(1, height // 12)
    rows, columns = np.arange(len(thumbnails)) * (height + gap), np.arange(heads) * (width + gap)
    canvas = np.full((rows[-1] + height, columns[-1] + width), np.nan, np.float32)
    for row, layer in zip(rows, thumbnails):
        for column, thumbnail in zip(columns, layer):
            canvas[row : row + height, column : column + width] = thumbnail
    with plt.rc_context(_style.HEAT):
        side = min(1.1, 8 / heads)  # inches of a thumbnail
        figure, axes = plt.subplots(figsize=(1.6 + max(side * heads, 1.8), 0.9 + side * len(thumbnails)))
        norm = PowerNorm(0.5, 0, max(np.nanmax(canvas), 1e-6))
        image = axes.imshow(canvas, cmap=_style.WEIGHTS, norm=norm, aspect="auto" if height != width else None)
        axes.set_yticks(rows + height / 2, [f"layer {i}" for i in range(len(rows))])
        axes.set_xticks(columns + width / 2, [f"{'head ' * (heads <= 8)}{j}" for j in range(heads)])
        axes.tick_params(labeltop=True, labelbottom=False)
        ticks = norm.vmax * np.array([0, 0.01, 0.1, 0.25, 0.5, 1])
        figure.colorbar(image, label="weight", shrink=0.8, ticks=ticks, format="%.2g")
        return _style.finished(figure, title)


def effects_grid(values, title: str, *, layers: Sequence[str] = (), label: str = "change in the metric") -> Figure:
    """A heat map with one number per head, such as the effect of its ablation: one row per layer, one column per head.

    Args:
      values: `[L, H]`; NaN where a layer has no such head. If any value is negative, colours diverge from white at 0.
      title: the finding.
      layers: names of the rows; "layer 0", … if empty.
      label: label of the colour bar, with the unit.

    >>> figure = effects_grid([[0.1, -0.2]], "Head 1 lowers the loss", label="change of the loss (nats)")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['0.10', '−0.20']
    """
    values = np.ma.masked_invalid(np.asarray(values, np.float64))
    largest = max(np.abs(values).max(), 1e-12)
    colors, low = (_style.SIGNED, -largest) if (values < 0).any() else (_style.SIZES, 0)
    with plt.rc_context(_style.HEAT):
        rows, columns = values.shape
        figure, axes = plt.subplots(figsize=(2.0 + max(0.55 * columns, 1.6), max(1.0 + 0.45 * rows, 2.4)))
        image = axes.imshow(values, cmap=colors, vmin=low, vmax=largest, aspect="auto")
        for (i, j), value in np.ndenumerate(values.filled(np.nan)):
            if np.isfinite(value):
                look = {"color": "white" if abs(value) > 0.6 * largest else "black", "fontsize": _style.LABEL_SIZE}
                text = f"{round(value, 2) + 0.0:.2f}".replace("-", "−")  # −0.0 + 0.0 is 0.0
                axes.text(j, i, text, ha="center", va="center", **look)
        axes.set_yticks(range(rows), layers or [f"layer {i}" for i in range(rows)])
        axes.set(xticks=range(columns), xlabel="head")
        figure.colorbar(image, label=label, shrink=0.8)
        return _style.finished(figure, title)


def masks(shown: Mapping[str, Mask | np.ndarray], title: str, *, length: int = 16, columns: int = 4) -> Figure:
    """Which keys each query may attend to: one square per pair, dark where visible.

    Args:
      shown: masks, or bool `[Tq, Tk]` arrays, by name; if they differ by sequence or head, the first is drawn.
      title: the finding.
      length: Tq and Tk of the masks.
      columns: masks per row.

    >>> from attnlab.masks import Causal, SlidingWindow
    >>> len(masks({"causal": Causal(), "window": SlidingWindow(left=3)}, "A window is a band").axes)
    2
    """
    arrays = {name: m.dense(length, length) if isinstance(m, Mask) else m for name, m in shown.items()}
    drawn = {name: np.reshape(visible, (-1, *np.shape(visible)[-2:]))[0] for name, visible in arrays.items()}
    with plt.rc_context(_style.HEAT):
        figure, grid = _style.subplots(len(drawn), columns, (2.3, 2.4), (0.4, 0.5))
        for (name, visible), axes in zip(drawn.items(), grid):
            axes.imshow(visible, cmap=plt.matplotlib.colors.ListedColormap(_style.LEVELS), vmin=0, vmax=1)
            axes.set_title(name)
            axes.set(xticks=[], yticks=[])
            if max(visible.shape) <= 24:  # the cells are large enough
                axes.set_xticks(np.arange(visible.shape[1] - 1) + 0.5, minor=True)
                axes.set_yticks(np.arange(visible.shape[0] - 1) + 0.5, minor=True)
                axes.grid(which="minor", color="white", linewidth=0.7)
        figure.supxlabel("key index")
        figure.supylabel("query index")
        return _style.finished(figure, title)


def _thumbnails(layer, causal: bool, pixels: int) -> np.ndarray:
    """Reduce `[H, Tq, Tk]` to at most `pixels` rows and columns by block maxima; if causal, NaN above the diagonal."""
    for axis in (-2, -1):
        length = layer.shape[axis]
        starts = np.arange(min(length, pixels)) * length // min(length, pixels)
        layer = np.maximum.reduceat(layer, starts, axis=axis)
    return np.where(np.tri(*layer.shape[-2:], dtype=bool), layer, np.nan) if causal else layer


def _masked(values, mask) -> np.ma.MaskedArray:
    """Hide the masked and non-finite cells of `values`, `[Tq, Tk]` or `[H, Tq, Tk]`."""
    values = np.asarray(values, np.float32)
    visible = np.isfinite(values)
    if isinstance(mask, Mask):
        mask = mask.dense(*values.shape[-2:], num_heads=len(values) if values.ndim == 3 else 1)
    if mask is not None:
        visible &= np.asarray(mask, bool)
    return np.ma.masked_where(~visible, values)


def _heat(axes, values, scale):
    """Draw `values`, `[Tq, Tk]`; the colours span the range of `scale`, including 0."""
    low, high = scale.compressed().min(initial=0), scale.compressed().max(initial=0)
    colors = plt.get_cmap(_style.WEIGHTS).with_extremes(bad=_style.MASKED)
    aspect = "auto" if values.shape[0] != values.shape[1] else None
    return axes.imshow(values, cmap=colors, vmin=low, vmax=high, aspect=aspect)


def _explained(figure, image, axes, values, legend, label, title) -> Figure:
    """Add a legend, with an entry for masked cells if there are any, a colour bar and a title."""
    if np.ma.is_masked(values):
        legend = [Patch(facecolor=_style.MASKED, label="masked"), *legend]
    if legend:
        figure.legend(handles=legend, loc="outside lower right", ncols=2, frameon=False)
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    return _style.finished(figure, title)


def _label_cells(axes, row_labels, column_labels, height, width) -> None:
    """Label the rows and columns of a heat map, in a smaller font or only every n-th if labels would overlap."""
    for labels, inches, axis in ((row_labels, height, axes.yaxis), (column_labels, width, axes.xaxis)):
        if len(labels):
            spacing = 72 * inches / len(labels)
            step = math.ceil(_style.LABEL_ROOM / spacing)
            look = {"fontsize": min(_style.LABEL_SIZE, round(0.75 * spacing * step, 1))}
            if axis is axes.xaxis and max(map(len, labels)) > 1:
                rotation = 60 if look["fontsize"] == _style.LABEL_SIZE else 90
                look |= {"rotation": rotation, "ha": "right", "rotation_mode": "anchor"}
            axis.set_ticks(range(0, len(labels), step), labels[::step], **look)
