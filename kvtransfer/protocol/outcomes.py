"""How an offer or a landing ended: once, with one reason from a closed list.

Both sides and the metrics use the same words. Not here: deciding the end (kvtransfer/transfer/source.py, kvtransfer/transfer/sink.py).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class How(StrEnum):
    """The kind of an outcome. Only after LANDED may the KV be decoded."""

    LANDED = "landed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Reason(StrEnum):
    """Why a transfer ended. A closed list, so that it can be a metric label."""

    LANDED = "landed"
    CANCELLED = "cancelled"  # the sink's engine gave up
    REVOKED = "revoked"  # the source's engine revoked the offer
    CLOSED = "agent_closed"
    LEASE_EXPIRED = "lease_expired"
    TIMEOUT = "timeout"  # the sink's own deadline
    LINK_LOST = "link_lost"
    SILENT = "peer_silent"
    UNREACHABLE = "unreachable"
    WRONG_KEY = "wrong_key"
    VERSION = "version_mismatch"
    LAYOUT = "layout_mismatch"
    BAD_TICKET = "bad_ticket"
    TICKET_EXPIRED = "ticket_expired"
    TICKET_SPENT = "ticket_spent"
    GONE = "offer_gone"
    NAME_TAKEN = "name_taken"
    NEVER_OFFERED = "never_offered"
    TOKENS = "tokens_mismatch"  # the sink asks for more than is offered
    DECLINED = "declined"  # the source's engine will make no such offer
    TOO_MANY_WAITING = "too_many_waiting"
    STALE = "stale"
    CORRUPT = "corrupt"
    PROTOCOL = "protocol_error"


# Reasons after which a new prefill may succeed, by this pair or another. The others would recur.
RETRIABLE = frozenset(Reason) - {
    Reason.LANDED,
    Reason.CANCELLED,
    Reason.WRONG_KEY,
    Reason.VERSION,
    Reason.LAYOUT,
    Reason.BAD_TICKET,
    Reason.TICKET_SPENT,
    Reason.NAME_TAKEN,
    Reason.TOKENS,
    Reason.PROTOCOL,
}

_HOW = {
    Reason.LANDED: How.LANDED,
    Reason.CANCELLED: How.CANCELLED,
    Reason.REVOKED: How.CANCELLED,
    Reason.CLOSED: How.CANCELLED,
    Reason.LEASE_EXPIRED: How.EXPIRED,
    Reason.TIMEOUT: How.EXPIRED,
}


class End(msgspec.Struct, frozen=True):
    """The outcome of an offer or a landing.

    n_bytes     bytes moved
    seconds     time since the offer or the landing began
    transport   "": none was chosen yet
    """

    how: How
    reason: Reason
    retriable: bool
    n_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""
    detail: str = ""

    @property
    def landed(self) -> bool:
        return self.how is How.LANDED


def end(
    reason: Reason, *, n_bytes: int = 0, seconds: float = 0.0, transport: str = "", detail: str = ""
) -> End:
    """Build the outcome that `reason` implies."""
    return End(
        _HOW.get(reason, How.FAILED),
        reason,
        reason in RETRIABLE,
        n_bytes,
        seconds,
        transport,
        detail,
    )
