"""The picture of a schedule: a row for each device, time to the right, as text for a terminal and as SVG.

Drawn from the event model, so a wait for a neighbour or for a slow link is where it would be.
"""

import math

from rich.style import Style
from rich.text import Text

from stretto.pipelining.events import BlockTimes, Hops, Kind, Operation, Timeline, play
from stretto.pipelining.spec import Staleness

KINDS: tuple[Kind, ...] = ("forward", "recompute", "backward")
# White letters are readable on each, and they are told apart without red and green, on white and on black.
COLOURS: dict[Kind, str] = {"forward": "#2f6cbf", "recompute": "#8a5aa8", "backward": "#1f7a6f"}
_MAX_SYSTEMS = 4  # of rows below each other, as a text's width allows; beyond, operations lose their labels
_LEFT, _WIDTH, _ROW, _CELL, _TOP = 128, 1000, 38, 30, 74  # pixels
_DIGIT = 7.2  # the width of one in the SVG's cells


def schedule_text(
    spec: Staleness,
    times: BlockTimes | None = None,
    *,
    hop_s: Hops = 0.0,
    num_batches: int | None = None,
    width: int = 120,
) -> Text:
    """The schedule as lines of `width` columns: F, R and B for forward, recompute and backward, and the batch.

    Colours are added for a terminal; `.plain` has all that is needed without. Rows longer than `width` go on below.

    Args:
        spec: (p; m).
        times: of the blocks; default: equal, a backward as long as two forwards.
        hop_s: latency between neighbours, in the unit of `times`.
        num_batches: to draw; default: enough for the warm-up, a steady part and the drain.
        width: columns, 60 or more.

    Raises ValueError for fewer.
    """
    if width < 60:
        raise ValueError(f"width={width}: expected 60 columns or more")
    timeline = _play(spec, times, hop_s, num_batches)
    names = [name + " " for name in _names(spec)]
    left = max(map(len, names))
    room = width - left
    lasting = [one for one in timeline.operations if one.end_s > one.start_s]
    needed = max((len(_label(one)) + 1) / (one.end_s - one.start_s) for one in lasting) if lasting else 1.0
    scale = min(needed, _MAX_SYSTEMS * room / timeline.end_s) if lasting else 1.0
    length = math.ceil(timeline.end_s * scale)
    rows = [_text_row(timeline, block, scale, length) for block in range(spec.K)]
    heading = Text("".join(_phase_row(timeline, scale, length)) if lasting else "")
    text = Text()
    for first in range(0, length, room):
        text.append(" " * left)
        text.append_text(heading[first : first + room]).append("\n")
        for name, row in zip(names, rows, strict=True):
            text.append(name.rjust(left))
            text.append_text(row[first : first + room]).append("\n")
    legend = Text()
    shown = [kind for kind in KINDS if any(one.kind == kind for one in timeline.operations)]
    for kind in shown:
        legend.append(f" {kind[0].upper()} ", _style(kind)).append(f" {kind}  ")
    return text.append_text(legend).append(". idle")


def schedule_svg(
    spec: Staleness,
    times: BlockTimes | None = None,
    *,
    hop_s: Hops = 0.0,
    num_batches: int | None = None,
) -> str:
    """The schedule as an SVG document that needs nothing else, for pages light or dark; arguments as above.

    The way of one batch through all blocks and back is traced.
    """
    timeline = _play(spec, times, hop_s, num_batches)
    scale = (_WIDTH - _LEFT - 8) / timeline.end_s if timeline.end_s else 1.0
    bottom = _TOP + _ROW * spec.K
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 14}" role="img" '
        f'aria-label="{spec}: what each device does when">',
        f"<style>{_CSS}</style>",
        f'<text class="title" x="8" y="22">{spec}</text>',
        *_legend(timeline),
    ]
    for name, first, last in _phases(timeline) if timeline.operations else ():
        x, end = _LEFT + first * scale, _LEFT + last * scale
        parts.append(f'<path class="phase" d="M{x:.1f} {_TOP - 14}V{bottom}"/>')
        if (end - x) > _DIGIT * len(name):
            parts.append(f'<text class="note" x="{x + 5:.1f}" y="{_TOP - 8}">{name}</text>')
    for block, name in enumerate(_names(spec)):
        y = _TOP + _ROW * block
        parts.append(f'<text x="8" y="{y + 20}">{name}</text>')
        parts.append(
            f'<rect class="idle" x="{_LEFT}" y="{y}" width="{timeline.end_s * scale:.1f}" height="{_CELL}" rx="3"/>'
        )
    parts.append(_trace(timeline, scale))  # behind the cells
    parts += [_cell(one, scale, traced=one.batch == _traced(timeline)) for one in timeline.operations]
    return "\n".join([*parts, "</svg>\n"])


_CSS = """
text{font:14px system-ui,sans-serif;fill:#24292f}
.title{font-weight:600;font-size:16px}
.note{font-size:12px;fill:#57606a}
.cell text{fill:#fff;font-size:12px;text-anchor:middle}
.idle{fill:#80808022}
.phase{stroke:#80808099;stroke-dasharray:3 3;fill:none}
.traced rect{stroke:#e08a3c;stroke-width:3}
.trace{stroke:#e08a3c;stroke-width:1.5;fill:none}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9da7b1}.idle{fill:#80808044}}
"""


def _play(spec: Staleness, times: BlockTimes | None, hop_s: Hops, num_batches: int | None) -> Timeline:
    times = times or BlockTimes.even(spec.K, spec.K, 2 * spec.K)
    return play(spec, times, hop_s=hop_s, num_batches=spec.m[0] + 4 if num_batches is None else num_batches)


def _names(spec: Staleness) -> list[str]:
    return [f"device {k}, m={age}" for k, age in enumerate(spec.m)]


def _label(one: Operation) -> str:
    return f"{one.kind[0].upper()}{one.batch}"


def _style(kind: Kind) -> Style:
    return Style(color="white", bgcolor=COLOURS[kind])


def _phases(timeline: Timeline) -> list[tuple[str, float, float]]:
    """Warm-up, until a gradient first reaches the first device, steady part and drain, as that sees them."""
    own = [one for one in timeline.operations if one.block == 0]
    begin = min(one.start_s for one in own if one.kind == "backward")
    last = max(one.end_s for one in own if one.kind == "forward")
    if last <= begin:
        return [("warm-up", 0.0, begin), ("drain", begin, timeline.end_s)]
    return [("warm-up", 0.0, begin), ("steady", begin, last), ("drain", last, timeline.end_s)]


def _phase_row(timeline: Timeline, scale: float, length: int) -> list[str]:
    row = [" "] * length
    for name, first, last in _phases(timeline):
        begin, end = round(first * scale), round(last * scale)
        row[begin:end] = f"|{name}"[: end - begin].ljust(end - begin)
    return row


def _text_row(timeline: Timeline, block: int, scale: float, length: int) -> Text:
    row = Text()
    for one in timeline.operations:
        if one.block == block:
            begin, end = round(one.start_s * scale), round(one.end_s * scale)
            row.append("." * (begin - len(row)), "dim")
            row.append(_label(one)[: end - begin].ljust(end - begin, "-"), _style(one.kind))
    return row.append("." * (length - len(row)), "dim")


def _traced(timeline: Timeline) -> int:
    """The batch in the middle."""
    batches = {one.batch for one in timeline.operations}
    return len(batches) // 2


def _legend(timeline: Timeline) -> list[str]:
    parts, x = [], 8.0
    for kind in KINDS:
        if any(one.kind == kind for one in timeline.operations):
            parts.append(f'<rect x="{x}" y="33" width="14" height="14" rx="3" fill="{COLOURS[kind]}"/>')
            parts.append(f'<text class="note" x="{x + 20}" y="45">{kind}</text>')
            x += 34 + _DIGIT * len(kind)
    if timeline.operations:
        parts.append(f'<path class="trace" stroke-width="3" d="M{x} 40h14"/>')
        parts.append(f'<text class="note" x="{x + 20}" y="45">the way of batch {_traced(timeline)}</text>')
    return parts


def _cell(one: Operation, scale: float, *, traced: bool) -> str:
    x, y, width = _LEFT + one.start_s * scale, _TOP + _ROW * one.block, (one.end_s - one.start_s) * scale
    number = str(one.batch)
    label = f'<text x="{x + width / 2:.1f}" y="{y + 20}">{number}</text>' if width > _DIGIT * len(number) else ""
    return (
        f'<g class="cell{" traced" * traced}"><title>device {one.block}: {one.kind} of batch {number}</title>'
        f'<rect x="{x + 0.5:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{_CELL}" rx="3" '
        f'fill="{COLOURS[one.kind]}"/>{label}</g>'
    )


def _trace(timeline: Timeline, scale: float) -> str:
    """From a device's cell of the traced batch to the next one's, and back."""
    batch, lines = _traced(timeline), []
    spans = {(one.block, one.kind): one for one in timeline.operations if one.batch == batch}
    for block in range(timeline.num_blocks - 1 if spans else 0):
        steps: tuple[tuple[Kind, int, int], ...] = (("forward", block, block + 1), ("backward", block + 1, block))
        for kind, source, goal in steps:
            left, arrival = spans[source, kind], spans[goal, kind]
            ends = [(left.end_s, source), (arrival.start_s, goal)]
            (x, y), (to_x, to_y) = ((_LEFT + time * scale, _TOP + _ROW * at + _CELL / 2) for time, at in ends)
            lines.append(f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}")
    return f'<path class="trace" d="{"".join(lines)}"/>'
