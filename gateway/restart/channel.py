"""The private channel between a process and its successor: a socket pair, messages with their length before them.

The first message alone carries descriptors and has to be understood by every version: a list whose first item is the
version of the rest. A process that does not know that version takes the sockets and starts without learned state.
"""

from __future__ import annotations

import asyncio
import socket
from struct import Struct

import msgspec

from policies.engine.peer_load import Share
from policies.health.health import Health
from policies.saved_state import (
    AdmissionState,
    BeliefState,
    Blocks,
    HolderState,
    LengthState,
    QuotaState,
)

VERSION = 1
ENVIRONMENT = "PENSTOCK_PREDECESSOR_FD"
LENGTH = Struct("<I")
CAP_BYTES = 4 << 20  # of one message
OFFER_BYTES = 64 << 10
MOST_SOCKETS = 16

Place = tuple[str, str]
"""An endpoint: its pool and its URL. Slots differ between processes."""


class BoundTo(msgspec.Struct, frozen=True, array_like=True):
    """Whose a listening socket is: a listener's name, and its host and port as configured. `activated`: systemd opened
    it, so the configuration does not decide where it listens."""

    name: str
    host: str
    port: int
    activated: bool


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The first message. `sockets` describes the descriptors that come with it, in order."""

    version: int
    pid: int
    sockets: list[BoundTo]
    secret: bytes = b""
    block_bytes: int = 0


class StateWanted(msgspec.Struct, frozen=True, array_like=True, tag="state_wanted"):
    """The successor is built and has looked at its engines: it wants the learned state now, or none at all."""

    warm: bool


class EndpointState(msgspec.Struct, frozen=True, array_like=True, tag="endpoint"):
    place: Place
    slot: int
    health: Health
    drained: bool
    warm_from: float | None
    belief: BeliefState
    holder: HolderState | None


class Slots(msgspec.Struct, frozen=True, array_like=True, tag="slots"):
    """Which slot of the blocks to come is whose."""

    places: list[tuple[int, Place]]


class PoolState(msgspec.Struct, frozen=True, array_like=True, tag="pool"):
    pool: str
    admission: AdmissionState


class TenantState(msgspec.Struct, frozen=True, array_like=True, tag="tenant"):
    tenant: str
    quota: QuotaState


class Lengths(msgspec.Struct, frozen=True, array_like=True, tag="lengths"):
    rows: list[LengthState]


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """All learned state was sent."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The successor accepts connections."""


class Booked(msgspec.Struct, frozen=True, array_like=True, tag="booked"):
    """What the predecessor still has at the endpoints; nothing where it says nothing."""

    shares: list[tuple[Place, Share]]


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The successor was asked to stop: the predecessor has to end within timeouts.shutdown as well."""


State = Slots | Blocks | EndpointState | PoolState | TenantState | Lengths
Message = StateWanted | State | End | Ready | Booked | Stop
_decoder = msgspec.msgpack.Decoder(Message)


class ChannelError(Exception):
    """The other process ended, or said what cannot be understood."""


def pack(message: Message | Offer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Message:
    """The next message. Raise ChannelError."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > CAP_BYTES:
            raise ChannelError(f"a message of {length} bytes is longer than {CAP_BYTES}")
        message: Message = _decoder.decode(await reader.readexactly(length))
    except (OSError, asyncio.IncompleteReadError):
        raise ChannelError("the channel is closed") from None
    except msgspec.DecodeError as error:
        raise ChannelError(f"a message cannot be understood: {error}") from None
    return message


def send_offer(channel: socket.socket, offer: Offer, sockets: list[socket.socket]) -> None:
    """Send the first message with its descriptors. Raise OSError."""
    data = pack(offer)
    sent = socket.send_fds(channel, [data], [each.fileno() for each in sockets])
    channel.sendall(data[sent:])


def receive_offer(channel: socket.socket) -> tuple[Offer, list[socket.socket]]:
    """Wait for the first message. Raise ChannelError; the descriptors that came are closed then."""
    sockets: list[socket.socket] = []
    try:
        data = b""
        while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
            more, fds, _, _ = socket.recv_fds(channel, OFFER_BYTES, MOST_SOCKETS)
            sockets += [socket.socket(fileno=fd) for fd in fds]
            data += more
            if not more or len(data) > OFFER_BYTES:
                raise ChannelError("the predecessor made no offer")
        return _offer(data[LENGTH.size :]), sockets
    except (OSError, msgspec.DecodeError) as error:
        for each in sockets:
            each.close()
        raise ChannelError(str(error)) from None


def _offer(body: bytes) -> Offer:
    """Of another version, only what all versions have in common."""
    version, pid, sockets, *_ = msgspec.msgpack.decode(body, type=list)
    if version == VERSION:
        return msgspec.msgpack.decode(body, type=Offer)
    return msgspec.convert((version, pid, sockets), Offer)
