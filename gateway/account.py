"""What remains of a request: its metrics and its line in the access log. One call per exchange, in any outcome.

Those that are over are accounted together at the end of a turn of the event loop, when the answers have been written:
thirty in a row find their code and their counters in the processor's caches, and no answer waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from _thread import start_new_thread
from contextlib import suppress
from time import monotonic, time

import msgspec

from gateway.config import Observability
from gateway.exchange import Exchange, SplitRecord
from gateway.explain import Explained, before
from gateway.kept import REGRET_EVERY, Kept, usage_of
from gateway.log_file import LogFile, Rotation
from gateway.meters import Counter, Histogram
from gateway.metrics import Metrics
from gateway.observe.export import Tracer
from gateway.relay import Relay
from gateway.told import Usage
from policies.contract import Policy
from policies.fingerprint import ids_of
from policies.model import Ask, Pick

log = logging.getLogger("penstock")

MAX_CHILDREN = 8192
SPLIT_STAGES = ("queue", "prefill", "transfer", "first_token")
WAITED_S = 0.001  # below it a request found a place at once
NO_ANSWER = Relay(b"")  # what a line tells of an answer that there was not; it is never fed
REOPEN_AGAIN_S = 0.05
KEEP_BYTES = 8 * 1024 * 1024  # lines waiting for a blocked sink; beyond it they are dropped and counted


class AccessLine(msgspec.Struct, omit_defaults=True):
    """One request in the access log. Times in us count from the moment the request's head was parsed.

    `slo` is its class and `kept` what became of the promise; `predicted_ttft_us` counts from the pick. `asked_model`
    is there where another one served. `blocks` (asked for by `access_blocks`): chained ids of the prompt's blocks of
    2 KiB, which are 512 tokens or so. `resumes`: how often a stream was continued elsewhere.
    `hedged`: the endpoint whose attempt at the same time was given up.
    """

    time: float
    id: str
    client: str
    api: str
    status: int
    outcome: str
    done_us: int
    reason: str | None = None
    tenant: str = ""
    model: str = ""
    endpoint: str = ""
    stream: bool = False
    received_us: int | None = None
    parsed_us: int | None = None
    admitted_us: int | None = None
    picked_us: int | None = None
    sent_us: int | None = None
    first_byte_us: int | None = None
    first_token_us: int | None = None
    last_us: int | None = None
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
    slo: str = ""
    kept: str = ""
    predicted_ttft_us: int | None = None
    split_reason: str = ""
    prefill: str = ""
    dialect: str = ""
    transport: str | None = None
    prefilled_us: int | None = None
    handed_over_us: int | None = None
    handoff_us: int | None = None
    asked_model: str = ""
    proxy_request_id: str = ""
    blocks: list[int] = []
    trace_id: str = ""
    resumes: int = 0
    hedged: str = ""


class AccessLog:
    """A buffered sink of lines. Writing happens in a thread, so a slow disk or a full pipe never holds a request up."""

    __slots__ = (
        *("_dropped", "_encode", "_file", "_flush_s", "_lines", "_loop", "_size", "_timer"),
        *("_writing", "blocks", "on"),
    )

    def __init__(self, seen: Observability, loop: asyncio.AbstractEventLoop, dropped: Counter) -> None:
        """`dropped` counts the lines that got lost. Raises OSError when the file cannot be opened."""
        rotation = None if seen.access_rotate is None else Rotation(seen.access_rotate.size, seen.access_rotate.keep)
        self._file = None if seen.access_log == "off" else LogFile(seen.access_log, rotation)
        self.on = self._file is not None
        self._dropped = dropped
        self.blocks = seen.access_blocks
        self._flush_s = seen.access_flush
        self._loop = loop
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None

    def write(self, line: AccessLine) -> None:
        encoded = self._encode(line)
        if self._size > KEEP_BYTES:
            self._dropped.inc()
            return
        self._lines.append(encoded)
        self._size += len(encoded)
        if self._timer is None:
            self._timer = self._loop.call_later(self._flush_s, self._flush)

    def reopen(self) -> None:
        """Open the file by its path again, if another file is there now. The thread that writes does it."""
        if self._file is None:
            return
        if self._writing is None:
            self._begin()
        else:
            self._loop.call_later(REOPEN_AGAIN_S, self.reopen)

    def _flush(self) -> None:
        self._timer = None
        if self._writing is not None:
            self._timer = self._loop.call_later(self._flush_s, self._flush)
        elif self._lines:
            self._begin()

    def _begin(self) -> None:
        """Hand what there is to a thread that keeps no process alive, for a sink may block. Thread.start() would wait
        until it runs, and with it the loop, for as long as others have the processor."""
        assert self._file is not None
        block = self._take()
        self._writing = self._loop.create_future()
        try:
            start_new_thread(self._write, (self._file, block))
        except RuntimeError:  # no thread is to be had; there may be one for the next lines
            self._written(block.count(b"\n"))

    def _write(self, file: LogFile, block: bytes) -> None:
        lost = file.write(block)
        with suppress(RuntimeError):  # the loop may have ended meanwhile
            self._loop.call_soon_threadsafe(self._written, lost)

    def _written(self, lost: int) -> None:
        self._dropped.inc(lost)
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.set_result(None)

    def _take(self) -> bytes:
        block = b"\n".join([*self._lines, b""])
        self._lines.clear()
        self._size = 0
        return block

    async def close(self) -> None:
        """Write what is left, waiting for a slow sink a second at most; at most once, at the end."""
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(2):  # what is under way, then the rest
            if self._writing is not None:
                await asyncio.wait([self._writing], timeout=1)
            if self._file is not None and self._writing is None and self._lines:
                self._begin()
        if self._file is not None and self._writing is None:
            self._file.close()
        self._file, self.on = None, False


class _Children:
    """The metrics of one model on one endpoint with one outcome, found once."""

    __slots__ = ("_cached", "_completion", "_e2e", "_prompt", "_tpot", "_ttft", "requests")

    def __init__(self, metrics: Metrics, model: str, endpoint: str, status: int, reason: str) -> None:
        self.requests: Counter = metrics.requests_total.labels(model, str(status), reason)
        self._ttft: Histogram = metrics.ttft_seconds.labels(model, endpoint)
        self._tpot: Histogram = metrics.tpot_seconds.labels(model, endpoint)
        self._e2e: Histogram = metrics.e2e_seconds.labels(model)
        self._prompt: Counter = metrics.prompt_tokens_total.labels(model)
        self._completion: Counter = metrics.completion_tokens_total.labels(model)
        self._cached: Counter = metrics.cached_tokens_total.labels(model)

    def count(self, x: Exchange, received: float, relay: Relay, usage: Usage, prompt_tokens: int, now: float) -> None:
        """One answered request, of which kept.py has found how long its client waited."""
        trace_id = "" if x.trace is None else x.trace.trace_id
        tokens, cached_tokens = usage.completion_tokens or max(relay.events - 2, 1), usage.cached_tokens
        ttft_s, tpot_s = x.ttft_s, x.tpot_s
        if ttft_s is None:  # no token was seen in it: its first byte is taken for one
            first, last = relay.first_byte_at or now, relay.last_at or now
            ttft_s = first - received
            tpot_s = (last - first) / (tokens - 1) if relay.events and tokens > 1 else None
        self.requests.value += 1.0
        self._ttft.mark((ttft_s, now, x.id, trace_id))
        self._e2e.observe(now - received)
        if tpot_s is not None:
            self._tpot.mark((tpot_s, now, x.id, trace_id))
        self._prompt.value += usage.prompt_tokens or prompt_tokens
        self._completion.value += tokens
        if cached_tokens:
            self._cached.value += cached_tokens


class Accounts:
    """Closes exchanges: observes their metrics, writes their line. Label children are looked up once and kept."""

    __slots__ = (
        *("_bytes_out", "_children", "_log", "_loop", "_metrics", "_over", "_overhead", "_picks"),
        *("_stages", "_traces", "explained", "kept", "tracer"),
    )

    def __init__(self, metrics: Metrics, log: AccessLog, traces: Tracer, loop: asyncio.AbstractEventLoop) -> None:
        """`tracer` is None while nobody is traced."""
        self._loop = loop
        self._over: list[tuple[Exchange, float]] = []
        self._metrics = metrics
        self._log = log
        self._traces = traces
        self.tracer: Tracer | None = None
        self.kept, self.explained = Kept(metrics), Explained()
        self._picks = 0
        self._overhead: Histogram = metrics.overhead_seconds
        self._bytes_out: Counter = metrics.bytes_out_total
        self._stages = [metrics.split_stage_seconds.labels(stage) for stage in SPLIT_STAGES]
        self._children: dict[tuple[str, str, int, str], _Children] = {}

    def follow(self, seen: Observability) -> None:
        """From now on as this configuration has it."""
        self.kept.tell_tenants(seen.tenants)
        self._traces.follow(seen.traces)
        self.tracer = self._traces.on
        self.explained.resize(seen.explained)

    def picked(self, x: Exchange, policy: Policy, ask: Ask, pick: Pick) -> None:
        """A pick, before its place is taken: note what the booking is about to change."""
        self._picks += 1
        if self._picks >= REGRET_EVERY:
            self._picks = 0
            self.kept.compare(ask, pick)
        if policy.terms is not None and self.explained.size:
            x.before = before(policy, pick)

    @property
    def answered(self) -> float:
        """Requests whose answer has begun and that are over. It begins again when configurations have changed a lot."""
        return sum(children.requests.value for children in self._children.values())

    def close(self, x: Exchange) -> None:
        """The last stage of the line. What is left to do for it waits for the end of this turn of the loop."""
        if not self._over:
            self._loop.call_soon(self.settle)
        self._over.append((x, monotonic()))

    def settle(self) -> None:
        """Account all that are over."""
        over, self._over = self._over, []
        zero = time() - monotonic()
        for x, now in over:
            try:
                self._account(x, now, zero)
            except Exception:  # what is wrong with one must not lose the others
                log.exception("request %s could not be accounted", x.id)

    def _account(self, x: Exchange, now: float, zero: float) -> None:
        """One that was over at `now`. `zero` is when the monotonic clock began, in Unix time."""
        answer = x.relay or NO_ANSWER
        usage = answer.usage if x.split is None else usage_of(x, answer)
        if answer.committed:
            self._answered(x, answer, usage, now)
        else:
            self._unanswered(x, now)
        if x.outcome == "client_gone":
            self._metrics.client_disconnects_total.labels(x.stage).inc()
        if x.side is not None:
            x.side.count(x)
        if self._log.on:
            line = _line(x, answer, usage, now, zero)
            if self._log.blocks and x.fingerprint is not None:
                line.blocks = ids_of(x.fingerprint)
            self._log.write(line)
        if x.trace is not None:
            self._traces.ended(x, x.trace, now)
        self.explained.keep(x, usage, answer.events, now)

    def forget(self, endpoint: str) -> None:
        """An endpoint of this name is gone: its children were dropped from their families."""
        self._children = {key: children for key, children in self._children.items() if key[1] != endpoint}

    def hedged(self, endpoint: str) -> None:
        self._metrics.hedges_total.labels(endpoint).inc()

    def retried(self, kind: str) -> None:
        self._metrics.retries_total.labels(kind).inc()

    def resumed(self, kind: str, result: str) -> None:
        """A stream broke after its first byte in the way `kind` names, and what came of going on."""
        self._metrics.resumes_total.labels(kind, result).inc()

    def _unanswered(self, x: Exchange, now: float) -> None:
        reason = x.reason or x.outcome
        self._metrics.requests_total.labels(x.model, str(x.status), reason).inc()
        self.kept.unanswered(x)
        if x.status == 429:
            slo = "" if x.call is None else x.call.request.slo.name
            self._metrics.shed_total.labels(reason, slo).inc()
            self._metrics.shed_seconds.observe(now - (x.received_at or x.accepted_at))

    def _answered(self, x: Exchange, relay: Relay, usage: Usage, now: float) -> None:
        pick, call = x.pick, x.call
        assert pick is not None
        assert call is not None
        endpoint = pick.candidate.endpoint
        key = (x.model, endpoint.name, x.status, x.reason or x.outcome)
        children: _Children = self._children.get(key) or self._find(key)
        received = x.received_at or now
        self.kept.answered(x, relay, usage, received)
        children.count(x, received, relay, usage, call.request.prompt_tokens, now)
        if x.tier:
            self._metrics.overflow_total.labels(call.asked_model, x.tier).inc()
        if x.split is not None:
            self._split(x.split, relay, x, received)
        sent_at, admitted_at, parsed_at = x.sent_at, x.admitted_at, x.parsed_at
        if sent_at is not None and admitted_at is not None and parsed_at is not None:
            waited_s = admitted_at - parsed_at
            self._overhead.observe(sent_at - received - waited_s)
            if waited_s > WAITED_S:
                self._metrics.queue_seconds.labels(endpoint.pool).observe(waited_s)
        self._bytes_out.value += relay.bytes_out

    def _split(self, split: SplitRecord, relay: Relay, x: Exchange, received: float) -> None:
        """The parts of its time to first token, as far as they can be told apart from outside."""
        prefilled, first_byte, first = split.prefilled_at, relay.first_byte_at, relay.first_token_at
        if split.prefill_sent_at is None or prefilled is None or first_byte is None or first is None:
            return
        queue, prefill, transfer, first_token = self._stages
        queue.observe((x.picked_at or received) - received)
        prefill.observe(prefilled - split.prefill_sent_at)
        transfer.observe(max(0.0, first_byte - prefilled))
        first_token.observe(first - first_byte)
        self._metrics.split_handoff_seconds.labels(x.model).observe(max(0.0, first - prefilled))

    def _find(self, key: tuple[str, str, int, str]) -> _Children:
        if len(self._children) > MAX_CHILDREN:  # models and endpoints come and go with configurations
            self._children.clear()
        children = self._children[key] = _Children(self._metrics, *key)
        return children


def _line(x: Exchange, answer: Relay, usage: Usage, now: float, zero: float) -> AccessLine:
    """All fields in their order: by name, or one after the other, they would cost twice as much."""
    start, call, pick = x.accepted_at, x.call, x.pick
    line = AccessLine(
        zero + start,
        x.id,
        x.client,
        x.api,
        x.status,
        x.outcome,
        int((now - start) * 1e6),
        x.reason,
        x.tenant,
        x.model,
        "" if pick is None else pick.candidate.endpoint.name,
        call is not None and call.request.stream,
        None if (stamp := x.received_at) is None else int((stamp - start) * 1e6),
        None if (stamp := x.parsed_at) is None else int((stamp - start) * 1e6),
        None if (stamp := x.admitted_at) is None else int((stamp - start) * 1e6),
        None if (stamp := x.picked_at) is None else int((stamp - start) * 1e6),
        None if (stamp := x.sent_at) is None else int((stamp - start) * 1e6),
        None if (stamp := answer.first_byte_at) is None else int((stamp - start) * 1e6),
        None if (stamp := answer.first_token_at) is None else int((stamp - start) * 1e6),
        None if (stamp := answer.last_at) is None else int((stamp - start) * 1e6),
        x.body_bytes,
        answer.bytes_out,
        answer.events,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        None if pick is None else pick.cached_tokens,
        answer.finish_reason,
        None if pick is None else pick.reason,
        None if pick is None else pick.score,
        None if pick is None else pick.considered,
        x.retries,
        "" if call is None else call.request.slo.name,
        x.kept,
        None if (seconds := x.predicted_ttft_s) is None else int(seconds * 1e6),
    )
    if x.tier and call is not None:
        line.asked_model = call.asked_model
    if x.proxy_request_id:
        line.proxy_request_id = x.proxy_request_id
    if x.trace is not None:
        line.trace_id = x.trace.trace_id
    if x.ledger is not None:
        line.resumes = x.ledger.resumed
    if x.hedge is not None:
        line.hedged = x.hedge.loser
    if x.split is not None:
        _tell(line, x.split, answer, start)
    return line


def _tell(line: AccessLine, split: SplitRecord, answer: Relay, start: float) -> None:
    """How the request was split, or why it was not."""
    line.split_reason, line.prefill = split.reason, split.prefill
    line.dialect, line.transport = split.dialect, split.transport
    line.prefilled_us = None if (stamp := split.prefilled_at) is None else int((stamp - start) * 1e6)
    line.handed_over_us = None if (stamp := split.handed_over_at) is None else int((stamp - start) * 1e6)
    first = answer.first_token_at
    if first is not None and split.prefilled_at is not None:
        line.handoff_us = int(max(0.0, first - split.prefilled_at) * 1e6)
