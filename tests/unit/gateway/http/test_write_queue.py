"""Tests that each turn of the event loop writes a limited amount, without loss or reordering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.engine_connections import ConnectionPool, UpstreamConnection
from gateway.http.engine_request import UpstreamTimeouts
from gateway.http.write_queue import MAX_DEFERRED, MAX_DEFERRED_BYTES, WRITES_PER_TURN, WriteQueue
from gateway.protocol.response.http_response_parser import encode_chunk
from gateway.protocol.response.relay import Relay
from gateway.protocol.response.relay_state import RelayState
from tests.unit.gateway.http.test_engine_connections import FakeClient, FakePayload

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = encode_chunk(b'data: {"choices":[{"delta":{"content":"."}}]}\n\n')
END = encode_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
RELAY = Relay(b"")


class FakeLoop:
    def __init__(self) -> None:
        self._soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def turn(self) -> bool:
        # Run one iteration; return whether there was anything to do.
        soon, self._soon = self._soon, []
        for callback in soon:
            callback()
        return bool(soon)


class FakeConnection:
    def __init__(self, outbox: WriteQueue) -> None:
        self._outbox = outbox
        self._wire = Mock(is_closing=lambda: False, write=self._write)
        self.sent = b""

    def receive(self, data: bytes) -> None:
        if self._outbox.budget_spent:
            self._outbox.defer(self, RELAY, data)
        else:
            self.process_deferred(RELAY, data)

    def process_deferred(self, relay: Relay, data: bytes) -> None:
        assert relay is RELAY
        self._outbox.enqueue(self._wire, data)

    def _write(self, data: bytes) -> None:
        self.sent += data


def new_queue() -> tuple[WriteQueue, FakeLoop]:
    loop = FakeLoop()
    return WriteQueue(cast(asyncio.AbstractEventLoop, loop)), loop


def test_new_requests_are_answered_before_deferred_chunks() -> None:
    queue, loop = new_queue()
    streams = [FakeConnection(queue) for _ in range(10 * WRITES_PER_TURN)]
    for stream in streams:
        stream.receive(b".")
    loop.turn()
    behind = [stream.sent for stream in streams].count(b"")
    refused = FakeConnection(queue)
    refused.process_deferred(RELAY, b"429")
    loop.turn()
    assert refused.sent == b"429"
    assert behind == 8 * WRITES_PER_TURN
    assert [stream.sent for stream in streams].count(b"") == 7 * WRITES_PER_TURN
    while loop.turn():
        pass
    assert all(stream.sent == b"." for stream in streams)
    assert not queue.budget_spent


def test_a_few_chunks_are_written_in_the_iteration_in_which_they_arrive() -> None:
    queue, loop = new_queue()
    streams = [FakeConnection(queue) for _ in range(WRITES_PER_TURN)]
    for stream in streams:
        stream.receive(b".")
    loop.turn()
    assert all(stream.sent for stream in streams)
    assert not loop.turn()


def test_beyond_the_limit_of_deferred_chunks_they_are_relayed_at_once() -> None:
    queue, _ = new_queue()
    stream = FakeConnection(queue)
    for _ in range(WRITES_PER_TURN + MAX_DEFERRED):
        stream.receive(b".")
    assert not stream.sent
    for excess in range(1, 4):
        stream.receive(b".")
        queue.flush()
        assert len(stream.sent) == WRITES_PER_TURN + excess


def test_deferred_chunks_are_limited_in_bytes_too() -> None:
    queue, loop = new_queue()
    stream, chunk_bytes = FakeConnection(queue), b"x" * (MAX_DEFERRED_BYTES // 16)
    for _ in range(WRITES_PER_TURN):
        stream.receive(b".")
    for _ in range(17):
        stream.receive(chunk_bytes)
    queue.flush()
    assert len(stream.sent) == WRITES_PER_TURN + len(chunk_bytes)
    while loop.turn():
        pass
    assert len(stream.sent) == WRITES_PER_TURN + 17 * len(chunk_bytes)
    assert queue._deferred_bytes == 0


def test_a_chunk_that_cannot_be_relayed_does_not_affect_the_others() -> None:
    queue, loop = new_queue()
    broken, streams = (
        Mock(process_deferred=Mock(side_effect=ValueError("a bug"))),
        [FakeConnection(queue) for _ in range(WRITES_PER_TURN)],
    )
    for stream in streams:
        stream.receive(b".")
    queue.defer(broken, RELAY, b"?")
    for stream in streams:
        stream.receive(b".")
    with pytest.raises(ValueError, match="a bug"):
        loop.turn()
    while loop.turn():
        pass
    assert all(stream.sent == b".." for stream in streams)


@pytest.mark.parametrize("late", [0, 1])
def test_a_write_queued_by_a_failing_write_is_written(late: int) -> None:
    queue, loop = new_queue()
    stream, behind = FakeConnection(queue), FakeConnection(queue)

    def fail(_: bytes) -> None:
        stream.receive(b".")
        raise OSError("the test's connection is closed while it writes")

    queue.enqueue(Mock(is_closing=lambda: False, write=fail), b"x")
    for _ in range(late):
        queue.defer(behind, RELAY, b".")
    with pytest.raises(OSError, match="closed while it writes"):
        loop.turn()
    while loop.turn():
        pass
    assert (stream.sent, behind.sent) == (b".", b"." * late)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("deferred", [0, 2 * WRITES_PER_TURN])
def test_a_callback_follows_the_writes_of_its_iteration_and_is_called_once(
    is_first: bool, deferred: int
) -> None:
    outbox, loop = new_queue()
    connection, seen = FakeConnection(outbox), []
    if is_first:
        outbox.call_after_flush(lambda: seen.append(len(connection.sent)))
    connection.receive(b"x")
    if not is_first:
        outbox.call_after_flush(lambda: seen.append(len(connection.sent)))
    for _ in range(deferred):
        outbox.budget_spent = True
        connection.receive(b"y")
    assert not seen
    loop.turn()
    assert len(seen) == 1
    assert seen[0] >= 1
    while loop.turn():
        pass
    assert len(seen) == 1
    assert len(connection.sent) == 1 + deferred


def test_a_callback_is_called_although_a_write_fails() -> None:
    outbox, loop = new_queue()
    seen: list[str] = []

    class Broken:
        def is_closing(self) -> bool:
            raise ValueError("the test's transport cannot tell whether it is closing")

    outbox.enqueue(cast(asyncio.Transport, Broken()), b"x")
    outbox.call_after_flush(lambda: seen.append("first"))
    with pytest.raises(ValueError, match="cannot tell whether it is closing"):
        loop.turn()
    assert seen == ["first"]
    outbox.call_after_flush(lambda: seen.append("second"))  # the queue can schedule itself again
    loop.turn()
    assert seen == ["first", "second"]


def test_a_transport_that_cannot_be_written_to_does_not_affect_the_others() -> None:
    queue, loop = new_queue()
    gone = Mock(side_effect=RuntimeError("after write_eof()"))
    closed, stream = Mock(is_closing=lambda: False, write=gone), FakeConnection(queue)
    queue.enqueue(closed, b"x")
    stream.receive(b".")
    loop.turn()
    assert stream.sent == b"."
    closed.abort.assert_called_once_with()


@given(
    st.lists(st.sampled_from(["turn", "end 0", "end 1", *["burst"] * 4]), max_size=30),
    st.integers(1, 90),
)
def test_deferring_neither_loses_nor_reorders_bytes_of_a_client(
    steps: list[str], size: int
) -> None:
    queue, loop = new_queue()
    streams = [FakeConnection(queue) for _ in range(3)]
    received = [b""] * 3
    for number, step in enumerate(steps):
        if step == "turn":
            loop.turn()
        elif step == "burst":
            for index in range(size):
                data = b"%d.%d " % (number, index)
                streams[index % 3].receive(data)
                received[index % 3] += data
        else:
            ending = int(step[-1])
            queue.flush_connection(streams[ending])
            queue.flush()
            assert streams[ending].sent == received[ending]
    while loop.turn():
        pass
    assert [stream.sent for stream in streams] == received


class Request:
    def __init__(self, pool: ConnectionPool) -> None:
        self.connection, self.client, self.relay = (
            UpstreamConnection(pool),
            FakeClient(),
            Relay(b""),
        )
        self.wire = Mock(is_closing=Mock(return_value=False))
        self.connection.connection_made(self.wire)
        self.done = self.connection.start(b"", FakePayload(), self.relay, self.client)
        self.connection.data_received(HEAD)


@pytest.fixture
async def pool() -> ConnectionPool:
    return ConnectionPool(
        "http://engine",
        None,
        UpstreamTimeouts(1.0, 1.0, 1.0),
        WriteQueue(asyncio.get_running_loop()),
    )


def spend_budget(pool: ConnectionPool) -> None:
    for _ in range(WRITES_PER_TURN):
        pool.outbox.enqueue(Mock(), b".")


async def test_a_response_whose_end_was_deferred_is_complete_although_the_engine_closed(
    pool: ConnectionPool,
) -> None:
    request = Request(pool)
    spend_budget(pool)
    request.connection.data_received(EVENT)
    request.connection.data_received(END)
    assert EVENT not in request.client.text
    request.connection.connection_lost(None)
    await request.done
    assert request.relay.state is RelayState.DONE
    assert request.client.text.endswith(EVENT + END)


async def test_deferred_chunks_of_an_aborted_response_are_dropped(pool: ConnectionPool) -> None:
    request = Request(pool)
    spend_budget(pool)
    request.connection.data_received(EVENT)
    request.connection.abort()
    await asyncio.sleep(0)
    assert EVENT not in request.client.text


async def test_deferred_bytes_after_the_end_of_a_response_close_the_connection(
    pool: ConnectionPool,
) -> None:
    request = Request(pool)
    spend_budget(pool)
    request.connection.data_received(EVENT + END)
    request.connection.data_received(EVENT)
    await asyncio.sleep(0)
    assert request.client.text.endswith(EVENT + END)
    request.wire.abort.assert_called_once()
