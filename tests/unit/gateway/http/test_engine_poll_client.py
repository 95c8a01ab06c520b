"""Tests of the HTTP client that polls engines: kept and lost connections, and reported failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.http.engine_poll_client import ConnectError, ConnectionLostError, PollClient
from gateway.protocol.response.http_response_parser import FramingError

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Engine:
    """A fake engine that gives the responses in `answers`, in order. None closes the connection."""

    def __init__(self, answers: Callable[[int], bytes | None]) -> None:
        self.answers, self.requests = answers, list[bytes]()
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            try:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            answer = self.answers(len(self.requests))
            if answer is None:
                break
            writer.write(answer)
        writer.close()


@asynccontextmanager
async def engine(
    answers: Callable[[int], bytes | None],
) -> AsyncIterator[tuple[Engine, PollClient]]:
    served = Engine(answers)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = PollClient(f"http://127.0.0.1:{port}/prefix/")
    try:
        yield served, client
    finally:
        client.close()
        server.close()


async def test_gets_in_turn_use_one_connection_and_carry_the_key() -> None:
    async with engine(lambda _: OK) as (served, client):
        client.configure({"Authorization": "Bearer k"}, None)
        for _ in range(3):
            assert await client.get("/health", 2.0, 100) == (200, b"ok")
    assert served.connections == 1
    assert served.requests[0].startswith(b"GET /prefix/health HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in served.requests[0]


async def test_gets_at_the_same_time_use_connections_of_their_own() -> None:
    async with engine(lambda _: OK) as (served, client):
        both = await asyncio.gather(*(client.get("/health", 2.0, 100) for _ in range(2)))
        assert both == [(200, b"ok")] * 2
    assert served.connections == 2


async def test_a_kept_connection_that_the_engine_has_closed_is_replaced() -> None:
    async with engine(lambda number: None if number == 2 else OK) as (served, client):
        assert await client.get("/health", 2.0, 100) == (200, b"ok")
        assert await client.get("/health", 2.0, 100) == (200, b"ok")
    assert (served.connections, len(served.requests)) == (2, 3)


async def test_a_new_connection_that_ends_without_a_response_is_lost() -> None:
    async with engine(lambda _: None) as (_, client):
        with pytest.raises(ConnectionLostError):
            await client.get("/health", 2.0, 100)


async def test_a_response_that_breaks_off_is_no_lost_connection() -> None:
    async with engine(lambda number: OK[:-1] if number == 1 else None) as (served, client):
        getting = asyncio.ensure_future(client.get("/health", 2.0, 100))
        while not served.requests:
            await asyncio.sleep(0.001)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        with pytest.raises(ConnectionLostError):
            await client.get("/health", 2.0, 100)
    assert served.connections == 2


async def test_bytes_that_are_no_response_end_the_poll() -> None:
    async with engine(lambda _: b"hello\r\n\r\n") as (_, client):
        with pytest.raises(FramingError):
            await client.get("/health", 2.0, 100)


async def test_a_silent_engine_is_given_up_after_the_timeout() -> None:
    async with engine(lambda _: b"") as (_, client):
        with pytest.raises(TimeoutError):
            await client.get("/health", 0.05, 100)


async def test_a_port_without_a_listener_is_a_connect_error() -> None:
    async with engine(lambda _: OK) as (_, client):
        pass
    with pytest.raises(ConnectError):
        await client.get("/health", 2.0, 100)
