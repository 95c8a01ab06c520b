"""Reads and writes whole messages and blocks on a Unix socket. Calls block."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvtransfer.store.slot_format import Parts
from kvtransfer.store.store_messages import LENGTH_BYTES, body_length

_MOST_PARTS = 64


class ConnectionEndedError(Exception):
    """Raised when the other end closes the socket in the middle of a message or before it."""


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Read from the socket until `view` is full.

    Raises ConnectionEndedError if the other end closes, or OSError after a timeout.
    """
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionEndedError
        view = view[count:]


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def receive_message(connection: socket.socket, on_begun: Callable[[], None] | None = None) -> bytes:
    """Return the next message, without its length.

    `on_begun` is called after the first bytes have arrived.

    Raises ConnectionEndedError if the other end has closed the connection, StoreProtocolError if
    the message is too long, and OSError after a timeout.
    """
    prefix = connection.recv(LENGTH_BYTES)
    if not prefix:
        raise ConnectionEndedError
    if on_begun is not None:
        on_begun()
    prefix += receive_exactly(connection, LENGTH_BYTES - len(prefix))
    return receive_exactly(connection, body_length(prefix))


def send_parts(connection: socket.socket, parts: Parts) -> None:
    """Send the bytes of all parts in order, without joining them."""
    left = [part for part in parts if part.nbytes]
    while left:
        count = connection.sendmsg(left[:_MOST_PARTS])
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
