"""The two halves of a split request (legs): PrefillLeg sends KV, DecodeLeg receives it.

A leg is the request that one of the two engines gets. These values are the same for all engines'
handoff protocols; each protocol (dialect) defines its wire format.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class AnswerTime(Enum):
    """When a prefill request is answered: once its KV is computed, or once it has been fetched."""

    WHEN_PREFILLED = auto()
    WHEN_TAKEN = auto()


class PrefillLeg(msgspec.Struct, frozen=True):
    """The prefill half of a split request: its KV is offered as `name` for `hold_s` seconds.

    is_public  True: any engine that knows the name may fetch the KV, as in protocols where the
               prefill engine writes it (push); False: a ticket is required
    if_ended   whether to offer the KV even if the answer already ended at the first token
    answering  when the request is answered
    """

    name: str
    hold_s: float
    is_public: bool = False
    if_ended: bool = True
    answering: AnswerTime = AnswerTime.WHEN_PREFILLED


class AgentPeer(msgspec.Struct, frozen=True):
    """A prefill engine's KV transfer agent, identified by its address."""

    address: str


class BootstrapPeer(msgspec.Struct, frozen=True):
    """A prefill engine whose KV agent's address is looked up at its bootstrap server.

    bootstrap  address of the bootstrap server
    engine_id  id of the engine for Mooncake; None: the server is SGLang's
    """

    bootstrap: str
    engine_id: str | None = None


class DecodeLeg(msgspec.Struct, frozen=True):
    """The decode half of a split request: it fetches the KV `name` from `peer` within `wait_s`
    seconds.

    ticket     permission to fetch the KV; None if it is public
    first      tokens that the prefill engine already generated (TensorRT-LLM)
    renew      URL that extends the lease on the KV while the request is queued; "": none
    cached     number of cached tokens to report in the usage; None: all transferred tokens
    is_parked  True: the handoff object was incomplete, so that the engine waits for KV for ever
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
    """The description of a prefill request's KV for the decode engine.

    name    name of the offer
    ticket  permission to fetch it
    blocks  numbers of the blocks
    tokens  number of tokens whose KV is offered
    cached  number of these tokens that were in the prefill engine's prefix cache
    """

    name: str
    ticket: str
    blocks: list[int]
    tokens: int
    cached: int
