"""Tests that long responses of engines are relayed in order, a little per turn of the event
loop.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import cast

import pytest

from gateway.http import engine_connections, long_engine_reads
from gateway.http.engine_connections import UpstreamConnection
from gateway.http.long_engine_reads import SLICE, LongReads
from gateway.http.upload_read_turns import LONG_READ
from gateway.http.write_queue import WRITES_PER_TURN
from gateway.protocol.response.http_response_parser import LAST_CHUNK, encode_chunk
from gateway.protocol.response.relay import Relay
from gateway.protocol.translate import translation_table
from tests.unit.gateway.http.connection_harness import FakeTransport, turns
from tests.unit.gateway.http.test_engine_connections import FakeClient
from tests.unit.gateway.http.test_upload_read_turns import LONG, new_upstream
from tests.unit.gateway.http.test_write_queue import HEAD, RELAY, FakeConnection, FakeLoop
from tests.unit.gateway.protocol.translate import chats

REQUEST = b'{"model":"m","input":"hi"}'
TEXT = "x" * 300_000
MOST_WRITTEN = 3 * SLICE  # bytes per iteration: a step may exceed SLICE by one piece


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
    monkeypatch.setattr(long_engine_reads, "ITERATION_S", 0.0)  # one slice per iteration
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
    monkeypatch.setattr(long_engine_reads, "ITERATION_S", 60.0)
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
    assert not client.text.endswith(b"first")  # the chunk is deferred
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


def translated_answer() -> list[bytes]:
    data = chats.stream([("text", TEXT)], size=len(TEXT))
    reads = [data[start : start + 20_000] for start in range(0, len(data), 20_000)]
    return [*map(encode_chunk, reads), LAST_CHUNK]


@pytest.fixture
def one_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Relay one slice per iteration, however fast the machine is.
    monkeypatch.setattr(long_engine_reads, "ITERATION_S", 0.0)


def new_translated() -> tuple[UpstreamConnection, FakeTransport, FakeClient]:
    translator = translation_table._responses(REQUEST, "m", 9)()
    connection, transport, client = new_upstream(HEAD, translator)
    connection._examined = (
        engine_connections.STEPS
    )  # the fake transport has no socket whose option to set
    return connection, transport, client


async def test_a_translated_answer_is_written_little_by_little(one_step_at_once: None) -> None:
    connection, transport, client = new_translated()
    for read in translated_answer():
        connection.data_received(read)
    written = [len(client.text)]
    while transport.paused:
        await asyncio.sleep(0)
        written.append(len(client.text))
    assert max(later - earlier for earlier, later in pairwise(written)) <= MOST_WRITTEN
    assert client.text.endswith(LAST_CHUNK)
    assert client.text.count(b"x" * 10_000) >= 5 * len(TEXT) // 10_000 - 50
    assert connection in connection._pool._idle


async def test_the_end_of_a_connection_writes_the_rest_of_a_translated_answer(
    one_step_at_once: None,
) -> None:
    connection, _, client = new_translated()
    for read in translated_answer():
        connection.data_received(read)
    assert not client.text.endswith(LAST_CHUNK)
    connection.connection_lost(None)
    assert client.text.endswith(LAST_CHUNK)
    await turns()


def test_steps_of_many_answers_are_scheduled_once_per_iteration(one_step_at_once: None) -> None:
    loop = FakeLoop()
    reads = LongReads(cast(asyncio.AbstractEventLoop, loop))
    left = dict.fromkeys(range(3), 10)

    class Stepping(SlicedStream):
        def process_deferred(self, relay: Relay, data: bytes) -> None:
            done.append(self)
            left[streams.index(self)] -= 1
            if left[streams.index(self)]:
                reads.add_step(self, relay, self.transport)

    done: list[Stepping] = []
    streams = [Stepping() for _ in range(3)]
    for stream in streams:
        reads.add_step(stream, RELAY, stream.transport)
    iterations = 0
    while loop.turn():
        iterations += 1
        assert len(done) == iterations
    assert not any(left.values())
