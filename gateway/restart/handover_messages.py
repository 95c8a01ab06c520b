"""The messages between a process and its successor: learned state, remaining work, readiness, stop.

handover_channel.py sends them. learned_state.py converts the gateway's state to and from them.
"""

from __future__ import annotations

import msgspec

from policies.engine.peer_load import PeerShare
from policies.health.endpoint_health import Health
from policies.restart_state import (
    AdmissionState,
    BeliefState,
    Blocks,
    DriftState,
    HolderState,
    LengthState,
    QuotaState,
    SessionTurns,
)

EndpointKey = tuple[str, str]
"""A key that identifies an endpoint in both processes: its pool and URL. Slot numbers differ
between processes."""


class StateRequest(msgspec.Struct, frozen=True, array_like=True, tag="state_wanted"):
    """The message by which a successor requests or declines the learned state.

    The successor sends it after it has polled its engines.
    """

    wants_state: bool


class EndpointState(msgspec.Struct, frozen=True, array_like=True, tag="endpoint"):
    """The learned state of one endpoint: health, drain state, latency model, prefix statistics."""

    key: EndpointKey
    slot: int
    health: Health
    is_drained: bool
    slow_start_at: float | None
    belief: BeliefState
    holder: HolderState | None


class SlotMap(msgspec.Struct, frozen=True, array_like=True, tag="slots"):
    """A message to the successor process: which endpoint each slot number stands for.

    The blocks of the prefix index, which follow, refer to endpoints by these numbers.
    """

    places: list[tuple[int, EndpointKey]]


class PoolState(msgspec.Struct, frozen=True, array_like=True, tag="pool"):
    """What a pool's admission control has learned, for the next gateway process."""

    pool: str
    admission: AdmissionState


class TenantState(msgspec.Struct, frozen=True, array_like=True, tag="tenant"):
    """A message to the successor process: how much of its quota one tenant has used."""

    tenant: str
    quota: QuotaState


class OutputLengthState(msgspec.Struct, frozen=True, array_like=True, tag="lengths"):
    """A message to the successor process: the output lengths observed so far.

    Each row is for one kind of request.
    """

    rows: list[LengthState]


class StateEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The end marker of the learned state: the successor has received all messages about it."""


class SuccessorReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The message by which a successor reports that it accepts client connections."""


class RemainingWork(msgspec.Struct, frozen=True, array_like=True, tag="booked"):
    """A message to the successor process: the work that the old process still has at each endpoint.

    The successor adds it to the endpoints' loads. Endpoints without work are left out.
    """

    shares: list[tuple[EndpointKey, PeerShare]]


class StopRequest(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The message by which the successor reports that it is being stopped.

    The old process then stops too: it ends its requests within timeouts.shutdown seconds.
    """


LearnedState = (
    SlotMap
    | Blocks
    | EndpointState
    | PoolState
    | TenantState
    | OutputLengthState
    | DriftState
    | SessionTurns
)
Message = StateRequest | LearnedState | StateEnd | SuccessorReady | RemainingWork | StopRequest
