"""Draws line charts and bars as inline SVG, without scripts, fonts or external resources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10

import msgspec

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 16, 44
INKS = (
    *("#2563c9", "#d1495b", "#2a8f6d", "#b7791f", "#7b4fb5", "#0e8ba5"),
    *("#c2528b", "#6b7a1e", "#8a5a3c", "#5c6675"),
)
DASHES = ("", "6 3", "2 3", "8 3 2 3")


class Series(msgspec.Struct, frozen=True):
    """One line of a chart: its name, its points in order of x, and its index (for the colour)."""

    name: str
    points: Sequence[tuple[float, float]]
    index: int


class Axis(msgspec.Struct, frozen=True):
    """An axis of a chart.

    label  text beside the axis
    least  its lower end; None: the smallest value, or 0 without data
    most   its upper end; None: the largest value, or 0 without data
    log    whether it is logarithmic
    write  function that formats a number
    """

    label: str
    least: float | None = None
    most: float | None = None
    log: bool = False
    write: Callable[[float], str] = "{:g}".format


class _Scale:
    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        self.axis, self._begin, self._end = axis, begin, end
        positive = [value for value in values if value > 0] or [1.0]
        if axis.log:
            self.least = axis.least or min(positive)
            self.most = max(axis.most or max(positive), self.least * 1.01)
        else:
            self.least = 0.0 if axis.least is None else axis.least
            self.most = axis.most if axis.most is not None else _rounded(max([*values, self.least]))
            self.most = max(self.most, self.least + 1e-9)

    def at(self, value: float) -> float:
        # Return the pixel of a value; values beyond the axis are moved to its end.
        if self.axis.log:
            share = (log10(max(value, self.least)) - log10(self.least)) / (
                log10(self.most) - log10(self.least)
            )
        else:
            share = (value - self.least) / (self.most - self.least)
        return self._begin + min(1.0, max(0.0, share)) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        if self.axis.log:
            decades = range(floor(log10(self.least)), ceil(log10(self.most)) + 1)
            many = len(decades) > 3
            marks = [
                10.0**decade * step for decade in decades for step in ((1,) if many else (1, 2, 5))
            ]
            return [mark for mark in marks if self.least * 0.999 <= mark <= self.most * 1.001]
        step = _step((self.most - self.least) / 5)
        first = ceil(self.least / step - 1e-9)
        return [step * number for number in range(first, floor(self.most / step + 1e-9) + 1)]


def ink(index: int) -> tuple[str, str]:
    """Return the colour and dash pattern of the line with this index. Solid lines come first."""
    return INKS[index % len(INKS)], DASHES[index // len(INKS) % len(DASHES)]


def chart(
    title: str, lines: Sequence[Series], x: Axis, y: Axis, rules: Sequence[tuple[float, str]] = ()
) -> str:
    """Return a line chart as SVG text; "" if there are no points.

    rules  horizontal lines, such as targets: (value, name)
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x_scale = _Scale(x, [point[0] for point in points], LEFT, WIDTH - RIGHT)
    y_scale = _Scale(
        y, [point[1] for point in points] + [level for level, _ in rules], HEIGHT - BOTTOM, TOP
    )
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_grid(x_scale, y_scale),
        *(_rule(y_scale.at(level), name) for level, name in rules),
        *(_line(line, x_scale, y_scale) for line in lines if line.points),
        "</svg>",
    ]
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}</figure>"


def bars(
    title: str, values: Sequence[tuple[str, float, int]], write: Callable[[float], str]
) -> str:
    """Return a horizontal bar chart as SVG text; "" if there are no values.

    title   text above the chart
    values  (name, value, index of the name) of each bar; the index gives the colour
    write   function that formats a value
    """
    if not values:
        return ""
    most = max(value for _, value, _ in values) or 1.0
    row, name_width = 24, 150
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {row * len(values) + 8}" role="img" aria-label="{escape(title)}">'
    ]
    for number, (name, value, index) in enumerate(values):
        top, width = number * row + 4, value / most * (WIDTH - name_width - 70)
        parts.append(
            f'<text x="{name_width - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{name_width}" y="{top + 2}" width="{width:.1f}" height="16" rx="2" fill="{ink(index)[0]}"/>'
            f'<text x="{name_width + width + 6:.1f}" y="{top + 14}">{escape(write(value))}</text>'
        )
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}</svg></figure>"


def legend(names: Sequence[str]) -> str:
    keys = []
    for index, name in enumerate(names):
        colour, dash = ink(index)
        stroke = f'stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"'
        sample = f'<svg width="30" height="10" aria-hidden="true"><line x1="0" y1="5" x2="30" y2="5" {stroke}/></svg>'
        keys.append(f"<span>{sample} {escape(name)}</span>")
    return f'<p class="legend">{"".join(keys)}</p>'


def _grid(x_scale: _Scale, y_scale: _Scale) -> list[str]:
    parts = []
    for mark in y_scale.ticks():
        pixel = y_scale.at(mark)
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{pixel:.1f}" x2="{WIDTH - RIGHT}" y2="{pixel:.1f}"/>'
            f'<text x="{LEFT - 7}" y="{pixel + 4:.1f}" text-anchor="end">{escape(y_scale.axis.write(mark))}</text>'
        )
    for mark in x_scale.ticks():
        pixel, label = x_scale.at(mark), escape(x_scale.axis.write(mark))
        parts.append(
            f'<line class="grid" x1="{pixel:.1f}" y1="{TOP}" x2="{pixel:.1f}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{pixel:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x_scale.axis.label)}</text>"
        f'<text class="axis" x="13" y="{middle}" text-anchor="middle" transform="rotate(-90 13 {middle})">'
        f"{escape(y_scale.axis.label)}</text>"
    )
    return parts


def _rule(pixel: float, name: str) -> str:
    return (
        f'<line class="rule" x1="{LEFT}" y1="{pixel:.1f}" x2="{WIDTH - RIGHT}" y2="{pixel:.1f}"/>'
        f'<text class="rule" x="{WIDTH - RIGHT - 4}" y="{pixel - 4:.1f}" text-anchor="end">{escape(name)}</text>'
    )


def _line(line: Series, x_scale: _Scale, y_scale: _Scale) -> str:
    colour, dash = ink(line.index)
    places = [(x_scale.at(x), y_scale.at(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" stroke-linejoin="round"'
    drawn = f'<path d="{path}" {stroke}><title>{escape(line.name)}</title></path>'
    if len(places) > 24:
        return drawn
    dots = []
    for (x, y), (left, above) in zip(places, line.points, strict=True):
        label = f"{escape(line.name)}: {escape(x_scale.axis.write(left))}, {escape(y_scale.axis.write(above))}"
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{label}</title></circle>'
        )
    return drawn + "".join(dots)


def _step(rough: float) -> float:
    # Return the smallest of 1, 2, 2.5 and 5 times a power of ten that is at least `rough`.
    if rough <= 0:
        return 1.0
    power = 10.0 ** floor(log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)


def _rounded(value: float) -> float:
    # Return a round number that is at least `value`, as the end of an axis.
    step = _step(value / 5) if value > 0 else 1.0
    return step * ceil(value / step - 1e-9)
