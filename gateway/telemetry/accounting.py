"""Accounting of ended requests: updates the metrics of each, then has it logged and traced.

Each request (its Exchange) is accounted once, and no response waits for it. Several requests are
accounted together, at the end of an iteration of the event loop: the first one brings the code and
the data of the accounting into the processor's caches, which takes longer than the work itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from time import monotonic, time

import msgspec

from gateway.config import Observability
from gateway.metrics.catalogue import Metrics
from gateway.metrics.metric_types import Counter, Histogram
from gateway.protocol.message_bytes import json_numbers
from gateway.protocol.request.api_call import Call
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange, SplitRecord
from gateway.telemetry.access_line import access_line
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.drift_records import ShapeRecorder
from gateway.telemetry.pick_explanation import snapshot_pick
from gateway.telemetry.recent_requests import RecentExchanges, has_problem
from gateway.telemetry.slo_outcomes import REGRET_SAMPLE_EVERY, SloTracker, effective_usage
from gateway.telemetry.span_exporter import SpanExporter
from policies.policy_types import Policy
from policies.prefix.logged_block_ids import NO_IDS, BlockIds
from policies.prefix.sampled_keys import Keys
from policies.routing_types import Pick, RoutingQuery, TokenPrice

log = logging.getLogger("penstock")

MAX_CHILDREN = 8192
SPLIT_STAGES = ("queue", "prefill", "transfer", "first_token")
LEAST_WAIT_S = 0.001  # queue time below which a request counts as not having waited
AT_ONCE = 32  # ended requests that are accounted together, unless account_ended() is called before
NO_RESPONSE = Relay(b"")  # stands in for a missing response; never fed


class _MetricChildren:
    """The labelled metrics of one combination of model, endpoint, status and reason."""

    __slots__ = ("_cached", "_completion", "_e2e", "_prompt", "_tpot", "_ttft", "requests")

    def __init__(
        self, metrics: Metrics, model: str, endpoint: str, status: int, reason: str
    ) -> None:
        self.requests: Counter = metrics.requests_total.labels(model, str(status), reason)
        self._ttft: Histogram = metrics.ttft_seconds.labels(model, endpoint)
        self._tpot: Histogram = metrics.tpot_seconds.labels(model, endpoint)
        self._e2e: Histogram = metrics.e2e_seconds.labels(model)
        self._prompt: Counter = metrics.prompt_tokens_total.labels(model)
        self._completion: Counter = metrics.completion_tokens_total.labels(model)
        self._cached: Counter = metrics.cached_tokens_total.labels(model)

    def count(
        self,
        exchange: Exchange,
        received: float,
        relay: Relay,
        usage: TokenUsage,
        prompt_tokens: int,
        now: float,
    ) -> None:
        """Count one answered request in these metrics. Its TTFT and TPOT must have been set.

        exchange       the record of the request
        received       monotonic time at which its body was complete
        relay          the relay of its answer
        usage          the token counts of its answer
        prompt_tokens  estimated number of prompt tokens, used if the engine reported none
        now            monotonic time at which it ended
        """
        request_id = exchange.id
        trace_id = "" if exchange.trace is None else exchange.trace.trace_id
        tokens = usage.completion_tokens or max(relay.event_count - 2, 1)
        ttft_s, tpot_s = exchange.ttft_s, exchange.tpot_s
        if ttft_s is None:
            # No token was recognized in the response: its first byte counts as the first token.
            first, last = relay.first_byte_at or now, relay.last_data_at or now
            ttft_s = first - received
            tpot_s = (last - first) / (tokens - 1) if relay.event_count and tokens > 1 else None
        self.requests.value += 1.0
        self._ttft.observe_request((ttft_s, now, request_id, trace_id))
        self._e2e.observe(now - received)
        if tpot_s is not None:
            self._tpot.observe_request((tpot_s, now, request_id, trace_id))
        self._prompt.value += usage.prompt_tokens or prompt_tokens
        self._completion.value += tokens
        if usage.cached_tokens:
            self._cached.value += usage.cached_tokens


class Accounting:
    """Records each ended request in the metrics, in the access log, and as trace spans."""

    __slots__ = (
        *(
            "_block_ids",
            "_at_once",
            "_bytes_out",
            "_call_after_turn",
            "_children",
            "_log",
            "_metrics",
            "_over",
            "_overhead",
            "_picks",
        ),
        *("_stages", "_traces", "recent_exchanges", "shapes", "slo_tracker", "tracer"),
    )

    def __init__(
        self,
        metrics: Metrics,
        log: AccessLog,
        traces: SpanExporter,
        call_after_turn: Callable[[Callable[[], None]], object],
        secret: bytes,
        at_once: int = 1,
    ) -> None:
        """Create the accounting.

        call_after_turn  calls a function once, at the end of this iteration of the event loop
        secret           keys the hashes of prompt blocks in the access log
        at_once          number of ended requests that are accounted together. If it is more than
                         one, the caller calls account_ended() several times a second
        """
        self._call_after_turn = call_after_turn
        self._block_ids = BlockIds(secret)
        self._over: list[tuple[Exchange, float]] = []
        self._at_once = at_once
        self._metrics = metrics
        self._log = log
        self._traces = traces
        self.tracer: SpanExporter | None = None  # None while tracing is off
        self.slo_tracker, self.recent_exchanges = SloTracker(metrics), RecentExchanges()
        self.shapes = ShapeRecorder()
        self._picks = 0
        self._overhead: Histogram = metrics.overhead_seconds
        self._bytes_out: Counter = metrics.bytes_out_total
        self._stages = [metrics.split_stage_seconds.labels(stage) for stage in SPLIT_STAGES]
        self._children: dict[tuple[str, str, int, str], _MetricChildren] = {}

    def configure(self, config: Observability) -> None:
        """Apply a new section `observability`: tenant labels, traces and kept explanations."""
        self.slo_tracker.set_tenant_labels(config.tenants)
        self._traces.configure(config.traces)
        self.tracer = self._traces.active
        self.recent_exchanges.resize(config.explained)

    def on_pick(self, exchange: Exchange, policy: Policy, query: RoutingQuery, pick: Pick) -> None:
        """Record the load of the endpoints at a pick, before capacity is reserved for the request.

        The record is used to explain the pick, and to evaluate policies on trial with the same
        state.
        """
        self._picks += 1
        if self._picks >= REGRET_SAMPLE_EVERY:
            self._picks = 0
            self.slo_tracker.observe_pick_regret(query, pick)
        if exchange.is_explained is None:
            exchange.is_explained = self.recent_exchanges.has_room(query.now)
        if exchange.is_explained and policy.price_terms is not None:
            exchange.pick_snapshot = snapshot_pick(policy, pick)

    @property
    def answered_count(self) -> float:
        """Return the number of ended requests whose response had begun. It may restart at 0."""
        return sum(children.requests.value for children in self._children.values())

    def add_ended(self, exchange: Exchange) -> None:
        """Queue an ended request to be recorded at the end of an iteration of the event loop.

        One that still has its body does not wait for others, because the memory that was reserved
        for the body has been released.
        """
        call = exchange.call
        self._over.append((exchange, monotonic()))
        if len(self._over) == self._at_once or (call is not None and call.body):
            self._call_after_turn(self.account_ended)

    def account_ended(self) -> None:
        """Record all requests that have ended since the last call: metrics, access log, traces."""
        if not self._over:
            return
        over, self._over = self._over, []
        unix_offset = time() - monotonic()
        for exchange, now in over:
            try:
                self._account(exchange, now, unix_offset)
            except Exception:  # an error in one exchange must not lose the others
                log.exception("accounting for request %s failed", exchange.id)
            if exchange.mirrored is not None:
                exchange.mirrored.on_ended(exchange)

    def _account(self, exchange: Exchange, now: float, unix_offset: float) -> None:
        # Record a request that ended at `now`; `unix_offset` converts that to Unix time.
        relay = exchange.relay or NO_RESPONSE
        usage = relay.usage if exchange.split is None else effective_usage(exchange, relay)
        if relay.is_committed:
            self._count_answered(exchange, relay, usage, now)
        else:
            self._count_unanswered(exchange, now)
        if exchange.outcome == "client_gone":
            self._metrics.client_disconnects_total.labels(exchange.stage).inc()
        if exchange.canary_arm is not None:
            exchange.canary_arm.count(exchange)
        log, is_recorded = self._log, bool(self.shapes.pools) and exchange.pick is not None
        line = access_line(exchange, relay, usage, now, unix_offset) if log.is_enabled else None
        call = exchange.call
        has_ids = exchange.fingerprint is not None or (call is not None and call.request.session)
        if is_recorded or (has_ids and log.has_blocks):  # other lines contain no ids
            blocks, session = self._ids(exchange)
            if is_recorded:
                at_s = unix_offset + now
                self.shapes.add(exchange, relay, usage, at_s, blocks.tolist(), session)
            if line is not None and log.has_blocks:
                if session:
                    line.session_id = session
                if blocks:
                    line.blocks = msgspec.Raw(json_numbers(blocks))
        if line is not None:
            log.write(line)
        if exchange.trace is not None:
            self._traces.add_request(exchange, exchange.trace, now)
        if self._is_kept(exchange, now):
            self.recent_exchanges.add(exchange, usage, relay.event_count, now)

    def _is_kept(self, exchange: Exchange, now: float) -> bool:
        # Return whether the request is kept for explanations.
        if exchange.retries or has_problem(exchange):
            return True  # and takes no place of the sample of the others
        if exchange.is_explained is None:  # the picks of its pool are not recorded
            exchange.is_explained = self.recent_exchanges.has_room(now)
        return exchange.is_explained

    def _ids(self, exchange: Exchange) -> tuple[Keys, int]:
        # Return the ids of the prompt's blocks and of the session.
        call, fingerprint, session = exchange.call, exchange.fingerprint, 0
        blocks = NO_IDS
        if fingerprint is not None:
            blocks = self._block_ids.ids(fingerprint, exchange.tenant)
        if call is not None and call.request.session:
            session = self._block_ids.session_id(call.request.session)
        return blocks, session

    def forget_endpoints(self, endpoints: Collection[str]) -> None:
        """Drop the cached metrics of endpoints, after their label values have been removed."""
        self._children = {
            key: children for key, children in self._children.items() if key[1] not in endpoints
        }

    def count_hedge(self, endpoint: str) -> None:
        self._metrics.hedges_total.labels(endpoint).inc()

    def count_retry(self, kind: str) -> None:
        self._metrics.retries_total.labels(kind).inc()

    def count_resume(self, kind: str, result: str) -> None:
        """Count a stream that broke after its first byte, by kind of failure and result."""
        self._metrics.resumes_total.labels(kind, result).inc()

    def _count_unanswered(self, exchange: Exchange, now: float) -> None:
        reason = exchange.reason or exchange.outcome
        self._metrics.requests_total.labels(exchange.model, str(exchange.status), reason).inc()
        self.slo_tracker.on_unanswered(exchange)
        if exchange.status == 429:
            slo = "" if exchange.call is None else exchange.call.request.slo.name
            self._metrics.shed_total.labels(reason, slo).inc()
            began = exchange.received_at or exchange.accepted_at
            self._metrics.shed_seconds.observe(now - began)

    def _count_answered(
        self, exchange: Exchange, relay: Relay, usage: TokenUsage, now: float
    ) -> None:
        pick, call = exchange.pick, exchange.call
        assert pick is not None
        assert call is not None
        endpoint = pick.candidate.endpoint
        reason = exchange.reason or exchange.outcome
        key = (exchange.model, endpoint.name, exchange.status, reason)
        children: _MetricChildren = self._children.get(key) or self._metric_children(key)
        received = exchange.received_at or now
        self.slo_tracker.on_answered(exchange, relay, usage, received)
        children.count(exchange, received, relay, usage, call.request.prompt_tokens, now)
        if endpoint.token_price is not None:
            self._charge(call, usage, endpoint.token_price)
        if exchange.tier:
            self._metrics.overflow_total.labels(call.requested_model, exchange.tier).inc()
        if exchange.split is not None:
            self._observe_split_stages(exchange.split, relay, exchange, received)
        sent_at, admitted_at, parsed_at = exchange.sent_at, exchange.admitted_at, exchange.parsed_at
        if sent_at is not None and admitted_at is not None and parsed_at is not None:
            waited_s = admitted_at - parsed_at
            self._overhead.observe(sent_at - received - waited_s)
            if waited_s > LEAST_WAIT_S:
                self._metrics.queue_seconds.labels(endpoint.pool).observe(waited_s)
        self._bytes_out.value += relay.bytes_sent

    def _charge(self, call: Call, usage: TokenUsage, price: TokenPrice) -> None:
        # Count what a provider charges. Without usage, as when the client left, it is unknown.
        if usage.prompt_tokens is None:
            return
        usd = price.usd(usage.prompt_tokens, usage.cached_tokens or 0, usage.completion_tokens or 0)
        tenant = call.request.tenant if self.slo_tracker.has_tenant_labels else ""
        labels = call.request.model, call.request.slo.name, tenant
        self._metrics.cost_usd_total.labels(*labels).value += usd

    def _observe_split_stages(
        self, split: SplitRecord, relay: Relay, exchange: Exchange, received: float
    ) -> None:
        # Add the stages of a split request's TTFT to the metrics, if all of them were measured.
        #
        # The stages are the wait, the prefill, the KV transfer and the first decoded token.
        prefilled = split.prefilled_at
        first_byte, first_token_at = relay.first_byte_at, relay.first_token_at
        if split.prefill_sent_at is None or prefilled is None or split.pulled_from:
            return
        if first_byte is None or first_token_at is None:
            return
        queue, prefill, transfer, first_token = self._stages
        queue.observe((exchange.picked_at or received) - received)
        prefill.observe(prefilled - split.prefill_sent_at)
        transfer.observe(max(0.0, first_byte - prefilled))
        first_token.observe(first_token_at - first_byte)
        handoff_s = max(0.0, first_token_at - prefilled)
        self._metrics.split_handoff_seconds.labels(exchange.model).observe(handoff_s)

    def _metric_children(self, key: tuple[str, str, int, str]) -> _MetricChildren:
        if len(self._children) > MAX_CHILDREN:  # models and endpoints change with configurations
            self._children.clear()
        children = self._children[key] = _MetricChildren(self._metrics, *key)
        return children
