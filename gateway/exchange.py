"""The one mutable record of a request: what happened to it, when, and why. It belongs to the request's own task."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from policies.model import Pick

if TYPE_CHECKING:
    from gateway.answer import GatewayError
    from gateway.endpoints import Booking
    from gateway.gate import Gate
    from gateway.openai import Api, Call
    from gateway.relay import Relay


class Exchange:
    """Stamps are monotonic seconds; None means that the stage was not reached.

    accepted_at   the head was parsed          received_at   the body was complete
    parsed_at     the call was understood      admitted_at   a Permit was given (the rest was waiting)
    picked_at     an endpoint was booked       sent_at       the request left for it
    outcome       served | refused | client_gone | interrupted | internal_error
    reason        the short cause when the outcome is not served
    retries       endpoints that failed this request, in order
    """

    __slots__ = (
        "accepted_at",
        "admitted_at",
        "api",
        "body_bytes",
        "booking",
        "call",
        "client",
        "id",
        "model",
        "outcome",
        "parsed_at",
        "pick",
        "picked_at",
        "reason",
        "received_at",
        "relay",
        "retries",
        "sent_at",
        "status",
        "tenant",
    )

    def __init__(self, exchange_id: str, api: Api, client: str) -> None:
        self.id = exchange_id
        self.api = api
        self.client = client
        self.tenant = ""
        self.model = ""
        self.accepted_at = monotonic()
        self.received_at: float | None = None
        self.parsed_at: float | None = None
        self.admitted_at: float | None = None
        self.picked_at: float | None = None
        self.sent_at: float | None = None
        self.call: Call | None = None
        self.booking: Booking | None = None
        self.pick: Pick | None = None
        self.relay: Relay | None = None
        self.retries: list[str] = []
        self.body_bytes = 0
        self.status = 0
        self.outcome = "served"
        self.reason: str | None = None

    def hold(self, gate: Gate, declared_bytes: int) -> None:
        """Take memory for the body before it is read, as far as its length is known."""
        gate.hold(declared_bytes)
        self.body_bytes = declared_bytes

    def received(self, gate: Gate, body_bytes: int) -> None:
        self.received_at = monotonic()
        if body_bytes != self.body_bytes:
            gate.hold(body_bytes - self.body_bytes)
            self.body_bytes = body_bytes

    def parsed(self, call: Call, model: str) -> None:
        self.call = call
        self.model = model
        self.parsed_at = monotonic()

    def admitted(self) -> None:
        self.admitted_at = monotonic()

    def picked(self, pick: Pick) -> None:
        self.pick = pick
        self.picked_at = monotonic()

    def sent(self, booking: Booking, relay: Relay) -> None:
        self.booking, self.relay = booking, relay
        self.sent_at = monotonic()

    def first_token(self) -> None:
        """The prompt is computed and nothing can be retried: give back its place in the backlog, and its bytes."""
        if self.booking is not None:
            self.booking.first_token()
        if self.call is not None:
            self.call.release()

    def served(self, status: int) -> None:
        self.status = status
        if status >= 400:
            self.outcome, self.reason = "refused", "engine"

    def refused(self, error: GatewayError) -> None:
        self.status, self.outcome, self.reason = error.status, "refused", error.reason

    def interrupted(self, reason: str) -> None:
        """The answer broke after its first byte; its status had gone out as 200."""
        self.status, self.outcome, self.reason = 200, "interrupted", reason

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
            return "prefill"
        return "queue" if self.parsed_at is not None else "parse"
