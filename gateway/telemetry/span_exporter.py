"""Exports spans to a trace collector in batches, as OTLP over HTTP with JSON.

When the queue is full or the collector rejects a batch, spans are dropped and counted. After a
failure, the exporter waits before the next batch (exponential back-off). gateway/telemetry/spans.py
builds the spans of a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from random import Random
from secrets import token_hex
from time import monotonic, time

import aiohttp
import msgspec

from gateway.config import Traces
from gateway.metrics.catalogue import Metrics
from gateway.protocol.trace_context import Trace, new_span_id, parse_parent
from gateway.request_record import Exchange
from gateway.telemetry.otel_resource import resource_attributes
from gateway.telemetry.spans import Span, build_spans

log = logging.getLogger("penstock")

MOST_WAITING = 8192  # maximum number of queued spans, about 6 MiB
BATCH = 2048
FLUSH_S = 1.0
TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class SpanExporter:
    """Decides which requests are traced, and exports their spans. There is one object per process.

    active  this exporter if a collector is configured, else None
    """

    def __init__(self, metrics: Metrics, rng: Random, env: Mapping[str, str]) -> None:
        """Create an exporter of spans, with tracing off.

        `env` may set attributes of the OpenTelemetry resource (gateway/telemetry/otel_resource.py).
        """
        results = ("exported", "dropped", "failed")
        self._exported, self._dropped, self._failed = map(
            metrics.runtime_gauges.trace_spans_total.labels, results
        )
        self._rng = rng
        self._encode = msgspec.json.Encoder().encode
        self._resource = {"attributes": resource_attributes(env)}
        self._queue: list[Span] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._pause_s = 0.0
        self._config: Traces | None = None

    @property
    def active(self) -> SpanExporter | None:
        """Return this exporter, or None while tracing is off. A caller need only test for None."""
        return None if self._config is None else self

    def configure(self, config: Traces | None) -> None:
        """Set the trace collector and the sampling ratio; None turns tracing off."""
        if config != self._config:
            self._config, self._pause_s = config, 0.0

    def start_trace(self, headers: Mapping[str, str]) -> Trace | None:
        """Return the trace of a new request, or None if it is not traced.

        The client's traceparent header decides; without one, the decision is random.
        """
        config, parent = self._config, parse_parent(headers)
        if config is None:
            return None
        if parent is not None:
            return (
                Trace(parent.trace_id, new_span_id(), parent.span_id, parent.state)
                if parent.is_sampled
                else None
            )
        if self._rng.random() >= config.ratio:
            return None
        return Trace(token_hex(16), new_span_id(), "", "")

    def add_request(self, exchange: Exchange, trace: Trace, now: float) -> None:
        """Queue the spans of a request that ended at `now`; drop them if the queue is full."""
        if len(self._queue) >= MOST_WAITING:
            self._dropped.inc(4 + len(trace.legs))
            return
        self._queue += build_spans(exchange, trace, now, time() - monotonic())
        if self._timer is None and self._sending is None:
            self._schedule()

    async def close(self) -> None:
        """Send the remaining spans to the collector, with a short timeout, at shutdown."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=CLOSE_TIMEOUT_S)
            self._sending.cancel()
        if self._queue and self._config is not None and not self._pause_s:
            await self._send(self._config, self._take(), CLOSE_TIMEOUT_S)
        if self._http is not None:
            await self._http.close()

    def _schedule(self) -> None:
        pause_s = self._pause_s * self._rng.uniform(0.8, 1.2)
        wait_s = max(FLUSH_S if len(self._queue) < BATCH else 0.0, pause_s)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._config is None:
            self._dropped.inc(len(self._queue))
            self._queue.clear()
        elif self._queue:
            send = self._send(self._config, self._take(), TIMEOUT_S)
            self._sending = asyncio.create_task(send, name="export traces")
            self._sending.add_done_callback(self._on_sent)

    def _on_sent(self, _: asyncio.Task[None]) -> None:
        self._sending = None
        if self._queue and self._timer is None:
            self._schedule()

    def _take(self) -> list[Span]:
        batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
        return batch

    async def _send(self, config: Traces, spans: list[Span], timeout_s: float) -> None:
        # Send one batch of spans; after a failure, count it and lengthen the next pause.
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=False)
        scope = {"scope": {"name": "penstock"}, "spans": spans}
        body = self._encode(
            {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        )
        headers = {"content-type": "application/json", **_authorization(config)}
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.post(
                config.endpoint, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as response:
                problem = "" if response.status < 300 else f"it answered {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = type(error).__name__
        if problem:
            self._failed.inc(len(spans))
            if not self._pause_s:
                log.warning(
                    "the trace collector does not accept spans (%s), so they are dropped", problem
                )
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, self._pause_s * 2))
        else:
            self._exported.inc(len(spans))
            self._pause_s = 0.0


def _authorization(config: Traces) -> Mapping[str, str]:
    return {} if config.key is None else {"authorization": f"Bearer {config.key.reveal()}"}
