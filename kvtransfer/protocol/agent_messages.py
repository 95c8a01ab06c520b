"""The messages between two agents, as typed msgpack of limited length.

The agent that opened a connection is the sink (receiver of KV), the other one is the source. This
does not change, so each message is sent in one direction only. session_authentication.py proves
identities.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.kv_layout import KvLayout
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
    """Raised for an invalid message of another agent. The connection must then be closed."""


class AgentCard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The identity of an agent (its card), as sent to other agents.

    agent      name of the agent
    epoch      16 random bytes, drawn at every start
    layout     layout of its engine's KV cache
    family     text that must be equal at both agents: weights, quantisation
    host       identifier that is equal exactly for agents on the same machine
    addresses  further addresses of the agent, by transport
    rank       the only rank that this agent serves; -1: all ranks of the layout
    group      identifier that the agents of all ranks of one engine share, and no other agent has
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
        """Return the only rank that this agent serves; None if it serves all ranks."""
        return None if self.rank < 0 else self.rank


class LinkHello(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """The first message on a connection between two agents, from the sink (receiver of KV).

    budget_bytes  bytes that the source may have in flight on the connection, with its parallel
                  connections (lanes)

    The format never changes, so that agents can detect another protocol version and report it.
    """

    version: Id
    nonce: Nonce
    card: AgentCard
    budget_bytes: Bytes


class Lane(msgspec.Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """The sink's first message on an additional parallel connection (lane).

    lane_of  the nonce in the LinkHello of the connection to which the lane is added
    """

    version: Id
    nonce: Nonce
    card: AgentCard
    lane_of: Nonce


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The source's answer to the sink's first message on a connection, LinkHello or Lane."""

    version: Id
    nonce: Nonce
    card: AgentCard


class LinkReady(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """The sink's last message of a handshake. Its signature proves the sink's identity."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """A heartbeat, which both agents send regularly.

    If it comes from the sink, it renews the leases of all offers that the sink is fetching over
    this connection.
    """


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """The sink's invitation to the source to write the KV of the offer `name` into its blocks.

    skip_tokens   number of tokens at the start that are not needed
    wait_s        seconds that the invitation may wait for the offer to be made
    slack_s       seconds to the deadline, which order transfers of the same priority
    window_bytes  maximum bytes sent at once, except for a single longer byte range
    ticket        permission to fetch the offer; None: it is fetched by its name
    grant         data that let the source write into the blocks (rdma: memory keys)
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
    """The source's message that a KV transfer begins. Both agents can now compute its plan.

    layouts  identifier of the two layouts with which the source computes the plan
    """

    transfer: Id
    blocks: Blocks
    group_layers: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    window_bytes: Bytes
    layouts: ShortText = ""


class StopTransfer(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """A message of either agent that a KV transfer failed, or that an invitation is refused."""

    transfer: Id
    reason: EndReason
    detail: Detail = ""


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """The sink's message that all bytes of a transfer have arrived and are verified.

    The source then ends its lease.
    """

    transfer: Id
    n_bytes: Bytes


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """The sink's message that it has received `n_bytes` bytes of KV. As many more may be sent."""

    transfer: Id
    n_bytes: Bytes


class Unwanted(msgspec.Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """The sink's message that it will not fetch the offer `name`.

    It is ignored from an agent that may not fetch the offer.
    """

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
    return _ENCODER.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Decode a message of another agent. Raises ProtocolError if it is invalid."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}"
        )
    try:
        message = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a received message is invalid: {error}") from error
    # Check the length now: the blocks are read much later, possibly on the engine's own thread.
    if isinstance(message, Invite | Accept) and len(message.blocks) % 4:
        raise ProtocolError(
            f"a received list of blocks has {len(message.blocks)} bytes, which is not a multiple "
            "of 4 (one block number)"
        )
    return message


def check_texts(name: str, ticket: str | None = None) -> None:
    """Raise ValueError if a name or a ticket is too long for a message.

    Both come from outside this package. An agent that receives an invalid message closes the
    connection.
    """
    if not 1 <= len(name) <= _MOST_NAME or len(ticket or "") > _MOST_TICKET:
        raise ValueError(
            f"the name of an offer must have 1 to {_MOST_NAME} characters, and a ticket at most "
            f"{_MOST_TICKET}"
        )
    (
        name + (ticket or "")
        # A lone surrogate raises UnicodeEncodeError, which is a ValueError.
    ).encode()


def check_seconds(what: str, seconds: float) -> None:
    """Raise ValueError if a time is negative, infinite or NaN, because its blocks would stay in
    use.

    what  name of the time in the error message
    """
    if not 0.0 <= seconds < inf:
        raise ValueError(
            f"the time limit of {what} must be a finite number of seconds, not {seconds}"
        )


def make_stop(transfer: int, reason: EndReason, detail: str) -> StopTransfer:
    """Return the message that a transfer has ended for `reason`.

    `detail` is truncated to 256 characters, the most that the message can carry.
    """
    return StopTransfer(transfer, reason, detail[:256].encode(errors="replace").decode())


def pack_blocks(blocks: Any) -> bytes:
    """Encode block numbers, in any form that numpy accepts, as little-endian u32."""
    return np.asarray(blocks, dtype="<u4").tobytes()


def unpack_blocks(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, dtype="<u4").astype(np.int64)
