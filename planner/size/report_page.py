"""The HTML page of `penstock size --report`. It is self-contained, and computed here in Python.

The page's sliders and choices select among values that were computed for it. Its script has no
formula, so that page and command cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log, log10

import msgspec

from planner.size.pareto_front import BATCHES, FleetPoint, LadderStep, headline
from planner.size.plan_draft import FleetPlan
from planner.size.shape_choices import (
    LoadChoice,
    choices_for,
    replica_counts,
    shapes_of,
    with_replicas,
)
from planner.size.show import plan_lines
from planner.size.units import ms, usd
from planner.size.workload import Promise

TPOT_PROMISES_MS = (5, 10, 15, 20, 30, 40, 60, 100, 300)
RATES = (0.5, 1, 2, 5, 10, 20, 50, 100)
WIDTH, HEIGHT, MARGIN = 640, 320, 48
# The animation shows one step this many times slower than it is.
SLOWER = 40
MAX_LANES = 16

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
pre { overflow-x: auto; font-size: 13px } .headline { font-size: 1.1rem; font-weight: 600 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #8884 }
td:not(:last-child) { white-space: nowrap } line { stroke: #8884 } text { fill: currentColor }
.bar { display: flex; height: 14px; width: 320px; background: #8882 }
.bar i { display: block; height: 100% }
.weights { background: #2a78d6 } .kv { background: #1baf7a } .flops { background: #eda100 }
.collectives { background: #d64545 } .other { background: #888 }
.grey td, td.off { opacity: .5 } tr.good td, td.good { color: #12805a; font-weight: 600 }
td[data-text] { cursor: pointer } td.chosen { outline: 3px solid #d64545 }
circle { fill: #2a78d6 } circle.best { fill: #1baf7a }
circle.no { fill: #888; opacity: .35 } circle.chosen { stroke: #d64545; stroke-width: 3 }
.lane { position: relative; height: 12px; margin: 3px 0; background: #8882; overflow: hidden }
.lane i { position: absolute; width: 12px; height: 12px; background: #2a78d6;
  animation: flow linear infinite }
@keyframes flow { from { left: -12px } to { left: 100% } }
@media (prefers-reduced-motion: reduce) { .lane i { animation: none; left: 50% } }
"""

_SCRIPT = """
for (const slider of document.querySelectorAll("input[data-group]")) {
  const show = () => {
    for (const each of document.querySelectorAll(`[data-of="${slider.dataset.group}"]`))
      each.hidden = each.dataset.at !== slider.value;
  };
  slider.addEventListener("input", show);
  show();
}
for (const point of document.querySelectorAll("circle")) point.addEventListener("click", () => {
  document.querySelectorAll("circle.chosen").forEach((each) => each.classList.remove("chosen"));
  point.classList.add("chosen");
  document.getElementById("chosen").textContent = point.querySelector("title").textContent;
});
const cells = document.querySelectorAll("td[data-text]");
for (const cell of cells) cell.addEventListener("click", () => {
  document.querySelectorAll("td.chosen").forEach((each) => each.classList.remove("chosen"));
  cell.classList.add("chosen");
  document.getElementById("chosen-shape").textContent = cell.dataset.text;
});
"""


def size_page(
    plan: FleetPlan, points: Sequence[FleetPoint], ladders: Mapping[int, Sequence[LadderStep]]
) -> str:
    """Return the HTML page of a plan: all its layouts, and decode speeds by TP and batch."""
    gpus = plan.hardware.gpus or plan.hardware.domain
    title = f"{escape(plan.model.name)} on {escape(plan.hardware.gpu.name)}"
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Size: {title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            *_headlines(plan, points),
            *_ladders(ladders),
            *_tokens(ladders[BATCHES[0]]),
            *_shapes(points, gpus),
            *_loads(plan, points, gpus),
            *_front(points),
            "<h2>Why: gate by gate</h2>",
            f"<pre>{escape(chr(10).join(plan_lines(plan)))}</pre>",
            f"<script>{_SCRIPT}</script></body></html>\n",
        )
    )


def _slider(group: str, label: str, count: int, at: int) -> str:
    return (
        f'<p><label>{label} <input type="range" min="0" max="{count - 1}" value="{at}" '
        f'data-group="{group}"></label></p>'
    )


def _headlines(plan: FleetPlan, points: Sequence[FleetPoint]) -> Iterator[str]:
    # Yield the headline for each promise; the slider begins at the promise of the plan.
    limits = _tpot_limits_s(plan)
    at = limits.index(plan.work.tpot_s)
    yield _slider("promise", "Promised time per token", len(limits), at)
    for index, limit_s in enumerate(limits):
        promises = () if limit_s is None else (Promise(tpot_s=limit_s),)
        work = msgspec.structs.replace(plan.work, promises=promises)
        text = "no promise" if limit_s is None else ms(limit_s)
        yield (
            f'<p class="headline" data-of="promise" data-at="{index}">{text}: '
            f"{escape(headline(points, work))}</p>"
        )


def _tpot_limits_s(plan: FleetPlan) -> list[float | None]:
    # Return the times per token that the sliders offer, with the plan's own; None is no promise.
    given = plan.work.tpot_s
    own = () if given is None else (given,)
    return [*sorted({*own, *(limit / 1e3 for limit in TPOT_PROMISES_MS)}), None]


def _ladders(ladders: Mapping[int, Sequence[LadderStep]]) -> Iterator[str]:
    yield "<h2>TP ladder: ideal, expected, and where a step's time goes</h2>"
    yield _slider("batch", "Batch", len(ladders), 0)
    longest = max(step.expected_s for steps in ladders.values() for step in steps)
    for index, (batch, steps) in enumerate(ladders.items()):
        yield f'<div data-of="batch" data-at="{index}"><p>Batch {batch}</p><table><tr>'
        heads = ("TP", "ideal", "expected", "tok/s/GPU", "$/1M", "TP tax", "bound")
        yield "".join(f"<th>{head}</th>" for head in heads) + "<th>step</th><th></th></tr>"
        for step in steps:
            tax = "-" if step.tax is None else f"{step.tax:+.0%}"
            cells = (
                *(str(step.tp), ms(step.ideal_s), ms(step.expected_s)),
                *(f"{step.tokens_s_gpu:.0f}", usd(step.usd_million), tax, step.parts.bound),
            )
            grey = ' class="grey"' if step.problem else ""
            yield f"<tr{grey}>" + "".join(f"<td>{cell}</td>" for cell in cells)
            yield f"<td>{_bar_html(step, longest)}</td><td>{escape(step.problem)}</td></tr>"
        yield "</table></div>"
    kinds = ("weights", "kv", "flops", "collectives", "other")
    yield "<p>" + " ".join(f'<span class="{kind}">&nbsp;&nbsp;</span> {kind}' for kind in kinds)


def _bar_html(step: LadderStep, longest_s: float) -> str:
    # Return a step's time as a bar; of weights and FLOPs, which overlap, the larger.
    parts = step.parts
    limited = "weights" if parts.weights_s >= parts.flops_s else "flops"
    widths = {
        limited: max(parts.weights_s, parts.flops_s),
        "kv": parts.kv_s,
        "collectives": parts.collectives_s,
        "other": parts.attention_s + parts.overhead_s + parts.sequences_s,
    }
    pieces = (
        f'<i class="{kind}" style="width:{100 * seconds / longest_s:.1f}%" title="{ms(seconds)}">'
        "</i>"
        for kind, seconds in widths.items()
    )
    return f'<div class="bar">{"".join(pieces)}</div>'


def _tokens(steps: Sequence[LadderStep]) -> Iterator[str]:
    yield f"<h2>One decoded token: each GPU reads its part of the weights ({SLOWER}x slower)</h2>"
    yield _slider("token", "TP", len(steps), 0)
    for index, step in enumerate(steps):
        seconds = step.parts.weights_s * SLOWER
        yield f'<div data-of="token" data-at="{index}"><p>TP {step.tp}: {ms(step.parts.weights_s)}'
        yield " to read the weights</p>"
        dot = f'<div class="lane"><i style="animation-duration:{seconds:.3f}s"></i></div>'
        yield dot * min(step.tp, MAX_LANES) + "</div>"


def _shapes(points: Sequence[FleetPoint], gpus: int) -> Iterator[str]:
    # Yield a table of requests/s by shape and number of replicas for each batch.
    yield f"<h2>TP and replicas on {gpus} GPUs: requests/s; choose a cell</h2>"
    yield _slider("shape", "Batch per replica", len(BATCHES), 0)
    counts = replica_counts(gpus)
    for index, batch in enumerate(BATCHES):
        yield f'<div data-of="shape" data-at="{index}"><p>{batch} at a time per replica</p><table>'
        yield "<tr><th>shape</th>" + "".join(f"<th>x {count}</th>" for count in counts) + "</tr>"
        for batches in shapes_of(points):
            point = batches[index]
            yield f"<tr><td>{_shape_text(point)}</td>"
            yield from (_cell_html(with_replicas(point, count, gpus)) for count in counts)
            yield "</tr>"
        yield "</table></div>"
    yield '<p id="chosen-shape">Choose a cell.</p>'


def _cell_html(point: FleetPoint) -> str:
    kind = "off" if point.reason else "good" if point.is_best else ""
    text = escape(_point_text(point))
    return f'<td class="{kind}" data-text="{text}">{point.requests_s:.2f}</td>'


def _loads(plan: FleetPlan, points: Sequence[FleetPoint], gpus: int) -> Iterator[str]:
    # Yield the least fleet of every shape for each rate and promised time per token.
    ttft_s = plan.work.ttft_s
    beside = "" if ttft_s is None else f", with {ms(ttft_s)} to the first token"
    yield f"<h2>Rate and latency: the least fleet of each shape{beside}</h2>"
    given, limits = plan.work.rate_s or RATES[0], _tpot_limits_s(plan)
    rates = sorted({*RATES, given})
    yield _slider("rate", "Requests per second", len(rates), rates.index(given))
    at = limits.index(plan.work.tpot_s)
    yield _slider("latency", "Promised time per token", len(limits), at)
    for row, rate in enumerate(rates):
        yield f'<div data-of="rate" data-at="{row}">'
        for column, limit_s in enumerate(limits):
            promise = "any time per token" if limit_s is None else f"{ms(limit_s)} per token"
            yield f'<div data-of="latency" data-at="{column}"><p>{rate:g} requests/s, {promise}</p>'
            choices = list(choices_for(points, rate, limit_s, ttft_s, gpus))
            yield from _choices_html(choices, plan.hardware.price_hour)
            yield "</div>"
        yield "</div>"


def _choices_html(choices: Sequence[LoadChoice], price_hour: float) -> Iterator[str]:
    heads = ("shape", "batch", "replicas", "GPUs", "$/hour", "per token", "TTFT", "")
    yield "<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"
    least = min((choice.gpus for choice in choices if not choice.reason), default=0)
    for choice in choices:
        point = choice.point
        cells = ["-"] * 6
        if point is not None:
            cells = [str(point.batch), str(point.replicas), str(choice.gpus)]
            cells += [usd(choice.gpus * price_hour), ms(point.tpot_s), ms(point.ttft_s)]
        kind = "grey" if choice.reason else "good" if choice.gpus == least else ""
        cells = [_shape_text(choice.shape), *cells, escape(choice.reason)]
        yield f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _shape_text(point: FleetPoint) -> str:
    stages = f" x PP {point.pp}" if point.pp > 1 else ""
    return f"{escape(point.model)}, TP {point.tp}{stages}"


def _front(points: Sequence[FleetPoint]) -> Iterator[str]:
    yield "<h2>All layouts: green ones are beaten by none, grey ones cannot be</h2>"
    yield f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="layouts">'
    times = [point.tpot_s for point in points]
    rates = [point.requests_s for point in points]
    bottom = HEIGHT - MARGIN
    for value in _ticks(times):
        x = MARGIN + (WIDTH - 2 * MARGIN) * _place(value, times)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{MARGIN}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{ms(value)}</text>'
    for value in _ticks(rates):
        y = bottom - (HEIGHT - 2 * MARGIN) * _place(value, rates)
        yield f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{MARGIN - 6}" y="{y + 5:.1f}" text-anchor="end">{value:g}</text>'
    for point in points:
        x = MARGIN + (WIDTH - 2 * MARGIN) * _place(point.tpot_s, times)
        y = bottom - (HEIGHT - 2 * MARGIN) * _place(point.requests_s, rates)
        kind = "no" if point.reason else "best" if point.is_best else ""
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>'
        yield f"{escape(_point_text(point))}</title></circle>"
    yield f'<text x="{WIDTH // 2}" y="{HEIGHT - 8}" text-anchor="middle">time per token</text>'
    yield '<text x="4" y="16">requests/s</text></svg><p id="chosen">Choose a point.</p>'


def _ticks(values: Sequence[float]) -> list[float]:
    # Return the powers of ten within the values, with their doubles and halves.
    low, high = min(values), max(values)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _place(value: float, values: Sequence[float]) -> float:
    # Return the place of a value, 0 to 1, on a logarithmic axis from the least to the largest.
    low, high = min(values), max(values)
    return log(value / low) / log(high / low) if high > low else 0.5


def _point_text(point: FleetPoint) -> str:
    text = (
        f"{point.replicas} x TP {point.tp} x PP {point.pp}, batch {point.batch}, {point.model}: "
        f"{ms(point.tpot_s)} per token, TTFT {ms(point.ttft_s)}, {point.requests_s:.1f} "
        f"requests/s, {point.tokens_s_gpu:.0f} tokens/s/GPU, {usd(point.usd_million)} per 1M"
    )
    return f"{text}. Not possible: {point.reason}" if point.reason else text
