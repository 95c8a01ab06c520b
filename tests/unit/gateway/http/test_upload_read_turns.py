"""Tests that one turn of the event loop reads a limited amount, and all connections get turns."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.http import connection_fairness
from gateway.http.engine_connections import ConnectionPool, UpstreamConnection
from gateway.http.engine_request import UpstreamTimeouts
from gateway.http.upload_read_turns import LONG_READ, PIECE_TURNS, TURNS, ReadTurns
from gateway.http.write_queue import BYTES_PER_TURN, WRITES_PER_TURN, WriteQueue
from gateway.protocol.response.relay import Relay
from gateway.protocol.translate.translator import AnswerTranslator
from tests.unit.gateway.http.connection_harness import FakeTransport, Harness, turns
from tests.unit.gateway.http.test_engine_connections import FakeClient, FakePayload
from tests.unit.gateway.http.test_write_queue import RELAY, FakeConnection, FakeLoop

LONG = b"x" * LONG_READ
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 1000000\r\n\r\n"


class FakeReader(FakeTransport):
    """A fake connection that has more data to read in each of `reads` turns of the event loop."""

    def __init__(self, read_turns: ReadTurns, reads: int) -> None:
        super().__init__(asyncio.Protocol())
        self._read_turns = read_turns
        self._reads = reads
        self.paused_between = True
        self.reads_done = 0
        read_turns.wait(self, self)

    def take_turn(self) -> None:
        self.paused_between &= self.paused
        self.resume_reading()
        self.reads_done += 1
        if self.reads_done < self._reads:
            self._read_turns.wait(self, self)


@pytest.mark.parametrize("count", [TURNS, PIECE_TURNS])
def test_an_iteration_lets_few_connections_read_and_all_get_their_turn(count: int) -> None:
    loop = FakeLoop()
    read_turns = ReadTurns(cast(asyncio.AbstractEventLoop, loop), count)
    readers = [FakeReader(read_turns, 5) for _ in range(3 * count)]
    done = 0
    while loop.turn():
        before, done = done, sum(reader.reads_done for reader in readers)
        assert done - before == count
        counts = [reader.reads_done for reader in readers]
        assert max(counts) - min(counts) <= 1
    assert done == 5 * len(readers)
    assert all(reader.paused_between for reader in readers)


@pytest.mark.parametrize("size", [1, LONG_READ])
async def test_a_client_is_not_read_again_at_once_after_a_piece_of_its_body(size: int) -> None:
    harness = Harness()
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n"
    await transport.deliver(head + b"{")
    connection.data_received(b"x" * size)
    assert transport.paused
    await turns()
    assert not transport.paused
    transport.close()
    await turns()


async def test_clients_that_send_heads_in_pieces_are_read_by_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_fairness, "BEGINNINGS", 3 * PIECE_TURNS)
    harness = Harness()
    transports = []
    for _ in range(3 * PIECE_TURNS):
        connection = harness.fast_connection()
        transports.append(FakeTransport(connection))
        connection.connection_made(transports[-1])
        connection.data_received(b"POST /v1/completions HTTP/1.1\r\n")
        assert not transports[-1].paused  # the rest of an honest head usually follows
        connection.data_received(b"X")
    for number in range(4):
        waiting = sum(transport.paused for transport in transports)
        assert waiting == max(0, 3 - number) * PIECE_TURNS
        await asyncio.sleep(0)
    for transport in transports:
        transport.close()
    await turns()


@pytest.mark.parametrize("framing", ["Content-Length: 9", "Transfer-Encoding: chunked"])
async def test_clients_that_send_bodies_in_pieces_are_read_by_turns(framing: str) -> None:
    harness = Harness()
    transports = []
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n".encode()
    for _ in range(3 * PIECE_TURNS):
        connection = harness.fast_connection()
        transports.append(FakeTransport(connection))
        connection.connection_made(transports[-1])
        connection.data_received(head)
    await turns()
    for transport in transports:
        transport.protocol.data_received(b"1")
    for number in range(4):
        waiting = sum(transport.paused for transport in transports)
        assert waiting == max(0, 3 - number) * PIECE_TURNS
        await asyncio.sleep(0)
    for transport in transports:
        transport.close()
    await turns()


async def test_an_iteration_parses_few_of_the_pieces_that_it_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_fairness, "BEGINNINGS", 3 * PIECE_TURNS)
    harness = Harness()
    protocols = []
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(3 * PIECE_TURNS):
        transport = FakeTransport(harness.fast_connection())
        transport.protocol.connection_made(transport)
        transport.protocol.data_received(head)
        protocols.append(cast(Any, transport.protocol))
    await turns()
    for protocol in protocols:
        protocol.data_received(b"1\r\n{\r\n")
    parsed = [0]
    for _ in range(5):
        parsed.append(sum(protocol._payload.total_bytes for protocol in protocols))
        assert parsed[-1] - parsed[-2] <= PIECE_TURNS
        await asyncio.sleep(0)
    assert parsed[-1] == len(protocols)
    for protocol in protocols:
        protocol.transport.close()
    await turns()


def new_upstream(
    head: bytes = ANSWER, translator: AnswerTranslator | None = None
) -> tuple[UpstreamConnection, FakeTransport, FakeClient]:
    pool = ConnectionPool(
        "http://127.0.0.1:1",
        None,
        UpstreamTimeouts(1.0, 1.0, 1.0),
        WriteQueue(asyncio.get_running_loop()),
    )
    connection, client = UpstreamConnection(pool), FakeClient()
    transport = FakeTransport(cast(asyncio.Protocol, connection))
    connection.transport = transport
    connection.start(b"", FakePayload(), Relay(b"", translator=translator), client)
    connection.data_received(head)
    return connection, transport, client


async def test_an_engine_is_not_read_again_at_once_after_a_long_read() -> None:
    connection, transport, client = new_upstream()
    connection.data_received(LONG)
    assert transport.paused
    connection.data_received(LONG)  # the event loop had read it already
    await turns()
    assert not transport.paused
    assert client.text.endswith(LONG + LONG)


async def test_the_turn_of_an_engine_does_not_end_the_pause_of_a_slow_client() -> None:
    connection, transport, _ = new_upstream()
    connection.data_received(LONG)
    connection.pause()
    await turns()
    assert transport.paused
    connection.resume()
    assert not transport.paused


def test_an_iteration_relays_a_limited_number_of_deferred_bytes() -> None:
    loop = FakeLoop()
    queue = WriteQueue(cast(asyncio.AbstractEventLoop, loop))
    for _ in range(WRITES_PER_TURN):
        FakeConnection(queue).receive(b".")
    streams = [FakeConnection(queue) for _ in range(30)]
    for stream in streams:
        queue.defer(stream, RELAY, LONG)
    loop.turn()
    sent = 0
    while sent < len(streams) * LONG_READ:
        before, sent = sent, sum(len(stream.sent) for stream in streams)
        assert before < sent <= before + BYTES_PER_TURN
        loop.turn()
