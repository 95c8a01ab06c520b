"""Measures what tracing costs per request: switched off, for some requests, and for every request.

python bench/bench_traces.py
"""

from __future__ import annotations

import sys
import timeit
from pathlib import Path
from random import Random

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.config import Traces
from gateway.metrics.catalogue import Metrics
from gateway.protocol.api_table import CHAT
from gateway.protocol.response.relay import Relay
from gateway.protocol.trace_context import LegSpan, Trace, propagated_headers
from gateway.request_record import Exchange
from gateway.telemetry.span_exporter import SpanExporter
from gateway.telemetry.spans import build_spans

ROUNDS = 20_000
PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def main() -> None:
    tracer = SpanExporter(Metrics(), Random(1), {})
    off = tracer.active
    tracer.configure(
        Traces.model_validate({"endpoint": "http://127.0.0.1:4318/v1/traces", "ratio": 0.01})
    )
    relay = Relay(b"")
    relay.first_byte_at, relay.first_token_at, relay.last_data_at, relay.is_committed = (
        1.9,
        2.0,
        3.0,
        True,
    )
    exchange = Exchange("req_1", CHAT, "client", 0.5)
    exchange.model, exchange.status, exchange.relay = "m", 200, relay
    exchange.received_at, exchange.parsed_at, exchange.admitted_at = 1.0, 1.1, 1.2
    exchange.picked_at, exchange.sent_at = 1.3, 1.4
    trace = Trace(
        "4bf92f3577b34da6a3ce929d0e0e4736",
        "00f067aa0ba902b7",
        "",
        "",
        [LegSpan("whole", "a", "e" * 16, 1)],
    )
    spans, encode = build_spans(exchange, trace, 3.5, 1e9), msgspec.json.Encoder().encode
    for name, call in {
        "off: compare with None": lambda: off is not None,
        "off, client sent a context": lambda: propagated_headers(PARENT),
        "on, 1 in 100 sampled": lambda: tracer.start_trace({}),
        "a tree of six spans": lambda: build_spans(exchange, trace, 3.5, 1e9),
        "its JSON": lambda: encode(spans),
    }.items():
        runs = sorted(timeit.repeat(call, number=ROUNDS, repeat=7))
        print(f"{name:28} {runs[0] / ROUNDS * 1e6:.2f} us")


if __name__ == "__main__":
    main()
