"""What one half (leg) of a split request requires of a mock engine: to offer KV or to fetch it.

A prefill leg offers KV to another engine, and a decode leg fetches KV from one. These types are the
same for the protocols of all engines; each protocol has its own wire format.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class AnswerTime(Enum):
    """When a prefill request gets its response: after its KV is computed, or after it is
    fetched.
    """

    WHEN_PREFILLED = auto()
    WHEN_TAKEN = auto()


class PrefillLeg(msgspec.Struct, frozen=True):
    """The prefill half of a split request: after it, the engine offers its KV to a decode engine.

    The KV is offered as `name` for `hold_s` seconds.

    is_public  True: any engine that knows the name may fetch the KV, as in protocols where the
               prefill engine writes it (push). False: a ticket is required
    if_ended   whether to offer the KV even if the answer already ended at the first token
    answering  when the request gets its response
    """

    name: str
    hold_s: float
    is_public: bool = False
    if_ended: bool = True
    answering: AnswerTime = AnswerTime.WHEN_PREFILLED


class AgentPeer(msgspec.Struct, frozen=True):
    """Where to fetch KV: a prefill engine whose KV transfer agent has a known address."""

    address: str


class BootstrapPeer(msgspec.Struct, frozen=True):
    """Where to fetch KV: a prefill engine whose address must be asked at a bootstrap server.

    bootstrap  address of the bootstrap server
    engine_id  id of the engine in Mooncake's protocol; None: the server is SGLang's
    """

    bootstrap: str
    engine_id: str | None = None


class DecodeLeg(msgspec.Struct, frozen=True):
    """The decode half of a split request. It fetches the KV `name` from the engine `peer`.

    wait_s     seconds to wait for the KV
    ticket     permission to fetch the KV; None: the KV is public
    first      tokens that the prefill engine has already generated (TensorRT-LLM)
    renew      URL that extends the lease on the KV while the request is queued; "": none
    cached     number of cached tokens to report in the usage; None: all transferred tokens
    is_parked  whether the engine waits for KV forever, because the handoff object was incomplete
    tokens     number of prompt tokens whose KV is offered, from the first one; None: the whole
               prompt
    """

    name: str
    peer: AgentPeer | BootstrapPeer
    wait_s: float
    ticket: str | None = None
    renew: str = ""
    first: bytes = b""
    cached: int | None = None
    is_parked: bool = False
    tokens: int | None = None

    def loadable_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt this engine need not compute with the KV.

        It always computes the last one.
        """
        return prompt_tokens - 1 if self.tokens is None else min(self.tokens, prompt_tokens - 1)


class OfferedKv(msgspec.Struct, frozen=True):
    """The description of a prefill request's KV, which the decode engine needs to fetch it.

    name    name of the offer
    ticket  permission to fetch the KV
    blocks  numbers of the KV blocks
    tokens  number of tokens whose KV is offered
    cached  how many of these tokens were in the prefill engine's prefix cache
    """

    name: str
    ticket: str
    blocks: list[int]
    tokens: int
    cached: int
