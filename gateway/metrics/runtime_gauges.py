"""Gauges that are computed from live objects at each scrape, and cost nothing between scrapes.

Metrics that are updated by events are in gateway/metrics/catalogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from gateway.metrics.labels import ENDPOINT, RESULT, Row
from gateway.metrics.metric_types import (
    Counter,
    FamilyFactory,
    Gauge,
    Label,
    Merge,
    MetricFamily,
    MetricRegistry,
    PoolByLabel,
)
from gateway.util.version import is_compiled, program_version
from policies.health.endpoint_health import HealthState

if TYPE_CHECKING:
    from policies.endpoint_load import EndpointLoad
    from policies.health.endpoint_health import Health
    from policies.routing_types import Endpoint

ENDPOINT_STATE = "penstock_endpoint_state"
STATE = Label("state", len(HealthState) + 1)
LIMIT = Label("limit", 4)
LISTENER = Label("listener", 2)
BUILD = (Label("version", 2), Label("compiled", 2))


class ObservedUpstream(Protocol):
    """The interface of the connections to an engine, for the gauges of its endpoint."""

    def silence_duration_s(self, now: float, /) -> float:
        """Return the seconds that requests have waited without engine output; 0 if none waits."""


class ObservedEndpoint(Protocol):
    """The interface of a live endpoint from which the endpoint's gauges are computed."""

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def load(self) -> EndpointLoad: ...
    @property
    def health(self) -> Health: ...
    @property
    def upstream(self) -> ObservedUpstream: ...


class PooledModel(Protocol):
    """The interface of a configured model that names the pool serving it."""

    @property
    def name(self) -> str: ...
    @property
    def pool(self) -> str: ...


def pool_by_label(
    models: Iterable[PooledModel], endpoints: Iterable[ObservedEndpoint]
) -> PoolByLabel:
    """Map every endpoint and model to its pool, for the metrics' label `pool`."""
    by_label = {("model", model.name): model.pool for model in models}
    for live in endpoints:
        name, pool = live.endpoint.name, live.endpoint.pool
        by_label["endpoint", name] = by_label["prefill", name] = pool
    return by_label


def _state_function(live: ObservedEndpoint, state: HealthState) -> Callable[[], float]:
    return lambda: float(live.health.state is state)


class RuntimeGauges:
    """Gauges, and a few counters, whose values are read from live objects when metrics are scraped.

    The objects' owners attach them, for example with attach_endpoint().
    """

    def __init__(self, registry: MetricRegistry) -> None:
        endpoints = registry.section(Row.ENDPOINTS, "metrics/runtime_gauges.py")
        self._endpoint_health(endpoints)
        self._endpoint_load(endpoints)
        self._process(registry.section(Row.PROCESS, "metrics/runtime_gauges.py"))
        self.split_live: Gauge = (
            registry.section(Row.SPLIT, "disagg/handoffs.py")
            .gauge(
                "penstock_split_live",
                "Split requests in progress that hold KV memory at one endpoint or at both.",
            )
            .labels()
        )
        self.trace_spans_total: MetricFamily[Counter] = registry.section(
            Row.PROCESS, "telemetry/span_exporter.py"
        ).counter(
            "penstock_trace_spans_total",
            "Spans of traced requests by result: exported, dropped (the queue was full), failed "
            "(not accepted by the collector).",
            RESULT,
        )

    def attach_endpoint(self, live: ObservedEndpoint, clock: Callable[[], float]) -> None:
        """Compute an endpoint's gauges from its live state; `clock` returns monotonic time."""
        name, load, others = live.endpoint.name, live.load, live.load.peer_load
        for state in HealthState:
            self.endpoint_state.labels(name, state).set_function(_state_function(live, state))
        self.endpoint_progress_age.labels(name).set_function(
            lambda: live.upstream.silence_duration_s(clock())
        )
        self.endpoint_running.labels(name).set_function(lambda: load.running)
        self.endpoint_waiting.labels(name).set_function(lambda: load.waiting)
        self.endpoint_kv_usage.labels(name).set_function(lambda: load.kv_usage)
        self.endpoint_prefill_tokens.labels(name).set_function(
            lambda: float(load.prefill_tokens - others.prefill_tokens)
        )
        self.endpoint_decode_tokens.labels(name).set_function(
            lambda: float(load.decode_tokens - others.decode_tokens)
        )
        self.endpoint_scrape_age.labels(name).set_function(
            lambda: None if load.scraped_at is None else clock() - load.scraped_at
        )

    def _endpoint_health(self, factory: FamilyFactory) -> None:
        self.endpoint_state: MetricFamily[Gauge] = factory.gauge(
            ENDPOINT_STATE,
            "1 for the current health state of an endpoint (up, ejected, dead, returning), 0 for "
            "the others.",
            *(ENDPOINT, STATE),
            merge=Merge.MAX,
        )
        self.endpoint_progress_age: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_progress_age_seconds",
            "Seconds since an endpoint with requests in progress last sent a byte; 0 while no "
            "request waits for one.",
            ENDPOINT,
            merge=Merge.MIN,
        )

    def _endpoint_load(self, factory: FamilyFactory) -> None:
        self.endpoint_running: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_running",
            "Requests in the engine's running batch, as the engine reports it.",
            ENDPOINT,
            merge=Merge.LAST,
        )
        self.endpoint_waiting: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_waiting",
            "Requests in the engine's own queue, as the engine reports it.",
            ENDPOINT,
            merge=Merge.LAST,
        )
        self.endpoint_kv_usage: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_kv_usage_ratio",
            "Share of the engine's KV memory in use (0 to 1), as the engine reports it.",
            ENDPOINT,
            merge=Merge.LAST,
        )
        self.endpoint_prefill_tokens: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_prefill_backlog_tokens",
            "Prompt tokens of requests at an endpoint that wait for their first token.",
            ENDPOINT,
        )
        self.endpoint_decode_tokens: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_context_tokens",
            "Prompt tokens of requests at an endpoint that are being decoded.",
            ENDPOINT,
        )
        self.endpoint_scrape_age: MetricFamily[Gauge] = factory.gauge(
            "penstock_endpoint_scrape_age_seconds",
            "Seconds since an endpoint last reported its load.",
            ENDPOINT,
            merge=Merge.MIN,
        )

    def _process(self, factory: FamilyFactory) -> None:
        self.connections: Gauge = factory.gauge(
            "penstock_connections", "Open client connections."
        ).labels()
        self.connections_refused_total: MetricFamily[Counter] = factory.counter(
            "penstock_connections_refused_total",
            "Client connections that were closed, or whose unread bytes were dropped, by the "
            "limit that was reached.",
            LIMIT,
        )
        self.tls_handshake_failures_total: MetricFamily[Counter] = factory.counter(
            "penstock_tls_handshake_failures_total",
            "Client TLS handshakes that failed or timed out, by listener: api, admin.",
            LISTENER,
        )
        self.tls_not_after: MetricFamily[Gauge] = factory.gauge(
            "penstock_tls_certificate_not_after_timestamp_seconds",
            "Unix time in seconds at which the first of a listener's certificates in use expires.",
            LISTENER,
            merge=Merge.MIN,
        )
        self.body_bytes: Gauge = factory.gauge(
            "penstock_body_bytes",
            "Bytes of memory for request bodies that are kept because a retry may need them.",
        ).labels()
        self.tasks: Gauge = factory.gauge(
            "penstock_tasks",
            "Number of tasks in the event loop. Each endpoint has a few; most requests need none.",
        ).labels()
        self.log_lines_dropped_total: Counter = factory.counter(
            "penstock_log_lines_dropped_total",
            "Access log lines that could not be written, for example to a full disk or a blocked "
            "pipe.",
        ).labels()
        text = "Always 1; the labels are the version and whether the hot path is compiled."
        build = factory.gauge("penstock_build_info", text, *BUILD, merge=Merge.LAST)
        build.labels(program_version(), str(is_compiled()).lower()).set(1)
