"""The one mutable record of a request: what happened to it, when, and why. It belongs to the request's own task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from policies.model import Ask, Pick

if TYPE_CHECKING:
    from gateway.answer import GatewayError
    from gateway.booking import Booking
    from gateway.canary import Side
    from gateway.explain import Before
    from gateway.gate import Gate, Room
    from gateway.hedge import Race
    from gateway.meters import Histogram
    from gateway.openai import Api, Call
    from gateway.relay import Relay
    from gateway.resume.ledger import Ledger
    from gateway.trace import Trace
    from policies.fingerprint import Fingerprint
    from policies.quota import Quota


class Sent(Protocol):
    """A request that left for an engine; its bytes can be let go of once they are not needed again."""

    def release(self) -> None: ...


class SplitRecord:
    """What was decided about splitting, and how it went. Stamps are monotonic seconds; None: not reached.

    reason              why it was split or not, in policies.split's word
    prefill, dialect    who prefilled and how it was handed over; empty when it was not split
    prefill_sent_at     the prefill request left     prefilled_at   its answer was whole
    handed_over_at      the decode request left
    cached_tokens       of the prompt at the prefiller, as it says: the decoder cannot know
    predicted_ttft_s    as expected when both were picked; None before a handoff between them was measured
    transport           how the KV travelled, when an engine said so
    """

    __slots__ = (
        *("cached_tokens", "dialect", "handed_over_at", "predicted_ttft_s", "prefill", "prefill_sent_at"),
        *("prefilled_at", "reason", "transport"),
    )

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.prefill = self.dialect = ""
        self.prefill_sent_at: float | None = None
        self.prefilled_at: float | None = None
        self.handed_over_at: float | None = None
        self.cached_tokens: int | None = None
        self.transport: str | None = None
        self.predicted_ttft_s: float | None = None


class Exchange:
    """Stamps are monotonic seconds; None means that the stage was not reached.

    accepted_at   the head was parsed          received_at   the body was complete
    parsed_at     the call was understood      admitted_at   a Permit was given (the rest was waiting)
    picked_at     an endpoint was chosen       sent_at       the request left for it
    outcome       served | refused | client_gone | interrupted | internal_error
    reason        the short cause when the outcome is not served
    retries       endpoints that failed this request, in order
    unsent        how many of the retries never saw the request: no connection, so no attempt counts
    retrying      it holds a turn of the fleet's retry budget
    body_bytes    of the body      holder  whose memory it still takes; None once that is given back
    asked         the question that its first pick answered; None until it was booked
    room          that hears how it ends: the one that let it in, if it listens or had to be asked; None otherwise
    tier          the smaller model that serves it in place of the one it asked for; "" for nearly all
    detail        the numbers behind a refusal, in words
    fingerprint   of its prompt; None where the policy does not read prefixes
    kept          what became of its promise, in kept.py's word; "" when it cannot be told
    ttft_s, tpot_s   as its client saw them; predicted_*  as expected when it was picked
    before        how the best two candidates stood at the pick, for a policy that can explain itself
    split         whether and how it was split; None for models that are not
    trace         its place in a trace; None for one that is not traced, as nearly all
    gaps          where the times between its pieces are counted; None unless it is looked at
    quota         of its tenant that it was taken from; None where the tenant has no limits
    side          of a canary that it is on; None where its pool has none
    hedge         the race with a second attempt; None for nearly all
    proxy_request_id  what a trusted proxy called it in x-request-id; "" without one
    ledger        of what its client was shown, for continuing it elsewhere; None for what could not be
    """

    __slots__ = (
        *("accepted_at", "admitted_at", "api", "asked", "before", "body_bytes", "booking", "call", "client"),
        *("detail", "fingerprint", "gaps", "hedge", "holder", "id", "kept", "ledger", "model", "outcome", "parsed_at"),
        "proxy_request_id",
        *("pick", "picked_at", "predicted_tpot_s", "predicted_ttft_s", "quota", "reason", "received_at", "relay"),
        *("retries", "retrying", "room", "sent", "sent_at", "side", "split", "status", "tenant", "tier", "tpot_s"),
        *("trace", "ttft_s", "unsent"),
    )

    def __init__(self, request_id: str, api: Api, client: str, accepted_at: float) -> None:
        self.id = request_id
        self.api = api
        self.client = client
        self.accepted_at = accepted_at
        self.proxy_request_id = ""
        self.received_at: float | None = None
        self.parsed_at: float | None = None
        self.admitted_at: float | None = None
        self.picked_at: float | None = None
        self.sent_at: float | None = None
        self.tenant = self.model = self.tier = self.detail = self.kept = ""
        self.call: Call | None = None
        self.sent: Sent | None = None
        self.pick: Pick | None = None
        self.booking: Booking | None = None
        self.relay: Relay | None = None
        self.retries: list[str] = []
        self.retrying = False
        self.body_bytes = self.status = self.unsent = 0
        self.holder: Gate | None = None
        self.outcome = "served"
        self.reason: str | None = None
        self.room: Room | None = None
        self.asked: Ask | None = None
        self.ttft_s: float | None = None
        self.tpot_s: float | None = None
        self.predicted_ttft_s: float | None = None
        self.predicted_tpot_s: float | None = None
        self.before: Before | None = None
        self.split: SplitRecord | None = None
        self.fingerprint: Fingerprint | None = None
        self.trace: Trace | None = None
        self.gaps: Histogram | None = None
        self.side: Side | None = None
        self.quota: Quota | None = None
        self.ledger: Ledger | None = None
        self.hedge: Race | None = None

    @property
    def attempts(self) -> int:
        """Failed attempts that count: endpoints that failed after the request was sent to them."""
        return len(self.retries) - self.unsent

    def booked(self, room: Room, ask: Ask, pick: Pick) -> None:
        """A place is taken for it. The room that let it in hears of the first one, if it listens."""
        if self.asked is None:
            self.asked = ask
            if room.listens:
                self.room = room
                room.booked(ask, pick)

    def hold(self, gate: Gate, body_bytes: int) -> None:
        """Take memory for a body of so many bytes, in place of what was taken before. Raises GatewayError."""
        self.body_bytes += gate.hold(body_bytes - self.body_bytes)
        self.holder = gate

    def let_go(self) -> None:
        """Its body takes no memory any more. May be told again."""
        holder, self.holder = self.holder, None
        if holder is not None:
            holder.release(self.body_bytes)

    def first_token(self) -> None:
        """The prompt is computed and nothing can be retried: give back its place in the backlog, and its bytes."""
        if self.booking is not None:
            self.booking.first_token()
        call, sent = self.call, self.sent
        if call is not None:
            call.release()
        if sent is not None and sent is not call:
            sent.release()
        self.let_go()

    def end_retry(self, gate: Gate) -> None:
        """Give back its turn of the retry budget, if it holds one."""
        if self.retrying:
            self.retrying = False
            gate.give_back_turn()

    def refused(self, error: GatewayError) -> None:
        self.status, self.outcome, self.reason, self.detail = error.status, "refused", error.reason, error.message

    def interrupted(self, reason: str) -> None:
        """The answer broke after its first byte; its status had gone out as 200."""
        self.status, self.outcome, self.reason = 200, "interrupted", reason

    def forget(self) -> None:
        """Let go of all that is heavy or a client's own; what is left tells how it went."""
        if self.ttft_s is None and self.call is not None:  # else it was let go of at the first token
            self.call.release()
        self.sent = self.booking = self.relay = self.room = self.fingerprint = self.ledger = self.hedge = None
        if self.asked is not None and self.asked.fingerprint is not None:  # of a long prompt it takes 128 KiB
            self.asked = msgspec.structs.replace(self.asked, fingerprint=None)

    def gone(self) -> None:
        """The client left. 499 is nginx's number for it; nobody receives it."""
        self.status, self.outcome, self.reason = 499, "client_gone", self.stage

    def broken(self) -> None:
        self.status, self.outcome, self.reason = 500, "internal_error", "internal_error"

    @property
    def committed(self) -> bool:
        """A byte of the answer has gone to the client: nothing can be retried any more."""
        return self.relay is not None and self.relay.committed

    @property
    def stage(self) -> str:
        """Where the request is now, in a word."""
        if self.relay is not None and self.relay.first_token_at is not None:
            return "decode"
        if self.sent_at is not None:
            return "prefill" if self.split is None or self.split.prefilled_at is None else "transfer"
        return "queue" if self.parsed_at is not None else "parse"
