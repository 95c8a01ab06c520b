"""Sending spans to a collector: OTLP over HTTP, as JSON, in batches. Nobody ever waits for it.

A span that finds the queue full is dropped and counted; so is a batch that the collector does not
take, and the next one waits, ever longer while it stays away. What is traced, and how a tree looks,
is spans.py's.
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
from gateway.exchange import Exchange
from gateway.metrics import Metrics
from gateway.observe.resource import attributes
from gateway.observe.spans import Span, tree
from gateway.trace import Trace, new_id, parent_of

log = logging.getLogger("penstock")

MOST_WAITING = 8192  # spans; about 6 MiB
BATCH = 2048
FLUSH_S = 1.0
TIMEOUT_S = 5.0
LAST_CHANCE_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Tracer:
    """Who is traced, and the way to the collector.

    One per process, in its event loop; `on` is None while nobody is.
    """

    def __init__(self, metrics: Metrics, rng: Random, env: Mapping[str, str]) -> None:
        """`env` may name the OpenTelemetry resource (resource.py)."""
        results = ("exported", "dropped", "failed")
        self._exported, self._dropped, self._failed = map(metrics.inside.trace_spans_total.labels, results)
        self._rng = rng
        self._encode = msgspec.json.Encoder().encode
        self._resource = {"attributes": attributes(env)}
        self._waiting: list[Span] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._pause_s = 0.0
        self._config: Traces | None = None

    @property
    def on(self) -> Tracer | None:
        """The tracer, while there is a collector; so what asks for it pays for one look at None."""
        return None if self._config is None else self

    def follow(self, config: Traces | None) -> None:
        """From now on this collector and share of requests."""
        if config != self._config:
            self._config, self._pause_s = config, 0.0

    def begin(self, headers: Mapping[str, str]) -> Trace | None:
        """A request has come.

        Its client decides if it says anything; else chance does. None: it is not traced.
        """
        config, parent = self._config, parent_of(headers)
        if config is None:
            return None
        if parent is not None:
            return Trace(parent.trace_id, new_id(), parent.span_id, parent.state) if parent.sampled else None
        if self._rng.random() >= config.ratio:
            return None
        return Trace(token_hex(16), new_id(), "", "")

    def ended(self, x: Exchange, trace: Trace, now: float) -> None:
        """A traced request is over."""
        if len(self._waiting) >= MOST_WAITING:
            self._dropped.inc(4 + len(trace.legs))
            return
        self._waiting += tree(x, trace, now, time() - monotonic())
        if self._timer is None and self._sending is None:
            self._plan()

    async def close(self) -> None:
        """The last spans get one short chance."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=LAST_CHANCE_S)
            self._sending.cancel()
        if self._waiting and self._config is not None and not self._pause_s:
            await self._send(self._config, self._take(), LAST_CHANCE_S)
        if self._http is not None:
            await self._http.close()

    def _plan(self) -> None:
        pause_s = self._pause_s * self._rng.uniform(0.8, 1.2)
        wait_s = max(FLUSH_S if len(self._waiting) < BATCH else 0.0, pause_s)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._config is None:
            self._dropped.inc(len(self._waiting))
            self._waiting.clear()
        elif self._waiting:
            self._sending = asyncio.create_task(self._send(self._config, self._take(), TIMEOUT_S), name="traces")
            self._sending.add_done_callback(self._sent)

    def _sent(self, _: asyncio.Task[None]) -> None:
        self._sending = None
        if self._waiting and self._timer is None:
            self._plan()

    def _take(self) -> list[Span]:
        taken, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
        return taken

    async def _send(self, config: Traces, spans: list[Span], timeout_s: float) -> None:
        """One batch. Whatever goes wrong is counted and remembered in the pause before the next."""
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=False)
        scope = {"scope": {"name": "penstock"}, "spans": spans}
        body = self._encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]})
        headers = {"content-type": "application/json", **_authorization(config)}
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.post(
                config.endpoint, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as answer:
                trouble = "" if answer.status < 300 else f"it answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            trouble = type(error).__name__
        if trouble:
            self._failed.inc(len(spans))
            if not self._pause_s:
                log.warning("traces are not taken by their collector (%s); spans are dropped until it does", trouble)
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, self._pause_s * 2))
        else:
            self._exported.inc(len(spans))
            self._pause_s = 0.0


def _authorization(config: Traces) -> Mapping[str, str]:
    return {} if config.key is None else {"authorization": f"Bearer {config.key.reveal()}"}
