"""Draws the policies' table: a panel for each column, a dot for each policy, better to the left."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

ROW, TOP, NAMES, PANEL, GAP = 22, 64, 270, 118, 22  # in pixels
STYLE = "font-family='system-ui, sans-serif' font-size='12' fill='#222'"
SHIPPED, FRONT, BEATEN = "#c2410c", "#1d4ed8", "#ffffff"


def draw(names: Sequence[str], columns: Sequence[tuple[str, Sequence[float], str]], front: Sequence[str]) -> str:
    """An SVG. `columns`: heading, a value for each name of which less is better, and the format of its numbers; a
    heading that begins with "-" has its values negated, for more is better. The first name is the shipped policy.
    """
    width = NAMES + len(columns) * (PANEL + GAP) + GAP
    height = TOP + ROW * len(names) + 34
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' {STYLE}>",
        f"<rect width='{width}' height='{height}' fill='#fff'/>",
        "<text x='10' y='22' font-size='14' font-weight='600'>Policies compared</text>",
    ]
    for number, name in enumerate(names):
        weight = " font-weight='600'" if not number else ""
        parts.append(f"<text x='{NAMES - 12}' y='{_y(number) + 4}' text-anchor='end'{weight}>{escape(name)}</text>")
    for number, (heading, values, form) in enumerate(columns):
        left = NAMES + GAP / 2 + number * (PANEL + GAP)
        parts += _panel(left, heading, values, form, [name in front for name in names])
    legend = "Left is better. Filled: on the Pareto front. Orange: shipped."
    parts.append(f"<text x='10' y='{height - 10}' fill='#555'>{legend}</text>")
    return "\n".join([*parts, "</svg>\n"])


def _y(number: int) -> int:
    return TOP + ROW * number + ROW // 2


def _panel(left: float, heading: str, values: Sequence[float], form: str, on_front: Sequence[bool]) -> list[str]:
    sign = -1 if heading.startswith("-") else 1
    low, high = min(values), max(values)
    bottom = _y(len(values) - 1) + ROW // 2
    parts = [
        f"<text x='{left}' y='{TOP - 26}' font-weight='600'>{escape(heading.lstrip('-'))}</text>",
        f"<text x='{left}' y='{TOP - 8}' fill='#555'>{sign * low:{form}}</text>",
        f"<text x='{left + PANEL}' y='{TOP - 8}' fill='#555' text-anchor='end'>{sign * high:{form}}</text>",
        f"<rect x='{left}' y='{TOP}' width='{PANEL}' height='{bottom - TOP}' fill='#f4f4f5'/>",
    ]
    shipped = left + PANEL * (values[0] - low) / ((high - low) or 1)
    parts.append(f"<path d='M{shipped:.1f} {TOP}V{bottom}' stroke='{SHIPPED}' stroke-dasharray='2 3'/>")
    for number, value in enumerate(values):
        x = left + PANEL * (value - low) / ((high - low) or 1)
        edge = SHIPPED if not number else FRONT
        fill = edge if on_front[number] else BEATEN
        parts.append(
            f"<circle cx='{x:.1f}' cy='{_y(number)}' r='4.5' fill='{fill}' stroke='{edge}' stroke-width='1.5'/>"
        )
    return parts
