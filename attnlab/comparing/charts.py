"""Curves with intervals as inline SVG, drawn without matplotlib and coloured by a page's style."""

import itertools
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 360, 225
LEFT, RIGHT, TOP, BOTTOM = 42, 352, 8, 202  # edges of the plotting area
MOST_POINTS = 32  # of a line; of longer lines, points at equal distances
MOST_DOTS = 12  # points of a line up to which they are marked
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # between ticks, times a power of ten
SUFFIXES = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
PLAIN = 1e4  # below it a number has no suffix
MOST_TICKS = 6
TICK_ROOM = 34  # pixels of a label on the x axis


class Line(NamedTuple):
    """One variant in a chart.

    Attributes:
      name: of the variant.
      x, y: the points; y are means, and points with NaN leave a gap.
      low, high: the interval or range at each point; None for none.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None
    high: Sequence[float] | None


class Chart(NamedTuple):
    """Lines on one pair of axes; `log_x` for a logarithmic x axis, which leaves out x ≤ 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False


class _Axis(NamedTuple):
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


class _Point(NamedTuple):
    x: float
    y: float
    low: float
    high: float


def svg(chart: Chart, looks: Mapping[str, str]) -> str:
    """The chart as `<svg>`, without the labels of its axes; `looks` has the attributes of each line's group by name."""
    drawn = [(line.name, _segments(line, chart.log_x)) for line in chart.lines]
    points = [point for _, segments in drawn for segment in segments for point in segment]
    if not points:
        return '<p class="empty">No run has a value here.</p>'
    x, y = _axes(points, chart.log_x)
    lines = "".join(f"<g {looks[name]}>{_line(segments, x, y)}</g>" for name, segments in drawn)
    values = sorted({point.x for point in points})
    x_ticks = _log_ticks(x, values) if x.log or len(values) == 1 else _ticks(x.low, x.high)
    description = escape(_description(chart, drawn))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{description}">'
        f"{_frame(x, y, x_ticks, _ticks(y.low, y.high))}{lines}</svg>"
    )


def _segments(line: Line, log_x: bool) -> list[list[_Point]]:
    """The points of a line, in pieces without NaN."""
    bounded = line.low is not None and line.high is not None
    columns = (line.x, line.y, line.low if bounded else line.y, line.high if bounded else line.y)
    points = [_Point(*map(float, values)) for values in zip(*columns, strict=True)]
    if len(points) > MOST_POINTS:
        last = len(points) - 1
        points = [points[round(n * last / (MOST_POINTS - 1))] for n in range(MOST_POINTS)]
    pieces: list[list[_Point]] = [[]]
    for point in points:
        if not (math.isfinite(point.x) and math.isfinite(point.y)) or (log_x and point.x <= 0):
            pieces.append([])
        else:
            # A mean of one seed has no interval.
            known = math.isfinite(point.low) and math.isfinite(point.high)
            pieces[-1].append(point if known else _Point(point.x, point.y, point.y, point.y))
    return [piece for piece in pieces if piece]


def _axes(points: Sequence[_Point], log_x: bool) -> tuple[_Axis, _Axis]:
    left, right = min(point.x for point in points), max(point.x for point in points)
    if left == right:
        left, right = (left / 2, right * 2) if log_x else (left - 1, right + 1)
    bottom, top = min(min(point.y, point.low) for point in points), max(max(point.y, point.high) for point in points)
    # Ticks of a narrower range would need more digits than they have room.
    room = max(0.05 * (top - bottom), 0.002 * abs(top)) or 1.0
    inset = 6  # so that dots stay off the edges
    return (_Axis(left, right, LEFT + inset, RIGHT - inset, log_x), _Axis(bottom - room, top + room, BOTTOM, TOP))


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """At most `MOST_TICKS` values within the ends, at a round distance, with labels of equally many decimals."""
    power = 10 ** math.floor(math.log10((high - low) / MOST_TICKS))
    step = next(step * power for step in STEPS if (high - low) / (step * power) <= MOST_TICKS - 1 or step == STEPS[-1])
    values = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    limit = max(map(abs, values), default=0)
    scale, suffix = _scale(limit)
    if limit and not 1e-4 <= limit < 1e12:
        return [(value, f"{value:.4g}") for value in values]
    decimals = max(0, -int(Decimal(f"{step / scale:.3g}").as_tuple().exponent))
    return [(value, _signed(f"{value / scale:.{decimals}f}") + (suffix if value else "")) for value in values]


def _log_ticks(axis: _Axis, values: Sequence[float]) -> list[tuple[float, str]]:
    """The values themselves where their labels have room, else powers of ten, or 1, 2 and 5 times these."""
    places = [axis.at(value) for value in values]
    if all(right - left >= TICK_ROOM for left, right in itertools.pairwise(places)):
        return [(value, _short(value)) for value in values]
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    stride = -(-len(powers) // 8)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [factor * 10.0**power for power in powers[::stride] for factor in factors]
    return [(value, _short(value)) for value in found if axis.low <= value <= axis.high]


def _short(value: float) -> str:
    scale, suffix = _scale(abs(value))
    return _signed(f"{value / scale:.4g}") + suffix


def _scale(size: float) -> tuple[float, str]:
    """The unit in which numbers up to this size are written, and its suffix."""
    return (1.0, "") if size < PLAIN else next((scale, suffix) for scale, suffix in SUFFIXES if size >= scale)


def _signed(number: str) -> str:
    return number.replace("-", "−")


def _frame(x: _Axis, y: _Axis, x_ticks, y_ticks) -> str:
    """Grid lines, ticks and their labels."""
    grid = "".join(f"M{LEFT} {y.at(value):.1f}H{RIGHT}" for value, _ in y_ticks)
    ticks = "".join(f"M{x.at(value):.1f} {BOTTOM}v4" for value, _ in x_ticks)
    labels = [f'<text x="{LEFT - 6}" y="{y.at(v) + 4:.1f}" class="y">{text}</text>' for v, text in y_ticks]
    labels += [f'<text x="{x.at(v):.1f}" y="{BOTTOM + 17}" class="x">{text}</text>' for v, text in x_ticks]
    return f'<path class="grid" d="{grid}"/><path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}{ticks}"/>{"".join(labels)}'


def _line(segments: Sequence[Sequence[_Point]], x: _Axis, y: _Axis) -> str:
    """The paths of a line: its band, bars of points without neighbours, the curve, and dots on few points."""
    band = bars = curve = dots = ""
    marked = sum(map(len, segments)) <= MOST_DOTS
    for points in segments:
        middle = [(x.at(point.x), y.at(point.y)) for point in points]
        high = [(x.at(point.x), y.at(point.high)) for point in points]
        low = [(x.at(point.x), y.at(point.low)) for point in points]
        curve += _path(middle)
        if marked or len(points) == 1:
            dots += "".join(_path([place]) + "h0" for place in middle)
        if high != low and len(points) == 1:
            bars += _path(high + low)
        elif high != low:
            band += _path(high + low[::-1]) + "z"
    parts = (("band", band), ("bar", bars), ("curve", curve), ("dots", dots))
    return "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in parts if path)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _description(chart: Chart, drawn: Sequence[tuple[str, list[list[_Point]]]]) -> str:
    ends = [f"{name} {_signed(f'{found[-1][-1].y:.4g}')}" for name, found in drawn if found]
    return f"{chart.title}: {chart.y_label} over {chart.x_label}. At the last point: {', '.join(ends)}."
