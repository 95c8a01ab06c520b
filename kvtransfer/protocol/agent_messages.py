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
    """What an agent tells other agents about itself at the beginning of a connection.

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
    """The first message on a connection between two agents, sent by the one that opened it.

    That agent is the sink, the receiver of KV.

    budget_bytes  bytes that the other agent may have in flight on the connection, with its parallel
                  connections (lanes)

    The format never changes, so that agents can detect another protocol version and report it.
    """

    version: Id
    nonce: Nonce
    card: AgentCard
    budget_bytes: Bytes


class Lane(msgspec.Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """The first message on a connection that carries KV in parallel with an existing one (a lane).

    lane_of  the nonce in the LinkHello of the existing connection
    """

    version: Id
    nonce: Nonce
    card: AgentCard
    lane_of: Nonce


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The answer to the first message on a connection, from the agent that accepted it."""

    version: Id
    nonce: Nonce
    card: AgentCard


class LinkReady(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """The last message of a handshake, from the agent that opened the connection (the sink).

    Its signature proves that agent's identity.
    """


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """A heartbeat, which both agents send regularly.

    If it comes from the sink, it renews the leases of all offers that the sink is fetching over
    this connection.
    """


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """The message with which an agent asks another one to send KV, and to write it to these blocks.

    The agent that sends it is the sink, which receives the KV. The other one is the source, which
    offers or will offer KV under the name `name`.

    skip_tokens   number of tokens at the start that are not needed
    wait_s        seconds that the invitation may wait for the offer to be made
    slack_s       seconds to the deadline; transfers of the same priority are sent in this order
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
    """The message with which an agent agrees to send KV, in answer to Invite.

    Both agents can now compute which bytes are copied where.

    layouts  fingerprint of the sending and the receiving engine's layouts, as the source knows them
    """

    transfer: Id
    blocks: Blocks
    group_layers: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    window_bytes: Bytes
    layouts: ShortText = ""


class StopTransfer(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """The message that a KV transfer failed, or that an invitation to send KV is refused.

    Either agent may send it.
    """

    transfer: Id
    reason: EndReason
    detail: Detail = ""


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """The message that all KV of a transfer has arrived and is verified, from the receiving agent.

    The sending agent may then free the blocks.
    """

    transfer: Id
    n_bytes: Bytes


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """The message that `n_bytes` bytes of KV have arrived, so that as many more may be sent."""

    transfer: Id
    n_bytes: Bytes


class Unwanted(msgspec.Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """The message that an agent will not fetch the KV offered as `name`, because it gave up.

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
    """Raise ValueError for a time limit that is negative, infinite or NaN.

    The blocks of such a transfer would stay in use.

    what  name of the time in the error message
    """
    if not 0.0 <= seconds < inf:
        raise ValueError(
            f"the time limit of {what} must be a finite number of seconds, not {seconds}"
        )


def make_stop(transfer: int, reason: EndReason, detail: str) -> StopTransfer:
    """Return the message that ends a KV transfer with an agent, for `reason`.

    `detail` is truncated to 256 characters, the most that the message can carry.
    """
    return StopTransfer(transfer, reason, detail[:256].encode(errors="replace").decode())


def pack_blocks(blocks: Any) -> bytes:
    """Encode block numbers, in any form that numpy accepts, as little-endian u32."""
    return np.asarray(blocks, dtype="<u4").tobytes()


def unpack_blocks(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, dtype="<u4").astype(np.int64)
