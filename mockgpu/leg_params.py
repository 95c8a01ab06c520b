"""The legs of a split request: PrefillLeg sends KV, DecodeLeg receives it.

Plain values, the same for every dialect. Each dialect defines its wire format.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class AnswerTime(Enum):
    """When a prefill leg answers: when its KV is computed, or when it has been fetched."""

    WHEN_PREFILLED = auto()
    WHEN_TAKEN = auto()


class PrefillLeg(msgspec.Struct, frozen=True):
    """A prefill leg: its KV is offered under `name` for `hold_s` seconds.

    is_public   any group that knows the name may fetch it (push dialects); False: by ticket only
    if_ended    also offer it if the answer ended itself at the first token
    """

    name: str
    hold_s: float
    is_public: bool = False
    if_ended: bool = True
    answering: AnswerTime = AnswerTime.WHEN_PREFILLED


class AgentPeer(msgspec.Struct, frozen=True):
    """The prefill group's agent, by address."""

    address: str


class BootstrapPeer(msgspec.Struct, frozen=True):
    """The prefill group's agent, by its bootstrap server.

    `engine_id`: for Mooncake; None: SGLang.
    """

    bootstrap: str
    engine_id: str | None = None


class DecodeLeg(msgspec.Struct, frozen=True):
    """A decode leg: KV of this `name` is fetched from `peer`, waiting up to `wait_s` for it.

    first       tokens that the prefill group already made (TRT-LLM)
    renew       URL for renewing the lease while there is no room here
    cached      cached tokens to report instead of the transferred ones
    is_parked   the object was incomplete: the engine waits for ever for KV that never comes
    """

    name: str
    peer: AgentPeer | BootstrapPeer
    wait_s: float
    ticket: str | None = None
    renew: str = ""
    first: bytes = b""
    cached: int | None = None
    is_parked: bool = False


class OfferedKv(msgspec.Struct, frozen=True):
    """A prefill leg's KV as described to the other leg. `cached`: its tokens cached here before."""

    name: str
    ticket: str
    blocks: list[int]
    tokens: int
    cached: int
