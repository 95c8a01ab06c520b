"""What remains of a request: its metrics and its line in the access log. One call per exchange, in any outcome."""

from __future__ import annotations

import asyncio
import os
import sys
from time import monotonic, time

import msgspec

from gateway.exchange import Exchange
from gateway.meters import Histogram
from gateway.metrics import Metrics
from gateway.relay import Relay, Usage

FLUSH_BYTES = 64 * 1024
KEEP_BYTES = 8 * 1024 * 1024  # lines waiting for a blocked sink; beyond it they are dropped and counted


class AccessLine(msgspec.Struct, omit_defaults=True):
    """One request in the access log. Times ending in _ms count from the moment the request's head was parsed."""

    time: float
    id: str
    client: str
    api: str
    status: int
    outcome: str
    done_ms: float
    reason: str | None = None
    tenant: str = ""
    model: str = ""
    endpoint: str = ""
    stream: bool = False
    received_ms: float | None = None
    parsed_ms: float | None = None
    admitted_ms: float | None = None
    picked_ms: float | None = None
    sent_ms: float | None = None
    first_byte_ms: float | None = None
    first_token_ms: float | None = None
    last_ms: float | None = None
    body_bytes: int = 0
    bytes_out: int = 0
    events: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    believed_cached_tokens: int | None = None
    finish_reason: str | None = None
    pick_reason: str | None = None
    pick_score: float | None = None
    considered: int | None = None
    retries: list[str] = []


class AccessLog:
    """A buffered sink of lines. Writing happens in a thread, so a slow disk or a full pipe never holds a request up."""

    def __init__(self, where: str, flush_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = _open(where)
        self._flush_s = flush_s
        self._loop = loop
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self.dropped = 0

    def write(self, line: AccessLine) -> None:
        if self._fd is None:
            return
        encoded = self._encode(line)
        if self._size > KEEP_BYTES:
            self.dropped += 1
            return
        self._lines.append(encoded)
        self._size += len(encoded)
        if self._timer is None:
            self._timer = self._loop.call_later(self._flush_s, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._writing is not None:
            self._timer = self._loop.call_later(self._flush_s, self._flush)
            return
        block = self._take()
        if block and self._fd is not None:
            self._writing = self._loop.run_in_executor(None, _write_all, self._fd, block)
            self._writing.add_done_callback(self._written)

    def _written(self, done: asyncio.Future[None]) -> None:
        self._writing = None
        if not done.cancelled() and done.exception() is not None:
            self.dropped += 1

    def _take(self) -> bytes:
        block = b"\n".join([*self._lines, b""])
        self._lines.clear()
        self._size = 0
        return block

    async def close(self) -> None:
        """Write what is left; at most once, at the end."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=1)
        if self._fd is not None and self._lines:
            await asyncio.wait_for(self._loop.run_in_executor(None, _write_all, self._fd, self._take()), timeout=1)
        if self._fd is not None and self._fd > 2:
            os.close(self._fd)
        self._fd = None


def _open(where: str) -> int | None:
    if where == "off":
        return None
    if where == "stdout":
        return sys.stdout.fileno()
    return os.open(where, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _write_all(fd: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(fd, view) :]


class Accounts:
    """Closes exchanges: observes their metrics, writes their line. Label children are looked up once and kept."""

    def __init__(self, metrics: Metrics, log: AccessLog) -> None:
        self._metrics = metrics
        self._log = log
        self._latencies: dict[tuple[str, str], tuple[Histogram, Histogram]] = {}

    def close(self, x: Exchange) -> None:
        """The last stage of the line."""
        now = monotonic()
        relay = x.relay
        usage = relay.usage() if relay is not None and relay.committed else Usage()
        self._count(x, usage, now)
        self._log.write(_line(x, relay, usage, now))

    def retried(self, kind: str) -> None:
        self._metrics.retries_total.labels(kind).inc()

    def _count(self, x: Exchange, usage: Usage, now: float) -> None:
        metrics = self._metrics
        metrics.requests_total.labels(x.model, str(x.status), x.reason or x.outcome).inc()
        if x.outcome == "client_gone":
            metrics.client_disconnects_total.labels(x.stage).inc()
        if x.status == 429 and x.reason is not None and x.outcome == "refused":
            metrics.shed_total.labels(x.reason).inc()
        relay, received = x.relay, x.received_at
        if relay is None or received is None or x.pick is None or relay.first_byte_at is None:
            return
        ttft, tpot = self._histograms(x.model, x.pick.candidate.endpoint.name)
        first = relay.first_token_at or relay.first_byte_at
        ttft.observe(first - received)
        tokens = usage.completion_tokens or max(relay.events - 2, 1)
        if relay.last_at is not None and tokens > 1 and relay.events:
            tpot.observe((relay.last_at - first) / (tokens - 1))
        metrics.e2e_seconds.labels(x.model).observe(now - received)
        if x.sent_at is not None and x.admitted_at is not None and x.parsed_at is not None:
            metrics.overhead_seconds.observe(x.sent_at - received - (x.admitted_at - x.parsed_at))
        metrics.bytes_out_total.inc(relay.bytes_out)
        self._count_tokens(x, usage, tokens)

    def _count_tokens(self, x: Exchange, usage: Usage, tokens: int) -> None:
        metrics = self._metrics
        assert x.call is not None
        assert x.pick is not None
        metrics.prompt_tokens_total.labels(x.model).inc(usage.prompt_tokens or x.call.request.prompt_tokens)
        metrics.completion_tokens_total.labels(x.model).inc(tokens)
        metrics.cached_tokens_total.labels(x.model).inc(usage.cached_tokens or 0)

    def _histograms(self, model: str, endpoint: str) -> tuple[Histogram, Histogram]:
        key = (model, endpoint)
        found = self._latencies.get(key)
        if found is None:
            metrics = self._metrics
            found = metrics.ttft_seconds.labels(model, endpoint), metrics.tpot_seconds.labels(model, endpoint)
            self._latencies[key] = found
        return found


def _line(x: Exchange, relay: Relay | None, usage: Usage, now: float) -> AccessLine:
    start = x.accepted_at
    line = AccessLine(
        time=round(time() - (now - start), 6),
        id=x.id,
        client=x.client,
        api=x.api.value,
        status=x.status,
        outcome=x.outcome,
        done_ms=_ms(start, now),  # type: ignore[arg-type]  # now is never None
        reason=x.reason,
        tenant=x.tenant,
        model=x.model,
        received_ms=_ms(start, x.received_at),
        parsed_ms=_ms(start, x.parsed_at),
        admitted_ms=_ms(start, x.admitted_at),
        picked_ms=_ms(start, x.picked_at),
        sent_ms=_ms(start, x.sent_at),
        body_bytes=x.body_bytes,
        retries=x.retries,
    )
    if x.call is not None:
        line.stream = x.call.request.stream
    if x.pick is not None:
        line.endpoint = x.pick.candidate.endpoint.name
        line.believed_cached_tokens = x.pick.cached_tokens
        line.pick_reason, line.pick_score, line.considered = x.pick.reason, x.pick.score, x.pick.considered
    if relay is not None:
        line.first_byte_ms = _ms(start, relay.first_byte_at)
        line.first_token_ms = _ms(start, relay.first_token_at)
        line.last_ms = _ms(start, relay.last_at)
        line.bytes_out, line.events = relay.bytes_out, relay.events
        line.finish_reason = relay.finish_reason()
    line.prompt_tokens, line.completion_tokens, line.cached_tokens = (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
    )
    return line


def _ms(start: float, stamp: float | None) -> float | None:
    return None if stamp is None else round((stamp - start) * 1000, 3)
