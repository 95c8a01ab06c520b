"""End: how an offer or a landing ended, once, with one named reason. The same words on both sides and in the metrics.

Not here: who decides on an end (source.py, sink.py).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class How(StrEnum):
    """LANDED is the only end after which anything may be decoded."""

    LANDED = "landed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Reason(StrEnum):
    """Why. A closed list, so that it can be a label."""

    LANDED = "landed"
    CANCELLED = "cancelled"  # the sink's engine gave up
    REVOKED = "revoked"  # the source's engine took its blocks back
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
    TOKENS = "tokens_mismatch"  # the sink wants more than was offered
    DECLINED = "declined"  # the source's engine said that no such offer will come
    TOO_MANY_WAITING = "too_many_waiting"
    STALE = "stale"
    CORRUPT = "corrupt"
    PROTOCOL = "protocol_error"


# What could go well if prefilled again, by this pair or another. The rest would only fail again.
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
    """`n_bytes` that moved, `seconds` since the offer or the landing began, `transport`: "" if none was chosen."""

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
    """The End that `reason` means."""
    return End(
        _HOW.get(reason, How.FAILED),
        reason,
        reason in RETRIABLE,
        n_bytes,
        seconds,
        transport,
        detail,
    )
