"""The mutable record of one request: what happened to it, when and why.

Only the request's own task changes the record. Accounting reads it when the request has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec.structs import replace

from gateway.protocol.errors import GatewayError
from policies.routing_types import Candidate, Pick, RoutingQuery

if TYPE_CHECKING:
    from gateway.admission.body_memory_budget import BodyBudget
    from gateway.admission.pool_queue import PoolQueue
    from gateway.admission.quota_charges import QuotaCharge
    from gateway.admission.retry_turns import RetryTurns
    from gateway.fleet.reservation import Reservation
    from gateway.metrics.metric_types import Histogram
    from gateway.protocol.api_table import Api
    from gateway.protocol.request.api_call import Call
    from gateway.protocol.response.relay import Relay, UpstreamError
    from gateway.protocol.response.token_ledger import Ledger
    from gateway.protocol.stored_response_ids import ResponseIds
    from gateway.protocol.trace_context import Trace
    from gateway.protocol.translate.translation_table import NewTranslator
    from policies.prefix.fingerprint import Fingerprint


class Releasable(Protocol):
    """The interface of an engine request whose body can be freed: release() drops its bytes."""

    def release(self) -> None: ...


class Countable(Protocol):
    """The interface of one policy of a canary trial, which counts its requests by their outcome."""

    def count(self, exchange: Exchange, /) -> None: ...


class Explainable(Protocol):
    """The interface of the record of one choice of an endpoint, which can explain the choice."""

    def score_terms(
        self, query: RoutingQuery, candidates: Sequence[Candidate], /
    ) -> Mapping[str, Mapping[str, float]]: ...


class Mirrored(Protocol):
    """The interface of a request whose answer will be compared with a candidate engine's answer.

    gateway/trials/mirror.py implements it.
    """

    def on_ended(self, exchange: Exchange, /) -> None: ...


class SecondAttempt(Protocol):
    """The interface of a hedge: a second attempt at a request, in parallel with the first one.

    gateway/forwarding/hedge.py implements it.
    """

    is_over: bool
    loser: str

    def close(self) -> None: ...
    async def finish(self, problem: UpstreamError) -> UpstreamError | None: ...


class SplitRecord:
    """Whether a request was split into prefill and decode, and the times of its stages.

    Times are monotonic seconds; None means that the stage was not reached.

    reason             why the request was split or not
                       (policies.pricing.split_decision.SplitReason)
    prefill            name of the prefill endpoint; "" if not split
    pulled_from        name of the endpoint that was to send the KV of the prompt's beginning; "" if
                       none was
    pulled_tokens      number of tokens whose KV was pulled from there, as estimated; 0 if the
                       prompt was computed in the end
    dialect            name of the engines' protocol for the KV handoff; "" if not split
    prefill_sent_at    when the prefill request was sent
    prefilled_at       when the prefill answer was complete
    handed_over_at     when the decode request was sent
    cached_tokens      cached prompt tokens as the prefill engine reports them; the decode engine
                       counts transferred tokens as cached too
    predicted_ttft_s   seconds to the first token, as expected when the endpoints were chosen; None
                       until the time of a handoff between the two has been measured
    transport          how the KV cache was transferred; None if no engine reported it
    """

    __slots__ = (
        *("cached_tokens", "dialect", "handed_over_at", "predicted_ttft_s", "prefill"),
        *("prefill_sent_at", "prefilled_at", "pulled_from", "pulled_tokens", "reason", "transport"),
    )

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.prefill = self.dialect = self.pulled_from = ""
        self.pulled_tokens = 0
        self.prefill_sent_at: float | None = None
        self.prefilled_at: float | None = None
        self.handed_over_at: float | None = None
        self.cached_tokens: int | None = None
        self.transport: str | None = None
        self.predicted_ttft_s: float | None = None


class StoredAt(NamedTuple):
    """An earlier response, stored at an engine, to which a request refers by its id."""

    response_id: str
    endpoint: str
    model: str


class Exchange:
    """The record of one request, from the parsing of its head to its accounting.

    Times are monotonic seconds; None means that the stage was not reached.

    accepted_at         the head was parsed
    received_at         the body was complete
    parsed_at           the body was parsed
    admitted_at         admission control let the request proceed; the time since parsed_at is the
                        wait in the queue
    picked_at           an endpoint was picked
    sent_at             the first request to an engine was sent
    outcome             served | refused | client_gone | preempted | interrupted | internal_error
    reason              short cause of an outcome other than served
    detail              sentence with the numbers behind a refusal
    retries             names of the endpoints that failed this request, in order
    unsent_attempts     number of failed attempts whose request was never sent to an engine; they do
                        not count as retries
    holds_retry_turn    whether the request uses one of the retries that the gateway permits at the
                        same time (the retry budget)
    body_bytes          bytes of memory reserved for the body
    body_budget         the budget from which the memory was reserved; None when none is reserved
    first_query         the policy's input at the first pick; None until capacity was reserved
    pool_queue          the admission queue to which the outcome is reported; None if the queue does
                        not need the outcome
    tier                name of the smaller model that serves the request instead of the requested
                        one; usually ""
    fingerprint         chain of hashes of the prompt's blocks; None if the policy does not use
                        cached prefixes
    slo_outcome         whether the latency targets were met (telemetry/slo_outcomes.py); "" if
                        unknown
    ttft_s              seconds to the first token, as the client saw it
    tpot_s              seconds per output token after the first, as the client saw it
    predicted_ttft_s    ttft_s as expected at the pick
    predicted_tpot_s    tpot_s as expected at the pick
    response_ids        creates the response's id if the engine may store the response; else None
    stored_at           the stored response to which the request refers
    pick_snapshot       the best two candidates as they were at the pick, to explain it later; None
                        if the policy's scores have no parts that could be shown
    is_explained        whether the request is kept for explanations although it has no problem;
                        None until that is decided
    split               whether and how the request was split; None for models without a split
    trace               the request's place in a distributed trace; None if it is not traced
    gaps                histogram of the times between the answer's chunks; None for most requests,
                        which are not sampled
    quota               what was charged to the tenant's quota; None for a tenant without limits
    canary_arm          the policy of a canary trial that counts the request; None in a pool without
                        a canary
    hedge               the request's second attempt in parallel; None if there was none
    mirrored            the prompt that a mirror keeps to compare answers; None for most requests
    proxy_request_id    the x-request-id of a trusted proxy; "" without one
    client_request_id   the client's own id of the request; "" without one
    new_translator      creates a translator of an attempt's answer to the client's API; None if
                        engines serve that API themselves
    translation_reason  why the request is translated, or why it is not although its route splits or
                        resumes requests; else ""
    ledger              the record of the answer's tokens, for continuing it elsewhere; None if that
                        is not possible
    """

    __slots__ = (
        *(
            "accepted_at",
            "admitted_at",
            "api",
            "first_query",
            "is_explained",
            "pick_snapshot",
            "body_bytes",
            "reservation",
            "call",
        ),
        *(
            "client",
            "client_request_id",
            "detail",
            "fingerprint",
            "gaps",
            "hedge",
            "body_budget",
            "id",
            "slo_outcome",
            "ledger",
            "new_translator",
            "translation_reason",
        ),
        *("model", "outcome", "parsed_at", "pick", "picked_at", "predicted_tpot_s"),
        *("predicted_ttft_s", "proxy_request_id", "quota", "reason", "received_at", "relay"),
        *(
            "retries",
            "holds_retry_turn",
            "pool_queue",
            "sent_request",
            "sent_at",
            "canary_arm",
            "split",
            "status",
            "tenant",
        ),
        *("mirrored", "response_ids", "stored_at"),
        *("tier", "tpot_s", "trace", "ttft_s", "unsent_attempts"),
    )

    def __init__(self, request_id: str, api: Api, client: str, accepted_at: float) -> None:
        self.id = request_id
        self.api = api
        self.client = client
        self.accepted_at = accepted_at
        self.proxy_request_id = self.client_request_id = ""
        self.received_at: float | None = None
        self.parsed_at: float | None = None
        self.admitted_at: float | None = None
        self.picked_at: float | None = None
        self.sent_at: float | None = None
        self.tenant = self.model = self.tier = self.detail = self.slo_outcome = ""
        self.translation_reason = ""
        self.call: Call | None = None
        self.sent_request: Releasable | None = None
        self.pick: Pick | None = None
        self.reservation: Reservation | None = None
        self.relay: Relay | None = None
        self.retries: list[str] = []
        self.holds_retry_turn = False
        self.body_bytes = self.status = self.unsent_attempts = 0
        self.body_budget: BodyBudget | None = None
        self.outcome = "served"
        self.reason: str | None = None
        self.pool_queue: PoolQueue | None = None
        self.first_query: RoutingQuery | None = None
        self.ttft_s: float | None = None
        self.tpot_s: float | None = None
        self.predicted_ttft_s: float | None = None
        self.predicted_tpot_s: float | None = None
        self.pick_snapshot: Explainable | None = None
        self.is_explained: bool | None = None
        self.split: SplitRecord | None = None
        self.fingerprint: Fingerprint | None = None
        self.new_translator: NewTranslator | None = None
        self.trace: Trace | None = None
        self.gaps: Histogram | None = None
        self.canary_arm: Countable | None = None
        self.mirrored: Mirrored | None = None
        self.quota: QuotaCharge | None = None
        self.ledger: Ledger | None = None
        self.hedge: SecondAttempt | None = None
        self.response_ids: ResponseIds | None = None
        self.stored_at: StoredAt | None = None

    @property
    def failed_attempts(self) -> int:
        """Return how many endpoints have failed after this request was sent to them."""
        return len(self.retries) - self.unsent_attempts

    def on_reserved(self, pool_queue: PoolQueue, query: RoutingQuery, pick: Pick) -> None:
        """Record that capacity was reserved at an endpoint.

        pool_queue  the admission queue; it is informed of the request's first reservation if it
                    uses the outcomes of requests
        query       the policy's input at the pick
        pick        the picked endpoint
        """
        if self.first_query is None:
            self.first_query = query
            if pool_queue.learns_from(query.request):
                self.pool_queue = pool_queue
                pool_queue.on_reserved(query, pick)

    def take_memory(self, budget: BodyBudget, body_bytes: int) -> None:
        """Increase the memory reserved for this request's body to `body_bytes` bytes.

        Raises GatewayError if the memory for bodies is used up. Then this request's reservation
        is released, so that other growing bodies can be accepted.
        """
        try:
            self.body_bytes += budget.reserve_body(body_bytes - self.body_bytes)
        except GatewayError:
            self.release_memory()
            raise
        self.body_budget = budget

    def release_memory(self) -> None:
        """Release the memory reserved for the body. Does nothing if it was released before."""
        budget, self.body_budget = self.body_budget, None
        if budget is not None:
            budget.release_body(self.body_bytes)

    def on_first_token(self) -> None:
        """Record the first token of the answer: update the endpoint's load, and free the body.

        The body is not needed any more, because no retry is possible after this.
        """
        reservation, relay, call = self.reservation, self.relay, self.call
        if reservation is not None:
            if relay is not None and relay.is_converted is not reservation.live.answers_whole:
                reservation.on_stream_seen(is_whole=relay.is_converted)
            reservation.on_first_token()
        if call is not None:
            call.release()
        sent = self.sent_request
        if sent is not None and sent is not call:
            sent.release()
        budget = self.body_budget
        if budget is not None:
            self.body_budget = None
            budget.release_body(self.body_bytes)

    def give_back_retry_turn(self, retries: RetryTurns) -> None:
        """End this request's retry, so that the retry budget can grant it to another request.

        Does nothing if the request holds no retry.
        """
        if self.holds_retry_turn:
            self.holds_retry_turn = False
            retries.release()

    def set_refused(self, error: GatewayError) -> None:
        self.status, self.outcome = error.status, "refused"
        self.reason, self.detail = error.reason, error.message

    def set_interrupted(self, reason: str) -> None:
        """Record that the answer broke after its first byte, when status 200 was already sent."""
        self.status, self.outcome, self.reason = 200, "interrupted", reason

    def drop_heavy_fields(self) -> None:
        """Free the large fields and the client's data.

        Times, outcome and pick are kept, to explain the request later.
        """
        # After a first token, the request has been released already.
        if self.ttft_s is None and self.call is not None:
            self.call.release()
        self.sent_request = self.reservation = self.relay = self.pool_queue = None
        self.fingerprint = self.ledger = self.hedge = None
        # The fingerprint of a long prompt takes 128 KiB.
        if (query := self.first_query) is not None and query.fingerprint is not None:
            self.first_query = replace(query, fingerprint=None)

    def set_client_gone(self) -> None:
        """Record that the client disconnected before the end of the answer.

        The record gets the status 499, as in nginx; only logs show it.
        """
        self.status, self.outcome, self.reason = 499, "client_gone", self.stage

    def set_preempted(self) -> None:
        """Record that this batch request is about to be stopped, to make room for live traffic.

        Call this before the request's task is cancelled. The record gets no status, because a later
        attempt answers the request.
        """
        self.status, self.outcome, self.reason = 0, "preempted", None

    def set_cancelled(self) -> None:
        """Record that the request's task was cancelled: by its client, or after set_preempted()."""
        if self.outcome != "preempted":
            self.set_client_gone()

    def set_internal_error(self) -> None:
        """Record that the request failed because of an error inside the gateway (status 500)."""
        self.status, self.outcome, self.reason = 500, "internal_error", "internal_error"

    @property
    def is_committed(self) -> bool:
        """Return whether a byte of the answer was sent to the client; then no retry is possible."""
        return self.relay is not None and self.relay.is_committed

    @property
    def stage(self) -> str:
        """Return the stage that the request is in: parse, queue, prefill, transfer or decode."""
        if self.relay is not None and self.relay.first_token_at is not None:
            return "decode"
        if self.sent_at is not None:
            is_prefilled = self.split is not None and self.split.prefilled_at is not None
            return "transfer" if is_prefilled else "prefill"
        return "queue" if self.parsed_at is not None else "parse"
