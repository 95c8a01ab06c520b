"""Copies the counters of received KV events to the gateway's metrics."""

from __future__ import annotations

from gateway.fleet.kv_events.event_verification import EndpointEvents
from gateway.metrics.catalogue import Metrics


def copy_counts(metrics: Metrics, name: str, endpoint: EndpointEvents) -> None:
    sources, messages = endpoint.sources, metrics.kv_event_messages_total
    totals = {
        "applied": sum(source.batches for source in sources),
        "gap": sum(source.gaps for source in sources),
        "duplicate": sum(source.duplicates for source in sources),
        "restart": sum(source.restarts for source in sources),
    }
    for kind, total in totals.items():
        messages.labels(name, kind).value = float(total)
    audits = metrics.kv_event_audits_total
    audits.labels(name, "right").value = float(endpoint.audits - endpoint.errors)
    audits.labels(name, "wrong").value = float(endpoint.errors)
