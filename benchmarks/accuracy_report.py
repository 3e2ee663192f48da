"""What `accuracy.py` shows: tables in Markdown, and the map of learning rate and staleness as an SVG."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accuracy_methods import MICRO_BATCHES, MORE_WEIGHT_DECAY, OPTIMIZERS, K, Plan, Row
from accuracy_runs import Run
from scipy.stats import t as student

from stretto.pipelining import Staleness

METHODS = f"""\
DSP is the default: m_k = K-1-k, the backward at present weights, Nesterov momentum where the optimizer is SGD.
FR has the same staleness and the same recomputation, with plain momentum as in its paper: nothing else differs
(with AdamW it is DSP). DDG keeps the weights and the graph of the forward for the backward. Long queues are p =
q = 1. GPipe cuts a batch into {MICRO_BATCHES}, and its batch norm sees one part at a time (without batch norm
it is backpropagation). DGL trains each block on a small classifier of its own, DNI on gradients that a network
predicts from the block's output and the label. accumulate={MICRO_BATCHES} cuts a batch into micro-batches of
which each counts for m, predict runs the forward on predicted weights, discount divides the rate by 1 + m_k,
fading over the first quarter, warm-up is the first tenth. SGD has no weight decay but where a row says so
({MORE_WEIGHT_DECAY:g}), and such rows are compared with backpropagation that has it too, as those of NAdam are."""
SHORT_RUNS_PAY_MOST = (
    "Short runs pay most: staleness costs progress while the weights move fast, and a longer run makes up for it."
)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and its 95 % interval (Student's t; none from one value)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, mean, mean)
        error = statistics.stdev(values) / len(values) ** 0.5
        half = float(student.ppf(0.975, len(values) - 1)) * error
        return cls(mean, mean - half, mean + half)


def reference_of(plan: Plan, row: Row) -> Row:
    """The row that `row` is compared with: the first one of its group."""
    return next(other for other in plan.rows if other.group == row.group)


def paired_difference(runs: Mapping[Row, Sequence[Run]], row: Row, reference: Row) -> Interval:
    """Score minus the reference's, seed by seed, over the seeds that both have."""
    scores = {run.condition.seed: run.score for run in runs[reference]}
    of_row = {run.condition.seed: run.score for run in runs[row]}
    return Interval.of([of_row[seed] - scores[seed] for seed in of_row.keys() & scores.keys()])


def table(plan: Plan, rates: Mapping[Row, float], runs: Mapping[Row, Sequence[Run]]) -> str:
    """The rows of a plan: staleness, optimizer, chosen rate, score and the difference."""
    is_text = plan.rows[0].base.workload == "text"
    score = "perplexity of a character" if is_text else "test accuracy, %"
    lines = [
        f"{plan.title}. {plan.remark}",
        "",
        f"| method | m | optimizer | rate | {score}: mean (lowest .. highest) | seeds | "
        "minus backpropagation (95 % interval) |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    digits = 3 if is_text else 2
    for row in plan.rows:
        scores = [run.score for run in runs[row]]
        reference = reference_of(plan, row)
        spec = Staleness.parse(row.base.staleness)
        m = "0" if not any(spec.m) else f"({', '.join(map(str, spec.m))})"
        difference = ""
        if row is not reference:
            found = paired_difference(runs, row, reference)
            difference = f"{found.mean:+.{digits}f} ({found.low:+.{digits}f} .. {found.high:+.{digits}f})"
        cells = [
            row.title,
            m + ", stashed" * (spec.backward_params == "stashed"),
            OPTIMIZERS[row.base.optimizer],
            f"{rates[row]:g}",
            f"**{statistics.fmean(scores):.{digits}f}** ({min(scores):.{digits}f} .. {max(scores):.{digits}f})",
            str(len(scores)),
            difference,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_map(scores: Mapping[tuple[int, float], float]) -> str:
    """An SVG: a cell for each multiple of m_k = K-1-k (rows) and learning rate (columns), with its accuracy.

    It has a background of its own, so that it reads alike on light and dark pages.
    """
    multiples, rates = (sorted({key[at] for key in scores}) for at in (0, 1))
    width, height, left, top = 86, 46, 178, 66
    total_width, total_height = left + width * len(rates) + 20, top + height * len(multiples) + 62
    best = max(scores.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width:g} {total_height:g}" '
        f'width="{total_width:g}" height="{total_height:g}" font-family="system-ui, sans-serif" font-size="14" '
        'role="img">',
        "<title>Accuracy by learning rate and staleness</title>",
        f'<rect width="{total_width:g}" height="{total_height:g}" rx="8" fill="#ffffff"/>',
        _text(
            20, 28, f"Accuracy after 750 updates, % (K = {K}, Fashion-MNIST, held-out images)", "start", bold=True
        ),
        _text(20, 50, "In a run this short staleness costs at every rate", "start", "#555555"),
    ]
    for line, times in enumerate(multiples):
        y = top + line * height
        m = ", ".join(str(times * (K - 1 - k)) for k in range(K))
        parts.append(_text(left - 14, y + height / 2 + 5, f"m = ({m})" if times else "backpropagation", "end"))
        for column, rate in enumerate(rates):
            x, score = left + column * width, scores[times, rate]
            fill, ink = _colours(best - score)
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{width - 3:g}" height="{height - 3:g}" rx="4" fill="{fill}"/>'
            )
            parts.append(_text(x + (width - 3) / 2, y + height / 2 + 4, f"{score:.1f}", "middle", ink))
    bottom = top + height * len(multiples)
    parts += [
        _text(left + (column + 0.5) * width, bottom + 18, f"{rate:g}", "middle")
        for column, rate in enumerate(rates)
    ]
    parts.append(_text(left + width * len(rates) / 2, bottom + 44, "learning rate", "middle", "#555555"))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str, fill: str = "#222222", *, bold: bool = False) -> str:
    weight = ' font-weight="600"' * bold
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{weight}>{text}</text>'


def _colours(lost: float) -> tuple[str, str]:
    """The colours of a cell and of its figure: from blue over yellow to red as points are lost."""
    stops = ((0.0, (33, 102, 172)), (1.0, (103, 169, 207)), (3.0, (253, 219, 137)), (8.0, (239, 138, 98)))
    last = (30.0, (178, 24, 43))
    lost = min(lost, last[0])
    for (start, low), (end, high) in zip(stops, (*stops[1:], last), strict=True):
        if lost <= end:
            share = (lost - start) / (end - start)
            red, green, blue = (round(a + share * (b - a)) for a, b in zip(low, high, strict=True))
            break
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if is_dark else "#222222"
