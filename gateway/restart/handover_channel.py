"""The socket pair between a process and its successor: sends messages and listening sockets.

Only the first message carries file descriptors. It is a list that starts with the protocol version,
and every version must understand it. A process that does not know the sender's version uses the
sockets, but starts without learned state. handover_messages.py has the other messages.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING

import msgspec

from gateway.restart.handover_messages import Message

if TYPE_CHECKING:
    from gateway.config import Listeners

VERSION = 1
FD_VARIABLE = "PENSTOCK_PREDECESSOR_FD"
LENGTH = Struct("<I")
MAX_MESSAGE_BYTES = 4 << 20  # maximum size of one message
MAX_OFFER_BYTES = 64 << 10
MAX_SOCKETS = 16


class BoundListener(msgspec.Struct, frozen=True, array_like=True):
    """Describes a listening socket: its listener's name, and the host and port as configured.

    is_activated  whether systemd opened the socket, so that the configuration does not decide where
                  it listens
    """

    name: str
    host: str
    port: int
    is_activated: bool


def bound_listeners(
    listeners: Listeners,
    sockets: Mapping[str, Sequence[socket.socket]],
    activated: Collection[str],
) -> list[tuple[BoundListener, socket.socket]]:
    """Return a process's listening sockets, each with its listener's name and configured address.

    `activated` has the names of the listeners whose sockets systemd opened.
    """
    named = {"api": listeners.api, "admin": listeners.admin}
    return [
        (
            BoundListener(name, named[name].host, named[name].port, is_activated=name in activated),
            listening,
        )
        for name, opened in sockets.items()
        for listening in opened
    ]


class HandoverOffer(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a process to its successor.

    version      version of the protocol of this channel
    pid          process id of the sender
    sockets      descriptions of the file descriptors in the message, in the same order
    secret       secret key with which prompts are hashed
    block_bytes  bytes of a prompt per block of the prefix index
    """

    version: int
    pid: int
    sockets: list[BoundListener]
    secret: bytes = b""
    block_bytes: int = 0


_decoder = msgspec.msgpack.Decoder(Message)


class ChannelError(Exception):
    """Raised if the process at the other end has ended or has sent an invalid message."""


def pack_message(message: Message | HandoverOffer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> Message:
    """Read the next message from the process at the other end.

    Raises ChannelError if the channel ends or the message is invalid.
    """
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelError(
                f"a message from the other process has {length} bytes; "
                f"at most {MAX_MESSAGE_BYTES} are accepted"
            )
        message: Message = _decoder.decode(await reader.readexactly(length))
    except (OSError, asyncio.IncompleteReadError):
        raise ChannelError("the other process has closed the channel of the restart") from None
    except msgspec.DecodeError as error:
        raise ChannelError(f"the other process sent an invalid message: {error}") from None
    return message


def send_offer(channel: socket.socket, offer: HandoverOffer, sockets: list[socket.socket]) -> None:
    """Send a successor the first message, together with the file descriptors of the sockets.

    Raises OSError if the channel is closed.
    """
    data = pack_message(offer)
    sent = socket.send_fds(channel, [data], [listener.fileno() for listener in sockets])
    channel.sendall(data[sent:])


def receive_offer(channel: socket.socket) -> tuple[HandoverOffer, list[socket.socket]]:
    """Wait for the old process's first message; return it with the sockets.

    Raises ChannelError if the message is invalid, after closing the received descriptors.
    """
    sockets: list[socket.socket] = []
    try:
        data = b""
        while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
            chunk, fds, _, _ = socket.recv_fds(channel, MAX_OFFER_BYTES, MAX_SOCKETS)
            sockets += [socket.socket(fileno=fd) for fd in fds]
            data += chunk
            if not chunk or len(data) > MAX_OFFER_BYTES:
                raise ChannelError(
                    "the first message of the old process is not a valid offer of sockets"
                )
        return _offer(data[LENGTH.size :]), sockets
    except (OSError, msgspec.DecodeError) as error:
        for received in sockets:
            received.close()
        raise ChannelError(str(error)) from None


def _offer(body: bytes) -> HandoverOffer:
    # Decode an offer; from one of another version, only the members that all versions share.
    version, pid, sockets, *_ = msgspec.msgpack.decode(body, type=list)
    if version == VERSION:
        return msgspec.msgpack.decode(body, type=HandoverOffer)
    return msgspec.convert((version, pid, sockets), HandoverOffer)
