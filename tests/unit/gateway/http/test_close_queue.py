"""Tests that one turn of the event loop closes few connections, even if many clients leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.http.aiohttp_connection import AiohttpConnection
from gateway.http.close_queue import CLOSES
from gateway.http.fast_connection import FastConnection
from tests.unit.gateway.http.connection_harness import FakeTransport, Harness, turns


class TlsTransport(FakeTransport):
    def can_write_eof(self) -> bool:
        return False


def leave(transport: FakeTransport) -> None:
    # Report the end of the client's bytes to the connection, as an event loop does.
    if not transport.protocol.eof_received():
        transport.close()


Connect = Callable[[Harness], FastConnection | AiohttpConnection]


@pytest.mark.parametrize(
    "connect", [Harness.fast_connection, Harness.aiohttp_connection], ids=["fast", "aiohttp"]
)
async def test_an_iteration_closes_a_limited_number_of_connections(connect: Connect) -> None:
    transports = []
    harness = Harness()
    for _ in range(5 * CLOSES):
        connection = connect(harness)
        transports.append(FakeTransport(connection))
        connection.connection_made(transports[-1])
    for transport in transports:
        leave(transport)
    for number in range(1, 6):
        assert sum(transport.closed for transport in transports) == number * CLOSES
        await asyncio.sleep(0)
    await turns()


async def test_a_single_client_that_leaves_is_disconnected_at_once() -> None:
    harness = Harness()
    for _ in range(3):
        connection = harness.fast_connection()
        transport = FakeTransport(connection)
        connection.connection_made(transport)
        leave(transport)
        assert transport.closed
        await turns()


async def test_connections_with_tls_are_left_to_the_event_loop() -> None:
    harness = Harness()
    for _ in range(2 * CLOSES):
        connection = harness.fast_connection()
        transport = TlsTransport(connection)
        connection.connection_made(transport)
        leave(transport)
        assert transport.closed
    await turns()
