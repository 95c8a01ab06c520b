"""Tests that bytes are sent directly to sockets, in order, and never to another connection."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest
import uvloop

from gateway.http import socket_send, write_queue
from gateway.http.write_queue import WriteQueue
from tests.c_forms import compile_module, needs_compiler

pytestmark = needs_compiler


def send_now(descriptor: int, data: bytes) -> int:
    sent: int = compile_module("gateway/http/_socket_send.c").send_now(descriptor, data)
    return sent


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> WriteQueue:
    monkeypatch.setattr(write_queue, "send_now", send_now)
    return WriteQueue(cast(asyncio.AbstractEventLoop, Mock()))


def transport(*, unsent: int = 0, is_closing: bool = False) -> Any:
    return Mock(
        is_closing=Mock(return_value=is_closing), get_write_buffer_size=Mock(return_value=unsent)
    )


def fill(near: socket.socket) -> None:
    while send_now(near.fileno(), b"x" * 65536):
        pass


def test_bytes_are_sent_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    assert send_now(near.fileno(), b"hello") == 5
    assert far.recv(9) == b"hello"


def test_a_full_socket_takes_a_part_or_nothing_without_waiting(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = pair
    near.setblocking(True)  # send_now() must not block on such a socket either
    assert 0 < send_now(near.fileno(), b"x" * (16 << 20)) < 16 << 20
    fill(near)
    assert send_now(near.fileno(), b"x") == 0


def test_errors_count_as_nothing_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    far.close()
    assert send_now(near.fileno(), b"x") == 0  # and no SIGPIPE
    reader, writer = os.pipe()
    assert send_now(writer, b"x") == 0
    os.close(reader)
    os.close(writer)
    assert send_now(writer, b"x") == 0
    with pytest.raises(TypeError):
        send_now(near.fileno(), cast(bytes, "x"))
    with pytest.raises(OverflowError):
        send_now(1 << 80, b"x")


def test_an_open_transport_without_unsent_bytes_is_passed_over(
    queue: WriteQueue, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    wire = transport()
    queue.enqueue(wire, b"hello", near.fileno())
    queue.flush()
    assert far.recv(9) == b"hello"
    wire.write.assert_not_called()


def test_bytes_do_not_overtake_those_that_the_transport_has_not_sent_yet(
    queue: WriteQueue, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    wire = transport(unsent=1)
    queue.enqueue(wire, b"hello", near.fileno())
    queue.flush()
    wire.write.assert_called_once_with(b"hello")
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(9)


def test_the_transport_gets_what_the_socket_does_not_take(
    queue: WriteQueue, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair
    wire, data = transport(), os.urandom(4 << 20)
    queue.enqueue(wire, data, near.fileno())
    queue.flush()
    (rest,) = wire.write.call_args.args
    taken = far.recv(len(data) - len(rest), socket.MSG_WAITALL)
    assert 0 < len(rest) < len(data)
    assert taken + rest == data


def test_nothing_is_sent_after_a_transport_has_closed(
    queue: WriteQueue, pair: tuple[socket.socket, socket.socket]
) -> None:
    near, far = pair  # by now, the descriptor could be another connection's
    wire = transport(is_closing=True)
    queue.enqueue(wire, b"hello", near.fileno())
    queue.flush()
    wire.write.assert_not_called()
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(9)


@pytest.mark.parametrize("is_direct", [False, True])
def test_only_transports_of_uvloop_without_tls_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    kind = uvloop.loop.TCPTransport  # type: ignore[attr-defined]
    monkeypatch.setattr(socket_send, "DIRECT", kind if is_direct else None)

    async def descriptors() -> tuple[int, int]:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        own = writer.transport.get_extra_info("socket").fileno()
        found = socket_send.descriptor_of(writer.transport)
        writer.close()
        server.close()
        return own, found

    own, found = uvloop.run(descriptors())
    assert found == (own if is_direct else -1)
    assert socket_send.descriptor_of(Mock()) == -1
