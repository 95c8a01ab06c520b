"""Tests that bursts of small chunks from an engine are read once per millisecond, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

import pytest

from gateway.http import engine_connections
from gateway.http.burst_reads import PAUSE_S, READS_BEFORE_BURST, BurstReads
from gateway.http.engine_connections import UpstreamConnection
from tests.unit.gateway.http.connection_harness import FakeTransport
from tests.unit.gateway.http.test_upload_read_turns import new_upstream
from tests.unit.gateway.http.test_write_queue import END, EVENT, HEAD


class FakeTimers:
    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        assert delay_s == PAUSE_S
        self.due.append(callback)

    def run(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_connections, "delay_acks", Mock())


@pytest.fixture
def back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is, chunks arrive shortly after each other.
    monkeypatch.setattr(engine_connections, "BURST_GAP_S", 60.0)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_connections, "BURST_GAP_S", -1.0)


def stream_in_burst() -> tuple[UpstreamConnection, FakeTransport, FakeTimers, Mock]:
    # Return a connection after as many chunks as make a burst.
    connection, transport, client = new_upstream(HEAD)
    connection._descriptor = 1  # of a socket without TLS
    timers = FakeTimers()
    connection._outbox.burst_reads = BurstReads(cast(asyncio.AbstractEventLoop, timers))
    while not transport.paused:
        connection.data_received(EVENT)
        assert client.text.count(EVENT) <= READS_BEFORE_BURST + 1
    return connection, transport, timers, cast(Mock, client)


@pytest.mark.usefixtures("back_to_back")
async def test_the_first_chunks_of_a_burst_are_relayed_at_once() -> None:
    _, _, _, client = stream_in_burst()
    assert client.text.count(EVENT) >= READS_BEFORE_BURST


@pytest.mark.usefixtures("back_to_back")
async def test_in_a_burst_the_engine_is_read_again_a_millisecond_later() -> None:
    connection, transport, timers, client = stream_in_burst()
    before = client.text.count(EVENT)
    timers.run()
    assert not transport.paused
    connection.data_received(20 * EVENT + END)  # which the kernel has collected
    assert client.text.count(EVENT) == before + 20
    assert client.text.endswith(END)


@pytest.mark.usefixtures("paced")
async def test_an_engine_whose_chunks_have_time_between_them_is_read_all_the_time() -> None:
    connection, transport, _ = new_upstream(HEAD)
    connection._descriptor = 1
    for _ in range(20):
        connection.data_received(EVENT)
    assert not transport.paused


@pytest.mark.usefixtures("back_to_back")
async def test_after_a_burst_an_engine_is_not_read_while_its_client_reads_too_slowly() -> None:
    connection, transport, timers, _ = stream_in_burst()
    connection.pause()
    timers.run()
    assert transport.paused
    connection.resume()
    assert not transport.paused


@pytest.mark.usefixtures("back_to_back")
async def test_a_client_that_reads_again_does_not_end_the_pause_in_a_burst() -> None:
    connection, transport, timers, _ = stream_in_burst()
    connection.pause()
    connection.resume()
    assert transport.paused
    timers.run()
    assert not transport.paused


@pytest.mark.usefixtures("back_to_back")
async def test_a_connection_that_is_closed_in_a_burst_is_not_read_again() -> None:
    connection, transport, timers, _ = stream_in_burst()
    connection.abort()
    timers.run()
    assert transport.paused


@pytest.mark.usefixtures("back_to_back")
async def test_an_engine_behind_tls_is_read_all_the_time() -> None:
    connection, transport, _ = new_upstream(HEAD)
    assert connection._descriptor == -1
    for _ in range(20):
        connection.data_received(EVENT)
    assert not transport.paused


@pytest.mark.usefixtures("back_to_back")
async def test_parts_of_a_long_read_do_not_count_as_a_burst() -> None:
    connection, transport, _ = new_upstream(HEAD)
    connection._descriptor = 1
    relay = connection._relay
    assert relay is not None
    for _ in range(20):
        connection.process_deferred(relay, EVENT)
    assert not transport.paused


def test_connections_that_wait_together_share_one_timer() -> None:
    timers, connections = FakeTimers(), [Mock(), Mock()]
    reads = BurstReads(cast(asyncio.AbstractEventLoop, timers))
    for connection in connections:
        reads.add(connection, Mock())
    assert len(timers.due) == 1
    assert all(reads.is_waiting(connection) for connection in connections)
    timers.run()
    assert [connection.end_burst.call_count for connection in connections] == [1, 1]
    assert not any(reads.is_waiting(connection) for connection in connections)


def test_a_connection_that_raises_an_exception_does_not_keep_others_waiting() -> None:
    due: list[Callable[[], None]] = []
    loop = Mock(call_later=lambda _, callback: due.append(callback), call_soon=due.append)
    broken, others = Mock(end_burst=Mock(side_effect=RuntimeError)), [Mock(), Mock()]
    reads = BurstReads(cast(asyncio.AbstractEventLoop, loop))
    for connection in (others[0], broken, others[1]):
        reads.add(connection, Mock())
    with pytest.raises(RuntimeError):
        due.pop()()
    due.pop()()
    assert [other.end_burst.call_count for other in others] == [1, 1]
    assert not due
