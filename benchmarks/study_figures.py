"""The study's figure: fresh examples over those without echo, by the echoing factor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 250, 52, 48
_COLOURS = ("#2f6cbf", "#e08a3c", "#3b9b6d", "#b0509a", "#a08030", "#c0504d", "#7a7a7a")
_CSS = """
text{font:13px system-ui,sans-serif;fill:#24292f}
.title{font-weight:600;font-size:16px}
.note{font-size:12px;fill:#57606a}
.grid{stroke:#d0d7de;stroke-width:1}
.line{fill:none;stroke-width:2}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9da7b1}.grid{stroke:#3d444d}}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a figure; a dashed one is of the paper or an ideal."""

    name: str
    points: Mapping[float, float]
    """y by x, x a power of two."""
    is_dashed: bool = False


def line_chart(title: str, x_title: str, lines: Sequence[Line]) -> str:
    """An SVG document that needs nothing else; x is logarithmic, y from 0 to 1 or as far as the points go."""
    xs = sorted({x for line in lines for x in line.points})
    top = max(1.0, *(y for line in lines for y in line.points.values()))
    span = math.log2(xs[-1] / xs[0]) or 1.0

    def at(x: float, y: float) -> str:
        across = _LEFT + (WIDTH - _LEFT - _RIGHT) * math.log2(x / xs[0]) / span
        return f"{across:.1f} {_TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - y / top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{_CSS}</style>",
        f'<text class="title" x="8" y="24">{escape(title)}</text>',
    ]
    for step in range(math.floor(top / 0.2) + 1):
        left, right = at(xs[0], step / 5), at(xs[-1], step / 5)
        y = left.split()[1]
        parts.append(f'<path class="grid" d="M{left}L{right}"/>')
        parts.append(f'<text class="note" x="{_LEFT - 8}" y="{y}" dy="4" text-anchor="end">{step / 5:.1f}</text>')
    for x in xs:
        across = at(x, 0).split()[0]
        parts.append(
            f'<text class="note" x="{across}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{x:g}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="note" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>')
    for at_line, line in enumerate(lines):
        colour = _COLOURS[at_line % len(_COLOURS)]
        dash = ' stroke-dasharray="5 4"' * line.is_dashed
        points = [at(x, y) for x, y in sorted(line.points.items())]
        if len(points) > 1:
            parts.append(f'<path class="line" stroke="{colour}"{dash} d="M{"L".join(points)}"/>')
        if not line.is_dashed:
            parts += [
                f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>'
                for x, y in (point.split() for point in points)
            ]
        y = _TOP + 10 + 22 * at_line
        x = WIDTH - _RIGHT + 14
        parts.append(f'<path class="line" stroke="{colour}"{dash} d="M{x} {y}h24"/>')
        parts.append(f'<text x="{x + 32}" y="{y + 4}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>\n"])
