"""The one mutable record of a request: what happened to it, when, and why. It belongs to the request's own task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policies.model import Pick

if TYPE_CHECKING:
    from gateway.answer import GatewayError
    from gateway.endpoints import Booking
    from gateway.gate import Gate
    from gateway.openai import Api, Call
    from gateway.relay import Relay


class Exchange(msgspec.Struct, eq=False):
    """Stamps are monotonic seconds; None means that the stage was not reached.

    accepted_at   the head was parsed          received_at   the body was complete
    parsed_at     the call was understood      admitted_at   a Permit was given (the rest was waiting)
    picked_at     an endpoint was chosen       sent_at       the request left for it
    outcome       served | refused | client_gone | interrupted | internal_error
    reason        the short cause when the outcome is not served
    retries       endpoints that failed this request, in order
    body_bytes    memory held for the body
    """

    id: str
    api: Api
    client: str
    accepted_at: float
    received_at: float | None = None
    parsed_at: float | None = None
    admitted_at: float | None = None
    picked_at: float | None = None
    sent_at: float | None = None
    tenant: str = ""
    model: str = ""
    call: Call | None = None
    sent: Call | None = None
    pick: Pick | None = None
    booking: Booking | None = None
    relay: Relay | None = None
    retries: list[str] = []
    body_bytes: int = 0
    status: int = 0
    outcome: str = "served"
    reason: str | None = None

    def hold(self, gate: Gate, body_bytes: int) -> None:
        """Take memory for a body of so many bytes, in place of what was taken before. Raises GatewayError."""
        self.body_bytes += gate.hold(body_bytes - self.body_bytes)

    def first_token(self) -> None:
        """The prompt is computed and nothing can be retried: give back its place in the backlog, and its bytes."""
        if self.booking is not None:
            self.booking.first_token()
        for call in (self.call, self.sent):
            if call is not None:
                call.release()

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
