"""Gauges that are asked when scraped: what the gateway holds and knows.

Between scrapes they are free.

Lives here: these families and where their numbers are found. Not here: what is counted as it
happens (metrics.py).
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from gateway.build import is_compiled, own_version
from gateway.meters import Counter, Family, Gauge, Label, Merge, Meters, Pools, Section
from gateway.observe.labels import ENDPOINT, RESULT, Row
from policies.health import State

if TYPE_CHECKING:
    from gateway.roster import LiveEndpoint
    from gateway.serve import Gateway

STATE = Label("state", len(State) + 1)
LIMIT = Label("limit", 4)
LISTENER = Label("listener", 2)
BUILD = (Label("version", 2), Label("compiled", 2))


def pools(gateway: Gateway) -> Pools:
    """The pool of every endpoint and model, for the labels of a scrape."""
    found = {("model", route.name): route.pool for route in gateway.snapshot.routes.values()}
    for live in gateway.endpoints.all():
        found["endpoint", live.endpoint.name] = found["prefill", live.endpoint.name] = live.endpoint.pool
    return found


class Inside:
    """Families whose children follow live objects.

    Made by the catalogue; the objects' owners say what to follow.
    """

    def __init__(self, meters: Meters) -> None:
        self._endpoint(meters.section(Row.ENDPOINTS, "observe/inside.py"))
        self._process(meters.section(Row.PROCESS, "observe/inside.py"))
        self.split_live: Gauge = (
            meters.section(Row.SPLIT, "split/handoffs.py")
            .gauge("penstock_split_live", "Split requests under way: their KV is held at one end or both.")
            .labels()
        )
        self.trace_spans_total: Family[Counter] = meters.section(Row.PROCESS, "observe/export.py").counter(
            "penstock_trace_spans_total",
            "Spans of traced requests: exported, dropped (too many wait), failed (the collector did not take them).",
            RESULT,
        )

    def follow(self, live: LiveEndpoint) -> None:
        """From now on this endpoint's numbers under its name."""
        name, load, others = live.endpoint.name, live.load, live.load.others
        for state in State:
            self.endpoint_state.labels(name, state).follow(lambda state=state: float(live.health.state is state))  # type: ignore[misc]
        self.endpoint_progress_age.labels(name).follow(lambda: live.upstream.silence_s(monotonic()))
        self.endpoint_running.labels(name).follow(lambda: load.running)
        self.endpoint_waiting.labels(name).follow(lambda: load.waiting)
        self.endpoint_kv_usage.labels(name).follow(lambda: load.kv_usage)
        self.endpoint_prefill_tokens.labels(name).follow(lambda: float(load.prefill_tokens - others.prefill_tokens))
        self.endpoint_decode_tokens.labels(name).follow(lambda: float(load.decode_tokens - others.decode_tokens))
        self.endpoint_scrape_age.labels(name).follow(
            lambda: None if load.scraped_at is None else monotonic() - load.scraped_at
        )

    def _endpoint(self, meters: Section) -> None:
        self.endpoint_state: Family[Gauge] = meters.gauge(
            "penstock_endpoint_state",
            "1 for the state that an endpoint's health is in (up, ejected, dead, returning), 0 for the others.",
            *(ENDPOINT, STATE),
            merge=Merge.MAX,
        )
        self.endpoint_progress_age: Family[Gauge] = meters.gauge(
            "penstock_endpoint_progress_age_seconds",
            "For how long an endpoint has owed everybody a byte; 0 while nobody waits for it.",
            ENDPOINT,
            merge=Merge.MIN,
        )
        self.endpoint_running: Family[Gauge] = meters.gauge(
            "penstock_endpoint_running", "Requests in the engine's batch, as it says.", ENDPOINT, merge=Merge.LAST
        )
        self.endpoint_waiting: Family[Gauge] = meters.gauge(
            "penstock_endpoint_waiting", "Requests in the engine's own queue, as it says.", ENDPOINT, merge=Merge.LAST
        )
        self.endpoint_kv_usage: Family[Gauge] = meters.gauge(
            "penstock_endpoint_kv_usage_ratio",
            "Share of the engine's KV memory in use, as it says.",
            ENDPOINT,
            merge=Merge.LAST,
        )
        self.endpoint_prefill_tokens: Family[Gauge] = meters.gauge(
            "penstock_endpoint_prefill_backlog_tokens",
            "Prompt tokens sent to an endpoint whose first token has not come.",
            ENDPOINT,
        )
        self.endpoint_decode_tokens: Family[Gauge] = meters.gauge(
            "penstock_endpoint_context_tokens", "Tokens of context of the answers being generated there.", ENDPOINT
        )
        self.endpoint_scrape_age: Family[Gauge] = meters.gauge(
            "penstock_endpoint_scrape_age_seconds",
            "Age of what an endpoint last said of its own load.",
            ENDPOINT,
            merge=Merge.MIN,
        )

    def _process(self, meters: Section) -> None:
        self.connections: Gauge = meters.gauge("penstock_connections", "Client connections that are open.").labels()
        self.connections_refused_total: Family[Counter] = meters.counter(
            "penstock_connections_refused_total",
            "Client connections closed, or unread bytes of theirs dropped, by the limit that was reached.",
            LIMIT,
        )
        self.tls_handshake_failures_total: Family[Counter] = meters.counter(
            "penstock_tls_handshake_failures_total",
            "TLS handshakes of clients that failed or took too long, by listener: api, admin.",
            LISTENER,
        )
        self.tls_not_after: Family[Gauge] = meters.gauge(
            "penstock_tls_certificate_not_after_timestamp_seconds",
            "When the first of a listener's certificates in use expires, seconds since the epoch.",
            LISTENER,
            merge=Merge.MIN,
        )
        self.body_bytes: Gauge = meters.gauge(
            "penstock_body_bytes", "Memory held for request bodies that may be needed again."
        ).labels()
        self.tasks: Gauge = meters.gauge(
            "penstock_tasks", "Tasks of the event loop: they grow with endpoints; an ordinary request needs none."
        ).labels()
        self.log_lines_dropped_total: Counter = meters.counter(
            "penstock_log_lines_dropped_total", "Access lines that no sink took: a full disk, a blocked pipe."
        ).labels()
        told = "1, by the version of the program and whether its hot path was compiled."
        build = meters.gauge("penstock_build_info", told, *BUILD, merge=Merge.LAST)
        build.labels(own_version(), str(is_compiled()).lower()).set(1)
