"""What two agents say to each other besides bytes of KV: typed, length-limited msgpack. Anything else: ProtocolError.

On a link the one who dialled is the sink, the one who was dialled is the source, for the link's whole life. So every
message has one direction, and who says the other's lines is out. Not here: proof of identity (session.py).
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.ends import Reason
from kvtransfer.layout import KvLayout

VERSION = 5
MOST_BLOCKS = 1 << 20
MOST_MESSAGE_BYTES = 4 * MOST_BLOCKS + (96 << 10)
_MOST_NAME, _MOST_TICKET = 256, 1024

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=_MOST_NAME)]
Word = Annotated[str, msgspec.Meta(max_length=256)]
Detail = Annotated[str, msgspec.Meta(max_length=512)]
TicketText = Annotated[str, msgspec.Meta(max_length=_MOST_TICKET)]
Address = Annotated[str, msgspec.Meta(max_length=512)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Blocks = Annotated[bytes, msgspec.Meta(max_length=4 * MOST_BLOCKS)]
GrantBytes = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
MOST_TOKENS = (1 << 32) - 1
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class ProtocolError(Exception):
    """The peer said what nobody says here. The link it came from cannot be trusted any further."""


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who an agent is. `epoch` is new with every start; `family`: what else must be equal besides the layout (weights,
    quantisation); `host`: equal exactly on one machine; `addresses`: by transport, where else it can be dialled."""

    agent: Name
    epoch: Nonce
    layout: KvLayout
    family: Word = ""
    host: Word = ""
    addresses: Annotated[dict[Word, Address], msgspec.Meta(max_length=8)] = {}


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Sink, first of all: a link of its own. `budget_bytes`: how much the source may have under way on it, its lanes
    included. It is the same in every version: who is of another must hear just that."""

    version: Id
    nonce: Nonce
    card: Card
    budget_bytes: Bytes


class Lane(msgspec.Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """Sink, in place of Hello: a lane of the link whose Hello had the nonce `lane_of`."""

    version: Id
    nonce: Nonce
    card: Card
    lane_of: Nonce


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Source, in answer to Hello or Lane."""

    version: Id
    nonce: Nonce
    card: Card


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Sink: the Welcome is genuine, and by this message's seal so am I."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Both: alive. From the sink it renews every lease that is claimed over this link."""


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Sink: write `name` into these blocks of mine. `wait_s`: how long the invitation may wait for its offer;
    `slack_s`: how urgent, among others of its class. `window_bytes`: no window is larger, single runs apart."""

    transfer: Id
    name: Name
    blocks: Blocks
    tokens: Tokens
    skip_tokens: Tokens
    wait_s: Seconds
    slack_s: Seconds
    klass: Annotated[int, msgspec.Meta(ge=0, le=2)]
    window_bytes: Bytes
    ticket: TicketText | None = None
    grant: GrantBytes = b""


class Accept(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Source: here it comes. With both sides' blocks and layouts known, both compute the same plan. `layouts`: the
    fingerprint of the two that the source means."""

    transfer: Id
    blocks: Blocks
    group_layers: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    window_bytes: Bytes
    layouts: Word = ""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Either: this transfer is over and did not land. From the source it may also be the answer to an Invite."""

    transfer: Id
    reason: Reason
    detail: Detail = ""


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """Sink: every byte arrived and is verified; the lease has served."""

    transfer: Id
    n_bytes: Bytes


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """Sink: so many bytes of the transfer have been taken in; as many more may come."""

    transfer: Id
    n_bytes: Bytes


class Unwanted(msgspec.Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """Sink: I shall not ask for `name`, as I was about to. Who may have an offer may also do without it."""

    name: Name
    ticket: TicketText | None = None


Message = (
    Hello | Lane | Welcome | Ready | Beat | Invite | Accept | Stop | Landed | Credit | Unwanted
)

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """The message in `data`. ProtocolError for everything else."""
    if len(data) > MOST_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {len(data)} bytes is over the limit of {MOST_MESSAGE_BYTES}"
        )
    try:
        message = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as wrong:
        raise ProtocolError(f"this is no message: {wrong}") from wrong
    # Now, and not when they are read: that may be much later, and then on the engine's own thread.
    if isinstance(message, Invite | Accept) and len(message.blocks) % 4:
        raise ProtocolError(f"{len(message.blocks)} bytes are no list of blocks")
    return message


def check_words(name: str, ticket: str | None = None) -> None:
    """ValueError for what no message can carry: names come from outside, and a peer that hears such ends the link."""
    if not 1 <= len(name) <= _MOST_NAME or len(ticket or "") > _MOST_TICKET:
        raise ValueError(
            f"a name has 1 to {_MOST_NAME} characters, a ticket at most {_MOST_TICKET}"
        )
    (name + (ticket or "")).encode()  # a lone surrogate is no text


def check_seconds(what: str, seconds: float) -> None:
    """ValueError for a time that never ends: not a number compares with nothing, and would hold blocks for good."""
    if not 0.0 <= seconds < inf:
        raise ValueError(f"{what} lasts some seconds, not {seconds}")


def stop(transfer: int, reason: Reason, detail: str) -> Stop:
    """With as much of the detail as a message carries: an engine says what it likes, and is to be heard."""
    return Stop(transfer, reason, detail[:256].encode(errors="replace").decode())


def pack_blocks(blocks: Any) -> bytes:
    """Block numbers (anything numpy takes) as they travel: u32, little-endian."""
    return np.asarray(blocks, dtype="<u4").tobytes()


def unpack_blocks(data: bytes) -> NDArray[np.int64]:
    """The block numbers of a message."""
    return np.frombuffer(data, dtype="<u4").astype(np.int64)
