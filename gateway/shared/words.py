"""What gateways say to each other: messages and their encoding (msgpack arrays, tagged). No code objects, no surprises.

Endpoints, pools and tenants are named by keyed digests (seal.py). All numbers are bounded where they are decoded.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from policies.foreign import Share
from policies.quota import Spent
from policies.sessions import Member

Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
Named = Annotated[int, msgspec.Meta(ge=0)]
Word = Annotated[str, msgspec.Meta(max_length=64)]


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt sent to an endpoint: it will hold all of it, or `kept` tokens at most when that is given.

    blocks, n_bytes  of its fingerprint; keys  those that an index reads (policies/rungs.py)
    """

    endpoint: Named
    blocks: Amount
    n_bytes: Amount
    prompt_tokens: Amount
    keys: bytes
    kept: Amount | None = None


class Picks(msgspec.Struct, frozen=True, array_like=True, tag="picks"):
    """Prompts in the order in which they were sent, all cut into blocks of the same size."""

    block_bytes: Amount
    prompts: list[Prompt]


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """An endpoint lost all that it held. In snapshots only: to another gateway's face it would be a verdict."""

    endpoint: Named


class Confirmed(msgspec.Struct, frozen=True, array_like=True, tag="confirmed"):
    """What answers told of their prompts' cached share: (endpoint, believed, found)."""

    answers: list[tuple[Named, Ratio, Ratio]]


class Loads(msgspec.Struct, frozen=True, array_like=True, tag="loads"):
    """All that the sender has booked, by endpoint; where it is silent, nothing. `warm`: it could tell a newcomer."""

    uptime_s: Seconds
    warm: bool
    shares: list[tuple[Named, Share]]


class Moved(msgspec.Struct, frozen=True, array_like=True, tag="moved"):
    """The sender's opinion of an endpoint's health has changed: (endpoint, state, cause)."""

    endpoints: list[tuple[Named, Word, Word]]


class Charged(msgspec.Struct, frozen=True, array_like=True, tag="charged"):
    """Tokens of work that tenants got since the last word: (pool, tenant, tokens)."""

    tenants: list[tuple[Named, Named, Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]]]


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """What tenants took from their quotas since the last word: (tenant, what)."""

    tenants: list[tuple[Named, Spent]]


class Inside(msgspec.Struct, frozen=True, array_like=True, tag="inside"):
    """Sessions of a pool that were served since the last word."""

    pool: Named
    members: list[Member]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A gateway has come, or come back. `attempt` counts from 0: so many who should have answered did not."""

    attempt: Annotated[int, msgspec.Meta(ge=0, le=16)]


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """A gateway goes, and has nothing booked any more."""


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """A part of a snapshot, for one who said hello: messages to take as if they had just been said, oldest first."""

    number: Amount
    last: bool
    said: list[bytes]


Message = Picks | Forgotten | Confirmed | Loads | Moved | Charged | Taken | Inside | Hello | Bye | Part

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes | memoryview) -> Message:
    """Raises msgspec.DecodeError (ValidationError is one) for whatever is not a message."""
    message: Message = _decoder.decode(body)
    return message


def kind(message: Message) -> str:
    """How metrics call it."""
    return str(message.__struct_config__.tag)
