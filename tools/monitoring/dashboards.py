"""The four Grafana dashboards as data: their rows, panels and queries.

Metrics that no handwritten panel shows get a generated panel. grafana.py converts the dashboards to
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from gateway.metrics.labels import Row
from gateway.metrics.metric_types import FamilySpec, Merge
from tools.monitoring.promql import (
    RANGE,
    Selector,
    find_selectors,
    quantile,
    rate,
    rate_or_zero,
    share,
)
from tools.monitoring.slos import JUDGED_OUTCOMES, OBJECTIVES
from tools.monitoring.titles import TITLES

WIDE_LABELS = frozenset({"hash", "version"})
SUFFIXES = ("_bucket", "_sum", "_count")
UNITS: Mapping[str, str] = MappingProxyType(
    {"seconds": "s", "bytes": "bytes", "ratio": "percentunit", "tokens": "short"}
)


class Query(msgspec.Struct, frozen=True):
    """One PromQL query of a dashboard panel. The legend may contain labels, such as {{pool}}."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True):
    """A panel of a Grafana dashboard.

    unit  unit of the values, by its name in Grafana, such as "s" or "bytes"
    kind  type of the panel: timeseries, stat or heatmap
    text  description of the panel
    """

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""


class Board(msgspec.Struct, frozen=True):
    """A Grafana dashboard: its identifier (also its file name), its title and its handwritten
    panels.
    """

    uid: str
    title: str
    rows: Mapping[Row, tuple[Panel, ...]]


def _percentiles(name: str, by: str = "", **matchers: str) -> tuple[Query, ...]:
    suffix = " {{" + by + "}}" if by else ""
    return tuple(
        Query(quantile(q, name, by, **matchers), f"p{q * 100:g}{suffix}") for q in (0.5, 0.95, 0.99)
    )


def _single(expr: str, legend: str = "") -> tuple[Query, ...]:
    return (Query(expr, legend),)


_GOOD = rate_or_zero("penstock_goodput_total", slo_outcome="met")
_JUDGED = rate("penstock_goodput_total", slo_outcome=JUDGED_OUTCOMES)
_HIT = f"{rate('penstock_prefix_hit_tokens_total')} / {rate('penstock_prefix_lookup_tokens_total')}"
_CACHED = f"{rate('penstock_cached_tokens_total')} / {rate('penstock_prompt_tokens_total')}"
_AVOIDABLE = rate("penstock_prefill_tokens_total", cause="~spread|evicted")
_SPLIT = rate_or_zero("penstock_split_decisions_total", decision="split")
_SPLIT_SHARE = f"{_SPLIT} / {rate('penstock_split_decisions_total')}"
BUSIEST = 10
"""Number of endpoints that have a line of their own in a chart: those with most requests in flight.

In a large fleet, lines of all endpoints would be unreadable.
"""

# The query selects the busiest endpoints of the whole displayed time. A plain topk would select
# different ones at every point.
_IN_FLIGHT = "sum by (endpoint) (penstock_inflight)"
_BUSIEST = f"topk({BUSIEST}, sum by (endpoint) (avg_over_time(penstock_inflight[{RANGE}] @ end())))"

OVERVIEW = Board(
    "penstock-overview",
    "Penstock / Overview and SLOs",
    {
        Row.PROMISES: (
            Panel(
                "Goodput: requests within their targets",
                _single(f"{_GOOD} / {_JUDGED}"),
                "percentunit",
                "stat",
                "Share of requests that met the latency targets of their class.",
            ),
            Panel(
                "Error budget left (3 days)",
                tuple(Query(slo.budget_left(), f"{slo.slo} {{{{model}}}}") for slo in OBJECTIVES),
                "percentunit",
                "stat",
                "Share of the allowed errors that is left; negative once the objective is missed.",
            ),
            Panel(
                "Requests outside the objectives (last hour)",
                tuple(
                    Query(slo.recorded_series("1h"), f"{slo.slo} {{{{model}}}}")
                    for slo in OBJECTIVES
                ),
                "percentunit",
                text="An alert pages at 14.4 times the errors that the objective allows.",
            ),
            Panel(
                "Requests by service class and result",
                _single(
                    rate("penstock_goodput_total", "class, slo_outcome"),
                    "{{class}} {{slo_outcome}}",
                ),
                "reqps",
            ),
        ),
        Row.REQUESTS: (
            Panel(
                "Requests by status code",
                _single(rate("penstock_requests_total", "code"), "{{code}}"),
                "reqps",
            ),
            Panel(
                "Unserved requests by reason",
                _single(rate("penstock_requests_total", "reason", reason="!served"), "{{reason}}"),
                "reqps",
            ),
            Panel(
                "Refused requests by reason and class",
                _single(rate("penstock_shed_total", "reason, class"), "{{reason}} {{class}}"),
                "reqps",
            ),
            Panel(
                "Retries by cause, and budget left",
                (
                    Query(rate("penstock_retries_total", "kind"), "{{kind}}"),
                    Query("min(penstock_retry_budget_remaining)", "budget left"),
                ),
            ),
        ),
        Row.LATENCY: (
            Panel(
                "Time to first token",
                _percentiles("penstock_ttft_seconds"),
                "s",
                text="Each dot is one request (an exemplar).",
            ),
            Panel(
                "Time per output token",
                _percentiles("penstock_tpot_seconds"),
                "s",
                text="Each dot is one request (an exemplar).",
            ),
            Panel(
                "Time to first token by model",
                _single(quantile(0.95, "penstock_ttft_seconds", "model"), "{{model}}"),
                "s",
            ),
            Panel("Latency added by the gateway", _percentiles("penstock_overhead_seconds"), "s"),
        ),
        Row.ADMISSION: (
            Panel(
                "Requests waiting by pool", _single("sum by (pool) (penstock_waiting)", "{{pool}}")
            ),
            Panel(
                "Prompt tokens waiting by pool",
                _single("sum by (pool) (penstock_queued_tokens)", "{{pool}}"),
            ),
        ),
    },
)

ROUTING = Board(
    "penstock-routing",
    "Penstock / Routing and cache",
    {
        Row.ENDPOINTS: (
            Panel(
                "Endpoints in rotation",
                _single("min by (endpoint) (penstock_endpoint_up)", "{{endpoint}}"),
            ),
            Panel(
                f"Requests in flight by endpoint: the {BUSIEST} busiest, and the mean",
                (
                    Query(f"{_IN_FLIGHT} and on (endpoint) {_BUSIEST}", "{{endpoint}}"),
                    Query(f"avg({_IN_FLIGHT})", "mean of all"),
                ),
                text=f"The {BUSIEST} endpoints with most requests over the time that is shown.",
            ),
            Panel(
                "Time since an awaited byte, by endpoint",
                _single(
                    "max by (endpoint) (penstock_endpoint_progress_age_seconds)", "{{endpoint}}"
                ),
                "s",
            ),
            Panel(
                "Time to first token",
                _single(quantile(0.95, "penstock_ttft_seconds", "endpoint"), "p95 {{endpoint}}"),
                "s",
                text="A line far above the others is a slow endpoint.",
            ),
            Panel(
                "Endpoint failures by kind",
                _single(
                    rate("penstock_upstream_errors_total", "endpoint, kind"),
                    "{{endpoint}} {{kind}}",
                ),
            ),
            Panel(
                "KV cache in use by endpoint",
                _single("max by (endpoint) (penstock_endpoint_kv_usage_ratio)", "{{endpoint}}"),
                "percentunit",
            ),
        ),
        Row.CACHE: (
            Panel(
                "Prefix cache hit ratio",
                (Query(_HIT, "expected by the gateway"), Query(_CACHED, "reported by engines")),
                "percentunit",
            ),
            Panel(
                "Prompt tokens computed by cause",
                _single(rate("penstock_prefill_tokens_total", "cause"), "{{cause}}"),
            ),
            Panel(
                "Avoidable prefill tokens per second",
                _single(_AVOIDABLE, "spread or evicted"),
                text="Prompt tokens that another endpoint had cached, or that an engine had "
                "evicted. Ideal is 0.",
            ),
            Panel(
                "Memory of the prefix index", _single("sum(penstock_prefix_index_bytes)"), "bytes"
            ),
        ),
    },
)

SPLIT = Board(
    "penstock-split",
    "Penstock / Split and KV transfer",
    {
        Row.SPLIT: (
            Panel(
                "Share of requests split into prefill and decode",
                _single(_SPLIT_SHARE),
                "percentunit",
                "stat",
            ),
            Panel(
                "Split decisions by reason",
                _single(
                    rate("penstock_split_decisions_total", "decision, reason"),
                    "{{decision}}: {{reason}}",
                ),
                "reqps",
            ),
            Panel(
                "KV handoffs from prefill to decode",
                _single(
                    rate("penstock_split_pairs_total", "prefill, decode", result="served"),
                    "{{prefill}} > {{decode}}",
                ),
                "reqps",
                text="KV caches transferred between engines, per second.",
            ),
            Panel(
                "Failed KV handoffs from prefill to decode",
                _single(
                    share("penstock_split_pairs_total", "prefill, decode", result="failed"),
                    "{{prefill}} > {{decode}}",
                ),
                "percentunit",
            ),
            Panel(
                "Stages of the time to first token",
                _single(quantile(0.95, "penstock_split_stage_seconds", "stage"), "p95 {{stage}}"),
                "s",
            ),
            Panel(
                "From the end of prefill to the first token",
                _percentiles("penstock_split_handoff_seconds"),
                "s",
            ),
            Panel(
                "Prefill and decode requests by result",
                _single(rate("penstock_split_legs_total", "role, outcome"), "{{role}} {{outcome}}"),
            ),
            Panel(
                "KV caches freed unread, by reason",
                _single(
                    f"{rate('penstock_split_leases_given_up_total', 'reason')} or vector(0)",
                    "{{reason}}",
                ),
            ),
        ),
    },
)

INTERNALS = Board(
    "penstock-internals",
    "Penstock / Gateway internals",
    {
        Row.PROCESS: (
            Panel(
                "Event loop delay",
                _percentiles("penstock_loop_lag_seconds"),
                "s",
                text="Above 100 ms, all streams are delayed.",
            ),
            Panel(
                "Resident memory",
                _single("sum by (instance) (process_resident_memory_bytes)", "{{instance}}"),
                "bytes",
            ),
            Panel(
                "CPU",
                _single(rate("process_cpu_seconds_total", "instance"), "{{instance}}"),
                "percentunit",
            ),
            Panel(
                "Open file descriptors",
                _single("sum by (instance) (process_open_fds)", "{{instance}}"),
            ),
        ),
        Row.BATCHES: (
            Panel(
                "Requests of batches without a result",
                _single("sum by (instance) (penstock_batch_backlog)", "{{instance}}"),
            ),
        ),
        Row.CONFIGURATION: (
            Panel(
                "Configuration in use",
                _single("max by (hash) (penstock_config_version_info)", "{{hash}}"),
                text="Two lines mean that gateways of the fleet run different configurations.",
            ),
            Panel(
                "Configuration reloads by result",
                _single(rate("penstock_config_reload_total", "result"), "{{result}}"),
            ),
        ),
        Row.SHARED: (
            Panel(
                "Connected to other gateways",
                _single("min by (instance) (penstock_shared_up)", "{{instance}}"),
            ),
            Panel(
                "Age of other gateways' data",
                _single("max by (instance) (penstock_shared_staleness_seconds)", "{{instance}}"),
                "s",
            ),
        ),
    },
)

BOARDS = (OVERVIEW, ROUTING, SPLIT, INTERNALS)


def complete_rows(board: Board, catalogue: Sequence[FamilySpec]) -> Mapping[Row, tuple[Panel, ...]]:
    shown = {
        family_name(selector.name)
        for other in BOARDS
        for panels in other.rows.values()
        for selector in _selectors(panels)
    }
    return {
        row: (
            *panels,
            *(
                generate_panel(spec)
                for spec in catalogue
                if spec.row == row and spec.name not in shown
            ),
        )
        for row, panels in board.rows.items()
    }


def generate_panel(spec: FamilySpec) -> Panel:
    names = [label.name for label in spec.labels]
    labels = [name for name in names if name not in WIDE_LABELS or spec.kind == "gauge"]
    by, legend = ", ".join(labels), " ".join(f"{{{{{label}}}}}" for label in labels)
    title = TITLES[spec.name]
    unit = UNITS.get(spec.unit, "short")
    if spec.kind == "histogram":
        return Panel(title, _percentiles(spec.name), unit, text=spec.help)
    if spec.kind == "counter":
        unit = "Bps" if spec.unit == "bytes" else "short"
        return Panel(title, _single(rate(spec.name, by), legend), unit, text=spec.help)
    merged = "max" if spec.merge is Merge.LAST else spec.merge.value
    grouping = f" by ({by})" if by else ""
    return Panel(title, _single(f"{merged}{grouping} ({spec.name})", legend), unit, text=spec.help)


def family_name(name: str) -> str:
    """Return the metric of a series: the name without a suffix such as _bucket, _sum or _count."""
    return next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)


def _selectors(panels: Sequence[Panel]) -> list[Selector]:
    return [
        selector
        for panel in panels
        for query in panel.queries
        for selector in find_selectors(query.expr)
    ]
