"""Tests that simultaneous connections are accepted together, and begin in turn (real sockets)."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest
import uvloop

from gateway.config import Limits
from gateway.http.connection_accept import NewConnections
from gateway.http.connection_limits import ClientConnections
from gateway.http.listener_sockets import BACKLOG, bind
from gateway.http.write_queue import WriteQueue
from gateway.util.client_networks import Networks
from tests.duration_limits import PATIENCE_S, within
from tests.unit.gateway.http.connection_harness import FakeBudget

CROWD, OTHER = "127.0.0.9", "127.0.0.1"
MANY = 200


class Echo(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername")[0]
        self._server.begun.append(address)
        if not self._server.connections.admit(cast(Any, self), address, self._server.limits):
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.remove(cast(Any, self))


class Server:
    """A server on a real port, whose connections are accepted by the tested NewConnections.

    begun  addresses of the clients whose connections have begun, in order
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.begun: list[str] = []
        self.refused: list[str] = []
        self.connections = ClientConnections(FakeBudget(), Networks(()), self.refused.append)
        outbox = WriteQueue(asyncio.get_running_loop())
        self.turns = outbox.request_turns
        self.new = NewConnections(outbox, self.connections, lambda: self.limits)
        (self.listening,) = bind("127.0.0.1", 0)
        self.clients: list[socket.socket] = []

    @property
    def waiting(self) -> int:
        return sum(map(len, self.turns._waiting.values()))

    def connect(self, address: str, number: int = 1, data: bytes = b"x") -> list[socket.socket]:
        # Connect clients, which send `data`. The kernel accepts them before the server does.
        some = []
        for _ in range(number):
            client = socket.socket()
            client.bind((address, 0))
            client.connect(self.listening.getsockname())
            client.sendall(data)
            client.setblocking(False)
            some.append(client)
        self.clients += some
        return some

    async def start(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        create = self.new.wrap_factory(lambda: Echo(self), self.listening)
        return await loop.create_server(create, sock=self.listening, backlog=BACKLOG)


@asynccontextmanager
async def new_server(limits: Limits | None = None) -> AsyncIterator[Server]:
    server = Server(limits or Limits())
    async with AsyncExitStack() as stack:
        yield server
        for client in server.clients:
            client.close()
        await until(lambda: not len(server.connections))
        stack.callback(server.listening.close)
    assert not server.connections._per_client


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0)  # each iteration, in which few begin


async def answer(client: socket.socket) -> bytes:
    return await within(PATIENCE_S, asyncio.get_running_loop().sock_recv(client, 100))


Body = Callable[[], Awaitable[None]]


def in_uvloop(test: Body) -> Callable[[], None]:
    # Return a test that runs in the event loop of the gateway.
    def run() -> None:
        uvloop.run(cast(Any, test()))

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    return run


@in_uvloop
async def test_a_client_begins_soon_although_many_of_another_address_came_before() -> None:
    async with new_server() as server:
        server.connect(CROWD, MANY)
        (other,) = server.connect(OTHER)
        listening = await server.start()
        assert await answer(other) == b"x"
        assert server.begun.index(OTHER) < MANY / 10
        for client in server.clients[:MANY]:
            assert await answer(client) == b"x"
        assert len(server.begun) == MANY + 1
        listening.close()


@in_uvloop
async def test_a_client_that_comes_alone_begins_at_once() -> None:
    async with new_server() as server:
        listening = await server.start()
        for number in range(1, 4):
            (client,) = server.connect(OTHER)
            assert await answer(client) == b"x"
            assert len(server.begun) == number
            assert not server.waiting
        listening.close()


@in_uvloop
async def test_clients_that_wait_count_against_the_limits() -> None:
    async with new_server(Limits(connections_per_address=50)) as server:
        crowd = server.connect(CROWD, MANY)
        (other,) = server.connect(OTHER)
        listening = await server.start()
        assert await answer(other) == b"x"
        await until(lambda: len(server.connections) == 51 and not server.waiting)
        assert set(server.refused) == {"connections_per_address"}
        assert len(server.refused) == MANY - 50
        ended = 0
        for client in crowd:
            try:
                ended += await answer(client) == b""
            except ConnectionResetError:
                ended += 1
        assert ended == MANY - 50
        listening.close()


@in_uvloop
async def test_a_client_that_leaves_while_it_waits_gets_no_protocol() -> None:
    async with new_server() as server:
        crowd = server.connect(CROWD, MANY)
        listening = await server.start()
        await until(lambda: server.waiting > MANY / 2)
        begun = len(server.begun)
        for client in crowd:
            client.close()
        await until(lambda: not server.waiting)
        assert len(server.begun) < begun + MANY / 4
        listening.close()


@in_uvloop
async def test_connections_that_wait_begin_when_the_server_stops() -> None:
    async with new_server() as server:
        crowd = server.connect(CROWD, MANY)
        listening = await server.start()
        await until(lambda: len(server.connections) == MANY)
        assert server.waiting
        listening.close()
        assert server.turns.begin_all()
        assert not server.turns.begin_all()
        # Each connection counts until its protocol counts it.
        assert len(server.connections) == MANY
        for client in crowd:
            assert await answer(client) == b"x"


@in_uvloop
async def test_connections_that_wait_begin_after_the_server_has_closed() -> None:
    async with new_server() as server:
        crowd = server.connect(CROWD, MANY)
        listening = await server.start()
        await until(lambda: len(server.connections) == MANY)
        listening.close()
        for client in crowd:
            assert await answer(client) == b"x"


@in_uvloop
async def test_a_protocol_that_cannot_be_created_ends_its_own_connection_only() -> None:
    async with new_server() as server:

        def fail() -> asyncio.Protocol:
            raise RuntimeError("the test cannot create a protocol for the connection")

        crowd = server.connect(CROWD, MANY)
        listening = await server.start()
        await until(lambda: server.waiting > MANY / 2)
        server.turns._waiting[CROWD][0][0]._new_protocol = fail  # type: ignore[attr-defined]
        await until(lambda: not server.waiting)
        await until(lambda: len(server.connections) == MANY - 1)
        answers = []
        for client in crowd:
            try:
                answers.append(await answer(client))
            except ConnectionResetError:
                answers.append(b"")
        assert sorted(answers) == [b"", *[b"x"] * (MANY - 1)]
        listening.close()


class BrokenListener:
    def __init__(self, real: socket.socket, *errors: int) -> None:
        self._real, self._errors = real, [*errors]

    def accept(self) -> tuple[socket.socket, Any]:
        if self._errors:
            raise OSError(self._errors.pop(0), "")
        return self._real.accept()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOMEM])
def test_clients_are_served_although_accept_fails(error: int) -> None:
    async def run() -> None:
        async with new_server() as server:
            crowd = server.connect(CROWD, 20)
            broken = cast(socket.socket, BrokenListener(server.listening, *[error] * 3))
            create = server.new.wrap_factory(lambda: Echo(server), broken)
            loop = asyncio.get_running_loop()
            listening = await loop.create_server(create, sock=server.listening, backlog=BACKLOG)
            for client in crowd:
                assert await answer(client) == b"x"
            listening.close()

    uvloop.run(run())
