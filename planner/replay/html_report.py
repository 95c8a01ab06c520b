"""Builds the HTML page of a comparison of policies: curves over load, latencies, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from planner.bench.percentiles import Summary
from planner.replay.svg_chart import Axis, Series, bars, chart, legend
from planner.replay.sweep import Comparison, ComparisonPoint, ComparisonResult, UnknownCapacity

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d9dee6; --ground: #ffffff; --card: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9f0; --soft: #9aa6b5; --line: #333c48; --ground: #14181e; --card: #1b2129 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 1180px; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem }
p.lead { color: var(--soft); margin: .3rem 0 0 }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: 1rem 0 }
.legend span { white-space: nowrap }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 1rem }
figure svg { width: 100%; max-width: 600px }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem }
figcaption { font-weight: 600; margin-bottom: .3rem }
svg text { font-size: 12px; fill: var(--soft) } svg .axis { fill: var(--ink) }
svg .grid { stroke: var(--line); stroke-width: 1 }
svg line.rule { stroke: var(--soft); stroke-dasharray: 4 4 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { font-weight: 600; color: var(--soft); vertical-align: bottom } th:first-child, td:first-child { text-align: left }
td.best { font-weight: 700 }
"""

HEADS = (
    *(
        "policy",
        "load",
        "attainment",
        "good req/s",
        "good tokens/s",
        "TTFT p50 s",
        "TTFT p99 s",
        "TPOT p50 ms",
    ),
    *(
        "TPOT p99 ms",
        "hits",
        "of ideal",
        "imbalance",
        "shed",
        "lost",
        "wasted",
        "fairness",
        "decision us",
    ),
)


def page(result: ComparisonResult, trace: str) -> str:
    """Return the HTML page of a comparison; `trace` is the name of the replayed trace."""
    comparison = result.comparison
    names = list(comparison.policies)
    title = f"{trace} on {comparison.fleet.name}"
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Replay: {escape(title)}</title><style>{_STYLE}</style></head><body>",
            f'<h1>Replay: {escape(title)}</h1><p class="lead">{escape(_lead(comparison))}</p>',
            legend(names),
            _curves(result, names),
            _spreads(result, names),
            _capacities(result, names),
            f'<h2>All figures</h2><div class="wide">{_table(result.points)}</div>',
            "</body></html>\n",
        ]
    )


def _lead(comparison: Comparison) -> str:
    slo = comparison.options.standard
    budgets = f"first token within {slo.ttft_s:g} s and {slo.tpot_s * 1e3:g} ms per further token"
    if comparison.options.classes:
        budgets = f"classes {', '.join(comparison.options.classes)}; others: {budgets}"
    door = "no admission" if comparison.admission is None else f"admission {comparison.admission}"
    requests, seed = len(comparison.requests), comparison.options.seed
    return f"{requests} requests; good means {budgets}; {door}; seed {seed}."


def _curves(result: ComparisonResult, names: Sequence[str]) -> str:
    comparison = result.comparison
    x = Axis(
        "users" if comparison.by_users else "rate, as a multiple of the recorded one", least=0.0
    )
    targets = [(target, f"{target:.0%}") for target in comparison.targets or (0.9,)]

    def draw(
        title: str, label: str, value: str, write: str, most: float | None, rules: bool
    ) -> str:
        points = [(p.policy, p.load, getattr(p.figures, value)) for p in result.points]
        lines = [
            Series(
                name,
                sorted((load, figure) for whose, load, figure in points if whose == name),
                index,
            )
            for index, name in enumerate(names)
        ]
        y = Axis(label, 0.0, most, write=_with_thousands if write == "k" else write.format)
        return chart(title, lines, x, y, targets if rules else ())

    charts = [
        draw("Attainment", "requests within their SLO", "attainment", "{:.0%}", 1.0, True),
        draw("Goodput", "good requests per second", "goodput", "{:g}", None, False),
        draw(
            "Token goodput", "tokens of good requests per second", "token_goodput", "k", None, False
        ),
        draw("Cache hits", "prompt tokens found cached", "hit_ratio", "{:.0%}", None, False),
    ]
    return f'<div class="charts">{"".join(charts)}</div>'


def _spreads(result: ComparisonResult, names: Sequence[str]) -> str:
    load = _load_to_show(result)
    slo = result.comparison.options.standard
    shown = [point for point in result.points if point.load == load]
    ttft = [Series(p.policy, _shares(p.ttfts_s, 1.0), names.index(p.policy)) for p in shown]
    tpot = [Series(p.policy, _shares(p.tpots_s, 1e3), names.index(p.policy)) for p in shown]
    share = Axis("share of requests", 0.0, 1.0, write="{:.0%}".format)
    hits = [
        (p.policy, p.figures.of_ideal, names.index(p.policy))
        for p in shown
        if p.figures.of_ideal is not None
    ]
    charts = [
        chart(
            f"Time to first token (budget {slo.ttft_s:g} s)", ttft, Axis("seconds", log=True), share
        ),
        chart(
            f"Time per output token (budget {slo.tpot_s * 1e3:g} ms)",
            tpot,
            Axis("ms", log=True),
            share,
        ),
        bars("Hits, as a share of an endless cache in common", hits, "{:.1%}".format),
        bars("Imbalance: busiest group over the mean", _imbalances(shown, names), "{:.2f}".format),
    ]
    what = f"{load:g} users" if result.comparison.by_users else f"{load:g} times the recorded rate"
    return f'<h2>At {what}</h2><div class="charts">{"".join(charts)}</div>'


def _with_thousands(value: float) -> str:
    return f"{value / 1e3:g}k"


def _imbalances(
    points: Sequence[ComparisonPoint], names: Sequence[str]
) -> list[tuple[str, float, int]]:
    return [(point.policy, point.figures.imbalance, names.index(point.policy)) for point in points]


def _load_to_show(result: ComparisonResult) -> float:
    # Return the highest load at which some policy attains 80 %, or the lowest load if none does.
    good_loads = [point.load for point in result.points if point.figures.attainment >= 0.8]
    return max(good_loads, default=min(point.load for point in result.points))


def _shares(ordered: Sequence[float], factor: float) -> list[tuple[float, float]]:
    # Return at most 200 points (value, share) of the cumulative distribution of sorted samples.
    #
    # The largest sample is included. Values are multiplied by `factor`.
    count = len(ordered)
    steps = min(200, count)
    places = [(step + 1) * count // steps - 1 for step in range(steps)]
    return [(ordered[index] * factor, (index + 1) / count) for index in places]


def _capacities(result: ComparisonResult, names: Sequence[str]) -> str:
    charts, missing = [], []
    for number, target in enumerate(result.comparison.targets):
        results = [
            (index, name, result.capacities[name][number]) for index, name in enumerate(names)
        ]
        values = [
            (name, capacity.load, index)
            for index, name, capacity in results
            if capacity.load is not None
        ]
        charts.append(bars(f"Capacity at {target:.0%} attainment", values, "{:.3g}".format))
        missing += [
            f"{name}, {target:.0%}: {capacity.reason}."
            for _, name, capacity in results
            if isinstance(capacity, UnknownCapacity)
        ]
    notes = "".join(f'<p class="lead">{escape(line)}</p>' for line in missing)
    return f'<h2>Capacity</h2>{notes}<div class="charts">{"".join(charts)}</div>' if charts else ""


def _table(points: Sequence[ComparisonPoint]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADS)
    best = {
        load: max(p.figures.goodput for p in points if p.load == load)
        for load in {p.load for p in points}
    }
    rows = []
    for point in sorted(points, key=lambda point: (point.load, -point.figures.goodput)):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in cells_of(point))
        if point.figures.goodput >= best[point.load]:
            cells = cells.replace("<td>", '<td class="best">', 1)
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def cells_of(point: ComparisonPoint) -> list[str]:
    """Return one result of a comparison of policies as cells of text, in the order of HEADS."""
    f = point.figures
    return [
        point.policy,
        f"{point.load:g}",
        f"{f.attainment:.1%}",
        f"{f.goodput:.2f}",
        f"{f.token_goodput:,.0f}",
        *_p50_and_p99(f.ttft, 1.0, "{:.2f}"),
        *_p50_and_p99(f.tpot, 1e3, "{:.1f}"),
        f"{f.hit_ratio:.1%}",
        "–" if f.of_ideal is None else f"{f.of_ideal:.1%}",
        f"{f.imbalance:.2f}",
        f"{f.ends.get('shed', 0)}",
        f"{f.ends.get('lost', 0) + f.ends.get('left', 0)}",
        f"{f.wasted:.1%}",
        f"{f.jain:.3f}",
        f"{f.pick_us:.0f}",
    ]


def _p50_and_p99(summary: Summary | None, factor: float, write: str) -> tuple[str, str]:
    if summary is None:
        return "–", "–"
    return write.format(summary.p50 * factor), write.format(summary.p99 * factor)
