"""The four boards as data: which panels stand in which rows. What nobody asked for by hand gets a panel from its kind.

Lives here: panels and their queries. Not here: how Grafana writes them down (grafana.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from gateway.meters import Merge, Spec
from gateway.observe.labels import Row
from gateway.observe.promql import Asked, asked, quantile, rate, rate_or_zero, selector, share
from gateway.observe.slos import JUDGED, OBJECTIVES

WIDE_LABELS = frozenset({"hash", "version"})
GATEWAYS = "~penstock.*"
"""How the scrape jobs of gateways are named. `process_*` metrics of other jobs have the same names."""

SUFFIXES = ("_bucket", "_sum", "_count")
UNITS: Mapping[str, str] = MappingProxyType(
    {"seconds": "s", "bytes": "bytes", "ratio": "percentunit", "tokens": "short"}
)


class Query(msgspec.Struct, frozen=True):
    """One query of a panel and what its lines are called, with {{label}} filled in."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True):
    """One panel. `unit` is Grafana's word; `kind` is timeseries, stat or heatmap; `text` says how to read it."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""


class Board(msgspec.Struct, frozen=True):
    """One board: its file's name, its title, its rows with panels by hand."""

    uid: str
    title: str
    rows: Mapping[Row, tuple[Panel, ...]]


def _p(name: str, by: str = "", **matchers: str) -> tuple[Query, ...]:
    shown = " {{" + by + "}}" if by else ""
    return tuple(Query(quantile(q, name, by, **matchers), f"p{q * 100:g}{shown}") for q in (0.5, 0.95, 0.99))


def _one(expr: str, legend: str = "") -> tuple[Query, ...]:
    return (Query(expr, legend),)


_GOOD = rate_or_zero("penstock_goodput_total", kept="met")
_JUDGED = rate("penstock_goodput_total", kept=JUDGED)
_HIT = f"{rate('penstock_prefix_hit_tokens_total')} / {rate('penstock_prefix_lookup_tokens_total')}"
_CACHED = f"{rate('penstock_cached_tokens_total')} / {rate('penstock_prompt_tokens_total')}"
_OWN_MEMORY = selector("process_resident_memory_bytes", {"job": GATEWAYS})
_OWN_FILES = selector("process_open_fds", {"job": GATEWAYS})
_AVOIDABLE = rate("penstock_prefill_tokens_total", cause="~spread|evicted")
_SPLIT_SHARE = (
    f"{rate_or_zero('penstock_split_decisions_total', decision='split')} / {rate('penstock_split_decisions_total')}"
)

OVERVIEW = Board(
    "penstock-overview",
    "Penstock / Overview and SLOs",
    {
        Row.PROMISES: (
            Panel("Goodput", _one(f"{_GOOD} / {_JUDGED}"), "percentunit", "stat", "Share whose promise was kept."),
            Panel(
                "Budget left (3 days)",
                tuple(Query(slo.budget_left(), slo.slo) for slo in OBJECTIVES),
                "percentunit",
                "stat",
                "What is left of the errors that the objectives allow; below zero the objective is missed.",
            ),
            Panel(
                "Errors in the last hour",
                tuple(Query(slo.recorded("1h"), slo.slo) for slo in OBJECTIVES),
                "percentunit",
                text="Pages come at 14.4 times what the objective allows.",
            ),
            Panel(
                "Promises by class", _one(rate("penstock_goodput_total", "class, kept"), "{{class}} {{kept}}"), "reqps"
            ),
        ),
        Row.REQUESTS: (
            Panel("Requests", _one(rate("penstock_requests_total", "code"), "{{code}}"), "reqps"),
            Panel(
                "Why not served",
                _one(rate("penstock_requests_total", "reason", reason="!served"), "{{reason}}"),
                "reqps",
            ),
            Panel("Sheds", _one(rate("penstock_shed_total", "reason, class"), "{{reason}} {{class}}"), "reqps"),
            Panel(
                "Retries",
                (
                    Query(rate("penstock_retries_total", "kind"), "{{kind}}"),
                    Query("min(penstock_retry_budget_remaining)", "budget left"),
                ),
            ),
        ),
        Row.LATENCY: (
            Panel("Time to first token", _p("penstock_ttft_seconds"), "s", text="Dots are exemplars: requests."),
            Panel("Time per output token", _p("penstock_tpot_seconds"), "s", text="Dots are exemplars: requests."),
            Panel(
                "Time to first token by model", _one(quantile(0.95, "penstock_ttft_seconds", "model"), "{{model}}"), "s"
            ),
            Panel("Gateway's own time", _p("penstock_overhead_seconds"), "s"),
        ),
        Row.ADMISSION: (
            Panel("Waiting", _one("sum by (pool) (penstock_waiting)", "{{pool}}")),
            Panel("Queued prompt tokens", _one("sum by (pool) (penstock_queued_tokens)", "{{pool}}")),
        ),
    },
)

ROUTING = Board(
    "penstock-routing",
    "Penstock / Routing and cache",
    {
        Row.ENDPOINTS: (
            Panel("May be picked", _one("min by (endpoint) (penstock_endpoint_up)", "{{endpoint}}")),
            Panel("Requests booked", _one("sum by (endpoint) (penstock_inflight)", "{{endpoint}}")),
            Panel(
                "Seconds without a byte owed",
                _one("max by (endpoint) (penstock_endpoint_progress_age_seconds)", "{{endpoint}}"),
                "s",
            ),
            Panel(
                "Time to first token",
                _one(quantile(0.95, "penstock_ttft_seconds", "endpoint"), "p95 {{endpoint}}"),
                "s",
                text="One line far above the others: a slow endpoint.",
            ),
            Panel("Failures", _one(rate("penstock_upstream_errors_total", "endpoint, kind"), "{{endpoint}} {{kind}}")),
            Panel(
                "KV memory in use",
                _one("max by (endpoint) (penstock_endpoint_kv_usage_ratio)", "{{endpoint}}"),
                "percentunit",
            ),
        ),
        Row.CACHE: (
            Panel(
                "Prompt tokens found in caches",
                (Query(_HIT, "believed"), Query(_CACHED, "as engines say")),
                "percentunit",
            ),
            Panel(
                "Prompt tokens computed, by cause", _one(rate("penstock_prefill_tokens_total", "cause"), "{{cause}}")
            ),
            Panel("Avoidable prefill tokens", _one(_AVOIDABLE, "spread or evicted"), text="Zero is a perfect router."),
            Panel("Index", _one("sum(penstock_prefix_index_bytes)"), "bytes"),
        ),
    },
)

SPLIT = Board(
    "penstock-split",
    "Penstock / Split and KV transfer",
    {
        Row.SPLIT: (
            Panel("Share of requests split", _one(_SPLIT_SHARE), "percentunit", "stat"),
            Panel(
                "Decisions",
                _one(rate("penstock_split_decisions_total", "decision, reason"), "{{decision}}: {{reason}}"),
                "reqps",
            ),
            Panel(
                "Handoffs P > D",
                _one(
                    rate("penstock_split_pairs_total", "prefill, decode", result="served"), "{{prefill}} > {{decode}}"
                ),
                "reqps",
                text="The flow of KV between groups, in handoffs per second.",
            ),
            Panel(
                "Handoffs that failed P > D",
                _one(
                    share("penstock_split_pairs_total", "prefill, decode", result="failed"), "{{prefill}} > {{decode}}"
                ),
                "percentunit",
            ),
            Panel(
                "Parts of the time to first token",
                _one(quantile(0.95, "penstock_split_stage_seconds", "stage"), "p95 {{stage}}"),
                "s",
            ),
            Panel("Handoff to first token", _p("penstock_split_handoff_seconds"), "s"),
            Panel("Ends of legs", _one(rate("penstock_split_legs_total", "role, outcome"), "{{role}} {{outcome}}")),
            Panel(
                "KV given up",
                _one(f"{rate('penstock_split_leases_given_up_total', 'reason')} or vector(0)", "{{reason}}"),
            ),
        ),
    },
)

INTERNALS = Board(
    "penstock-internals",
    "Penstock / Gateway internals",
    {
        Row.PROCESS: (
            Panel("Event loop's lag", _p("penstock_loop_lag_seconds"), "s", text="Above 100 ms every stream stutters."),
            Panel("Memory", _one(f"sum by (instance) ({_OWN_MEMORY})", "{{instance}}"), "bytes"),
            Panel(
                "CPU", _one(rate("process_cpu_seconds_total", "instance", job=GATEWAYS), "{{instance}}"), "percentunit"
            ),
            Panel("File descriptors", _one(f"sum by (instance) ({_OWN_FILES})", "{{instance}}")),
        ),
        Row.CONFIGURATION: (
            Panel(
                "Version in force",
                _one("max by (hash) (penstock_config_version_info)", "{{hash}}"),
                text="Two lines: gateways of one fleet run different configurations.",
            ),
            Panel("Offered configurations", _one(rate("penstock_config_reload_total", "result"), "{{result}}")),
        ),
        Row.SHARED: (
            Panel("Hears the others", _one("min by (instance) (penstock_shared_up)", "{{instance}}")),
            Panel("Staleness", _one("max by (instance) (penstock_shared_staleness_seconds)", "{{instance}}"), "s"),
        ),
    },
)

BOARDS = (OVERVIEW, ROUTING, SPLIT, INTERNALS)


def completed(board: Board, catalogue: Sequence[Spec]) -> Mapping[Row, tuple[Panel, ...]]:
    """The board's rows, with a panel for every family of them that no panel of any board asks for."""
    shown = {family_of(each.name) for other in BOARDS for panels in other.rows.values() for each in _asked(panels)}
    return {
        row: (*panels, *(made(spec) for spec in catalogue if spec.row == row and spec.name not in shown))
        for row, panels in board.rows.items()
    }


def made(spec: Spec) -> Panel:
    """A panel as a family's kind and labels ask for it."""
    labels = [name for name in (label.name for label in spec.labels) if name not in WIDE_LABELS or spec.kind == "gauge"]
    by, legend = ", ".join(labels), " ".join(f"{{{{{label}}}}}" for label in labels)
    title = spec.name.removeprefix("penstock_").removesuffix("_total").replace("_", " ")
    unit = UNITS.get(spec.unit, "short")
    if spec.kind == "histogram":
        return Panel(title, _p(spec.name), unit, text=spec.help)
    if spec.kind == "counter":
        return Panel(
            title, _one(rate(spec.name, by), legend), "Bps" if spec.unit == "bytes" else "short", text=spec.help
        )
    merged = "max" if spec.merge is Merge.LAST else spec.merge.value
    grouping = f" by ({by})" if by else ""
    return Panel(title, _one(f"{merged}{grouping} ({spec.name})", legend), unit, text=spec.help)


def family_of(name: str) -> str:
    """The family that a series belongs to."""
    return next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)


def _asked(panels: Sequence[Panel]) -> list[Asked]:
    return [each for panel in panels for query in panel.queries for each in asked(query.expr)]
