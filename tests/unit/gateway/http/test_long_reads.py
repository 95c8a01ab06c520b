"""Tests of long reads from engines: they are relayed in order, a little per loop iteration."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gateway.http import long_reads
from gateway.http.long_reads import SLICE, LongReads
from gateway.http.read_turns import LONG_READ
from gateway.http.write_queue import WRITES_PER_TURN
from gateway.protocol.relay import Relay
from tests.unit.gateway.http.connection_harness import FakeTransport, turns
from tests.unit.gateway.http.test_read_turns import LONG, new_upstream
from tests.unit.gateway.http.test_write_queue import RELAY, FakeConnection, FakeLoop


class SlicedStream:
    def __init__(self) -> None:
        self.transport = FakeTransport(asyncio.Protocol())
        self.relayed = b""

    def process_deferred(self, relay: Relay, data: bytes) -> None:
        assert relay is RELAY
        self.relayed += data

    def end_slices(self) -> None:
        self.transport.resume_reading()


def text(size: int) -> bytes:
    return bytes(number * 7 % 251 for number in range(size))


def test_connections_relay_their_long_reads_slice_by_slice_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_reads, "ITERATION_S", 0.0)  # one slice per iteration
    loop = FakeLoop()
    reads = LongReads(cast(asyncio.AbstractEventLoop, loop))
    streams, data = [SlicedStream(), SlicedStream()], text(2 * SLICE + 5)
    for stream in streams:
        reads.add(stream, RELAY, data, stream.transport)
    for iteration in range(1, 7):
        assert all(stream.transport.paused for stream in streams if stream.relayed != data)
        loop.turn()
        lengths = [len(stream.relayed) for stream in streams]
        assert abs(lengths[0] - lengths[1]) <= SLICE
        assert sum(lengths) <= iteration * SLICE
    assert [stream.relayed for stream in streams] == [data, data]
    assert not any(stream.transport.paused for stream in streams)
    assert not loop.turn()


def test_an_iteration_relays_several_slices_if_they_take_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_reads, "ITERATION_S", 60.0)
    loop = FakeLoop()
    reads = LongReads(cast(asyncio.AbstractEventLoop, loop))
    stream = SlicedStream()
    reads.add(stream, RELAY, b"", stream.transport)
    reads.add(stream, RELAY, text(20), stream.transport)
    reads.add(stream, RELAY, text(30), stream.transport)
    loop.turn()
    assert stream.relayed == text(20) + text(30)


async def test_the_chunks_that_an_engine_sent_before_a_long_read_come_first() -> None:
    connection, transport, client = new_upstream()
    queue = connection._outbox
    for _ in range(WRITES_PER_TURN):
        FakeConnection(queue).receive(b".")
    connection.data_received(b"first")
    assert not client.text.endswith(b"first")  # it is deferred
    connection.data_received(LONG)
    connection.data_received(b"last")
    await turns()
    assert client.text.endswith(b"first" + LONG + b"last")
    assert not transport.paused


async def test_a_slow_client_that_continues_does_not_resume_reading_during_a_long_read() -> None:
    connection, transport, _ = new_upstream()
    connection.data_received(LONG)
    connection.pause()
    connection.resume()
    assert transport.paused
    await turns()
    assert not transport.paused


@pytest.mark.parametrize("end", ["eof_received", "connection_lost"])
async def test_the_end_of_a_connection_relays_what_was_read(end: str) -> None:
    connection, _, client = new_upstream()
    connection.data_received(LONG)
    assert not client.text.endswith(LONG)
    if end == "eof_received":
        connection.eof_received()
    else:
        connection.connection_lost(None)
    assert client.text.endswith(LONG)


async def test_a_connection_with_bytes_behind_its_answer_is_not_used_again() -> None:
    connection, transport, client = new_upstream()
    relay = connection._relay
    assert relay is not None
    left = 1_000_000
    while left > LONG_READ:
        connection.data_received(LONG)
        left -= len(LONG)
        await turns()
    connection.data_received(b"x" * left + b"surplus" * SLICE)
    await turns()
    assert client.text.count(b"x") == 1_000_000
    assert b"surplus" not in client.text
    assert transport.closed
