"""What a request asks of an engine when it is one leg of two: Give its KV away, or Take it from another group.

Plain values, the same for every dialect; how they are said on the wire is each dialect's.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class Answering(Enum):
    """When a prefill leg answers: as soon as its KV is there, or when it has been taken."""

    WHEN_PREFILLED = auto()
    WHEN_TAKEN = auto()


class Give(msgspec.Struct, frozen=True):
    """A prefill leg: its KV is offered under `name` for `hold_s` seconds.

    `public`: whoever knows the name may take it (push dialects: both sides know it beforehand); else by ticket only.
    `if_ended`: whether it is offered as well when the answer ended by itself at the first token.
    """

    name: str
    hold_s: float
    public: bool = False
    if_ended: bool = True
    answering: Answering = Answering.WHEN_PREFILLED


class At(msgspec.Struct, frozen=True):
    """The giving group's agent, by its address."""

    address: str


class Asked(msgspec.Struct, frozen=True):
    """The giving group's agent, to be asked of its bootstrap server. `engine_id`: Mooncake's; None is SGLang's way."""

    bootstrap: str
    engine_id: str | None = None


class Take(msgspec.Struct, frozen=True):
    """A decode leg: KV of this `name` is fetched from `peer`, and waited for `wait_s` seconds if it is not there yet.

    `first`: tokens that the giver made already (TRT-LLM). `renew`: where the lease is renewed while there is no room
    here. `cached`: what to report as cached tokens in place of what came over the wire. `parked`: the object was not
    whole, and the engine waits for ever for KV that nobody will send.
    """

    name: str
    peer: At | Asked
    wait_s: float
    ticket: str | None = None
    renew: str = ""
    first: bytes = b""
    cached: int | None = None
    parked: bool = False


class Offered(msgspec.Struct, frozen=True):
    """A prefill leg's KV as it can be told to the other leg. `cached`: tokens this engine had cached of it."""

    name: str
    ticket: str
    blocks: list[int]
    tokens: int
    cached: int
