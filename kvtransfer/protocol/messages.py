"""The messages between two agents: typed, length-limited msgpack.

The agent that dialled a link is the sink, the other one the source, for the link's whole life. So
every message has one direction. Not here: proof of identity (kvtransfer/protocol/session.py).
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.layout import KvLayout
from kvtransfer.protocol.outcomes import EndReason

VERSION = 6
MAX_BLOCKS = 1 << 20
MAX_MESSAGE_BYTES = 4 * MAX_BLOCKS + (96 << 10)
_MOST_NAME, _MOST_TICKET = 256, 1024

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=_MOST_NAME)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]
Detail = Annotated[str, msgspec.Meta(max_length=512)]
TicketText = Annotated[str, msgspec.Meta(max_length=_MOST_TICKET)]
Address = Annotated[str, msgspec.Meta(max_length=512)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Blocks = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_BLOCKS)]
GrantBytes = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
MAX_TOKENS = (1 << 32) - 1
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class ProtocolError(Exception):
    """The peer sent an invalid message. Its link must not be trusted any further."""


class AgentCard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The identity of an agent.

    epoch       random, drawn at every start
    family      what else must be equal, like the layout: weights, quantisation
    host        equal exactly on one machine
    addresses   by transport, where else the agent can be dialled
    rank        the only rank that this agent has; -1: all ranks of the layout
    group       the same at the agents of all ranks of one group, and at no other agent
    """

    agent: Name
    epoch: Nonce
    layout: KvLayout
    family: ShortText = ""
    host: ShortText = ""
    addresses: Annotated[dict[ShortText, Address], msgspec.Meta(max_length=8)] = {}
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 17)] = -1
    group: ShortText = ""

    @property
    def only_rank(self) -> int | None:
        """The rank that this agent has by itself; None: it has all."""
        return None if self.rank < 0 else self.rank


class LinkHello(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Sink: the first message of a link.

    `budget_bytes` is how much the source may have in flight on the link and its lanes. The format
    is the same in every version, so that another version can be detected and reported.
    """

    version: Id
    nonce: Nonce
    card: AgentCard
    budget_bytes: Bytes


class Lane(msgspec.Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """Sink: in place of Hello, for a lane of the link whose Hello had the nonce `lane_of`."""

    version: Id
    nonce: Nonce
    card: AgentCard
    lane_of: Nonce


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Source: the answer to Hello or Lane."""

    version: Id
    nonce: Nonce
    card: AgentCard


class LinkReady(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Sink: the Welcome is genuine. This message's seal proves the sink's identity."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Both: a heartbeat. From the sink it renews every lease that is claimed over the link."""


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Sink: write the offer `name` into these blocks.

    wait_s         how long the invitation may wait for its offer
    slack_s        urgency among transfers of the same priority: time to the deadline
    window_bytes   the largest window, except for a single longer run
    """

    transfer: Id
    name: Name
    blocks: Blocks
    tokens: Tokens
    skip_tokens: Tokens
    wait_s: Seconds
    slack_s: Seconds
    priority: Annotated[int, msgspec.Meta(ge=0, le=2)]
    window_bytes: Bytes
    ticket: TicketText | None = None
    grant: GrantBytes = b""


class Accept(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Source: the transfer begins. Both ends can now compute the same plan.

    `layouts` is the fingerprint of the two layouts that the source plans with.
    """

    transfer: Id
    blocks: Blocks
    group_layers: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    window_bytes: Bytes
    layouts: ShortText = ""


class StopTransfer(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Either: the transfer is over and has not landed. Also the source's refusal of an Invite."""

    transfer: Id
    reason: EndReason
    detail: Detail = ""


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """Sink: every byte has arrived and is verified. The lease can end."""

    transfer: Id
    n_bytes: Bytes


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """Sink: this many bytes of the transfer have been received, and as many more may be sent."""

    transfer: Id
    n_bytes: Bytes


class Unwanted(msgspec.Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """Sink: it will not invite for `name`. Valid only from a sink that may fetch the offer."""

    name: Name
    ticket: TicketText | None = None


Message = (
    LinkHello
    | Lane
    | Welcome
    | LinkReady
    | Beat
    | Invite
    | Accept
    | StopTransfer
    | Landed
    | Credit
    | Unwanted
)

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the message as msgpack bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Decode a message. Raises ProtocolError for anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}"
        )
    try:
        message = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"invalid message: {error}") from error
    # Checked here because the blocks are read much later, possibly on the engine's own thread.
    if isinstance(message, Invite | Accept) and len(message.blocks) % 4:
        raise ProtocolError(f"{len(message.blocks)} bytes are not a list of blocks")
    return message


def check_texts(name: str, ticket: str | None = None) -> None:
    """Raise ValueError for a name or ticket that no message can carry.

    Names come from outside, and a peer closes the link on an invalid message.
    """
    if not 1 <= len(name) <= _MOST_NAME or len(ticket or "") > _MOST_TICKET:
        raise ValueError(
            f"a name has 1 to {_MOST_NAME} characters, a ticket at most {_MOST_TICKET}"
        )
    (
        name + (ticket or "")
        # A lone surrogate raises UnicodeEncodeError, which is a ValueError.
    ).encode()


def check_seconds(what: str, seconds: float) -> None:
    """Raise ValueError for a negative or unbounded time.

    NaN and infinity would hold blocks for ever.
    """
    if not 0.0 <= seconds < inf:
        raise ValueError(f"{what} needs a finite time in seconds, not {seconds}")


def make_stop(transfer: int, reason: EndReason, detail: str) -> StopTransfer:
    """Build a Stop, with the detail truncated to what a message can carry."""
    return StopTransfer(transfer, reason, detail[:256].encode(errors="replace").decode())


def pack_blocks(blocks: Any) -> bytes:
    """Encode block numbers, in any form that numpy accepts, as little-endian u32."""
    return np.asarray(blocks, dtype="<u4").tobytes()


def unpack_blocks(data: bytes) -> NDArray[np.int64]:
    """Decode the block numbers of a message."""
    return np.frombuffer(data, dtype="<u4").astype(np.int64)
