"""How an offer or a fetch of KV can end, and the closed list of reasons.

Both agents and the metrics use these names. source.py and sink.py decide the reason.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class OutcomeKind(StrEnum):
    """The ways in which a KV transfer can end. Only after LANDED may the KV be used."""

    LANDED = "landed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class EndReason(StrEnum):
    """The reasons why a KV transfer can end. Metrics count by reason, so there are no others."""

    LANDED = "landed"
    CANCELLED = "cancelled"  # the sink's engine gave up
    REVOKED = "revoked"  # the source's engine revoked the offer
    CLOSED = "agent_closed"
    LEASE_EXPIRED = "lease_expired"
    TIMEOUT = "timeout"  # the deadline of the sink has passed
    LINK_LOST = "link_lost"
    SILENT = "peer_silent"
    UNREACHABLE = "unreachable"
    WRONG_KEY = "wrong_key"
    VERSION = "version_mismatch"
    LAYOUT = "layout_mismatch"
    BAD_TICKET = "bad_ticket"
    TICKET_EXPIRED = "ticket_expired"
    TICKET_SPENT = "ticket_spent"
    TOO_MANY_SPENT = "too_many_spent"  # the source remembers no more used tickets for now
    GONE = "offer_gone"
    NAME_TAKEN = "name_taken"
    NEVER_OFFERED = "never_offered"
    TOKENS = "tokens_mismatch"  # the sink asks for more than is offered
    DECLINED = "declined"  # the source's engine will make no such offer
    TOO_MANY_WAITING = "too_many_waiting"
    STALE = "stale"
    CORRUPT = "corrupt"
    PROTOCOL = "protocol_error"
    RANK_LOST = "rank_lost"  # the agent of another rank of the source's engine was lost


# Reasons after which a new prefill may succeed, with the same pair of engines or another one. All
# other reasons would recur.
RETRIABLE = frozenset(EndReason) - {
    EndReason.LANDED,
    EndReason.CANCELLED,
    EndReason.WRONG_KEY,
    EndReason.VERSION,
    EndReason.LAYOUT,
    EndReason.BAD_TICKET,
    EndReason.TICKET_SPENT,
    EndReason.NAME_TAKEN,
    EndReason.TOKENS,
    EndReason.PROTOCOL,
}

_HOW = {
    EndReason.LANDED: OutcomeKind.LANDED,
    EndReason.CANCELLED: OutcomeKind.CANCELLED,
    EndReason.REVOKED: OutcomeKind.CANCELLED,
    EndReason.CLOSED: OutcomeKind.CANCELLED,
    EndReason.LEASE_EXPIRED: OutcomeKind.EXPIRED,
    EndReason.TIMEOUT: OutcomeKind.EXPIRED,
}


class TransferOutcome(msgspec.Struct, frozen=True):
    """The outcome of an offer or a fetch of KV.

    is_retriable  whether another attempt may succeed
    n_bytes       number of bytes that were transferred
    seconds       seconds from the beginning of the offer or fetch to its end
    transport     name of the transport; "" if none was chosen yet
    detail        explanation for logs
    """

    kind: OutcomeKind
    reason: EndReason
    is_retriable: bool
    n_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""
    detail: str = ""

    @property
    def has_landed(self) -> bool:
        return self.kind is OutcomeKind.LANDED


def outcome_for(
    reason: EndReason,
    *,
    n_bytes: int = 0,
    seconds: float = 0.0,
    transport: str = "",
    detail: str = "",
) -> TransferOutcome:
    return TransferOutcome(
        _HOW.get(reason, OutcomeKind.FAILED),
        reason,
        reason in RETRIABLE,
        n_bytes,
        seconds,
        transport,
        detail,
    )
