"""The lease of offered KV: the promise to keep its blocks until it is fetched or time is up.

    OFFERED -> CLAIMED -> MOVING -> LANDED -> RELEASED        the normal course
    EXPIRED     the deadline passed in any state before RELEASED
    REVOKED     given up: the client left, the transfer failed, or the engine died

The function `advance` applies a table of transitions. The owner of a lease passes events to it, and
acts on the resulting state. This module has no timers, blocks or messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from kvtransfer.protocol.outcomes import EndReason


class LeaseState(StrEnum):
    """The states of a lease on KV; RELEASED, EXPIRED and REVOKED are final."""

    OFFERED = "offered"
    CLAIMED = "claimed"
    MOVING = "moving"
    LANDED = "landed"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class LeaseEvent(StrEnum):
    """The events that change the state of a lease, the promise to keep offered KV for a decode
    engine.

    claim    the decode engine announces that it will fetch the KV
    start    the first bytes are sent
    land     all bytes have arrived and are verified
    release  the source frees the blocks
    renew    a heartbeat extends the deadline
    expire   the deadline has passed
    revoke   one side has cancelled the transfer
    """

    CLAIM = "claim"
    START = "start"
    LAND = "land"
    RELEASE = "release"
    RENEW = "renew"
    EXPIRE = "expire"
    REVOKE = "revoke"


_S, _E = LeaseState, LeaseEvent

TRANSITIONS: Mapping[tuple[LeaseState, LeaseEvent], LeaseState] = MappingProxyType(
    {
        (_S.OFFERED, _E.CLAIM): _S.CLAIMED,
        (_S.OFFERED, _E.RENEW): _S.OFFERED,
        (_S.OFFERED, _E.EXPIRE): _S.EXPIRED,
        (_S.OFFERED, _E.REVOKE): _S.REVOKED,
        (_S.CLAIMED, _E.START): _S.MOVING,
        (_S.CLAIMED, _E.RENEW): _S.CLAIMED,
        (_S.CLAIMED, _E.EXPIRE): _S.EXPIRED,
        (_S.CLAIMED, _E.REVOKE): _S.REVOKED,
        (_S.MOVING, _E.LAND): _S.LANDED,
        (_S.MOVING, _E.RENEW): _S.MOVING,
        (_S.MOVING, _E.EXPIRE): _S.EXPIRED,
        (_S.MOVING, _E.REVOKE): _S.REVOKED,
        (_S.LANDED, _E.RELEASE): _S.RELEASED,
        (_S.LANDED, _E.EXPIRE): _S.EXPIRED,
        (_S.LANDED, _E.REVOKE): _S.REVOKED,
    }
)

TERMINAL = frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED})

# After the bytes have landed, the deadline only guards against a lost acknowledgement, so a late
# release is still legal.
_TIMELESS = frozenset({LeaseEvent.EXPIRE, LeaseEvent.REVOKE, LeaseEvent.RELEASE})


class LeaseError(Exception):
    """Raised for an event that is not possible in the present state of a lease on KV.

    Also raised for an event after the deadline, and for an `expire` event before the deadline.
    """


class Lease(msgspec.Struct, frozen=True):
    """The lease on the KV of one request: its blocks are not reused while the lease is open.

    deadline    time at which the lease expires, in seconds on the owner's clock
    ended_from  the last state before the lease ended; None while it has not ended
    """

    id: str
    deadline: float
    state: LeaseState = LeaseState.OFFERED
    ended_from: LeaseState | None = None


def advance(lease: Lease, event: LeaseEvent, now: float, deadline: float | None = None) -> Lease:
    """Return a lease (promise to keep offered KV) in the state that follows from `event`.

    now       time of the event
    deadline  the new deadline, for the event RENEW

    Raises LeaseError if the event is not allowed in the lease's state. After the deadline most
    events are refused, even if no timer has fired yet. Otherwise a slow reader could read blocks
    that already have new content.
    """
    after = TRANSITIONS.get((lease.state, event))
    if after is None:
        raise LeaseError(
            f"the event {event} is not allowed for lease {lease.id} in the state {lease.state}"
        )
    if now >= lease.deadline and event not in _TIMELESS:
        raise LeaseError(
            f"the event {event} is not allowed for lease {lease.id}, which expired "
            f"{now - lease.deadline:.3f} s ago"
        )
    if event is LeaseEvent.EXPIRE and now < lease.deadline:
        raise LeaseError(
            f"lease {lease.id} cannot expire, because {lease.deadline - now:.3f} s are left"
        )
    if event is LeaseEvent.RENEW:
        if deadline is None or deadline < lease.deadline:
            raise LeaseError(
                f"lease {lease.id} can only be renewed to a later deadline than the present one"
            )
        return msgspec.structs.replace(lease, deadline=deadline)
    left = lease.state if after in TERMINAL else None
    return Lease(lease.id, lease.deadline, after, left)


def end_lease(lease: Lease, reason: EndReason, now: float) -> Lease:
    """Return a lease in its final state, which follows from the reason why the KV transfer ended.

    After LANDED it is RELEASED, or EXPIRED if the deadline had passed. After LEASE_EXPIRED it is
    EXPIRED, after any other reason REVOKED.
    """
    if reason is EndReason.LANDED:
        try:
            if lease.state is LeaseState.CLAIMED:
                lease = advance(lease, LeaseEvent.START, now)
            return advance(advance(lease, LeaseEvent.LAND, now), LeaseEvent.RELEASE, now)
        except LeaseError:
            return advance(lease, LeaseEvent.EXPIRE, now)
    return advance(
        lease, LeaseEvent.EXPIRE if reason is EndReason.LEASE_EXPIRED else LeaseEvent.REVOKE, now
    )
