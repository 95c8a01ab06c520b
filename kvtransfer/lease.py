"""Lease: the promise that prefilled KV stays until fetched or until time has run out. A table and its interpreter.

    OFFERED -> CLAIMED -> MOVING -> LANDED -> RELEASED        the good end
    EXPIRED     the deadline passed in any state before RELEASED
    REVOKED     somebody gave up: the client left, a transfer failed, a group died

Not here: timers, blocks, messages. Whoever owns a lease feeds it events and acts on the state that results.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec


class LeaseState(StrEnum):
    OFFERED = "offered"
    CLAIMED = "claimed"
    MOVING = "moving"
    LANDED = "landed"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class LeaseEvent(StrEnum):
    """claim: a decoder will fetch it; start: bytes flow; land: all arrived and verified; release: the source let go;
    renew: a heartbeat moved the deadline; expire: the deadline passed; revoke: somebody gave up."""

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

# Once bytes have landed the deadline only guards against a lost acknowledgement: releasing late is still releasing.
_TIMELESS = frozenset({LeaseEvent.EXPIRE, LeaseEvent.REVOKE, LeaseEvent.RELEASE})


class LeaseError(Exception):
    """The event is not legal now: wrong state, or too late, or an expiry too early."""


class Lease(msgspec.Struct, frozen=True):
    """One request's KV at its source. `deadline`: seconds on the owner's clock; `left`: the state it ended from."""

    id: str
    deadline: float
    state: LeaseState = LeaseState.OFFERED
    left: LeaseState | None = None


def advance(lease: Lease, event: LeaseEvent, now: float, deadline: float | None = None) -> Lease:
    """The lease after `event` at `now`; RENEW takes the new `deadline`. Raises LeaseError if illegal.

    Late is illegal: what comes after the deadline finds the lease expired even if no timer has said so yet. Otherwise
    a slow reader could take over blocks that already belong to somebody else.
    """
    after = TRANSITIONS.get((lease.state, event))
    if after is None:
        raise LeaseError(f"lease {lease.id} is {lease.state}: it cannot {event}")
    if now >= lease.deadline and event not in _TIMELESS:
        raise LeaseError(
            f"lease {lease.id} ran out {now - lease.deadline:.3f} s ago: it cannot {event}"
        )
    if event is LeaseEvent.EXPIRE and now < lease.deadline:
        raise LeaseError(
            f"lease {lease.id} has {lease.deadline - now:.3f} s left: it cannot expire"
        )
    if event is LeaseEvent.RENEW:
        if deadline is None or deadline < lease.deadline:
            raise LeaseError(f"lease {lease.id} can only be renewed to a later deadline")
        return msgspec.structs.replace(lease, deadline=deadline)
    left = lease.state if after in TERMINAL else None
    return Lease(lease.id, lease.deadline, after, left)
