"""Tests that thousands of streams are checked and sampled in small steps, so that none takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.fleet import speed_monitor
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.speed_monitor import REVIEW_S, STALL_CHECK_S
from gateway.http.eager_task import EagerFuture
from gateway.http.engine_connections import ConnectionPool, UpstreamConnection
from gateway.protocol.response.http_response_parser import encode_chunk
from gateway.protocol.response.relay import Relay, UpstreamError
from policies.health.endpoint_speed import SpeedRecord
from tests.replacement import replace_method
from tests.unit.gateway.fleet.tables import table_of
from tests.unit.gateway.instruction_count import most_per_step

ENDPOINTS, STREAMS = 4, 1200
MOST_INSTRUCTIONS = 100_000
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = encode_chunk(b'data: {"choices":[{"index":0,"delta":{"content":" a"}}]}\n\n')


class Client:
    is_writing_paused = False

    def write(self, data: bytes) -> None: ...
    def set_source(self, source: UpstreamConnection | None) -> None: ...


class Payload:
    body = b"{}"


class Socket:
    def setsockopt(self, *_: int) -> None: ...


class Transport(asyncio.Transport):
    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return Socket() if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None: ...
    def abort(self) -> None: ...


def open_stream(pool: ConnectionPool) -> tuple[UpstreamConnection, EagerFuture]:
    connection = UpstreamConnection(pool)
    connection.connection_made(Transport())
    return connection, connection.start(b"", Payload(), Relay(b""), Client())


async def busy_table() -> EndpointTable:
    table, *_ = table_of([f"http://127.0.0.1:{port}" for port in range(1, ENDPOINTS + 1)])
    for live in table.all():
        for _ in range(STREAMS):
            open_stream(live.upstream)[0].data_received(HEAD + TOKEN)
    await all_relayed(table, events=1)
    return table


async def all_relayed(table: EndpointTable, events: int) -> None:
    # What exceeds the work of one turn of the event loop is relayed in later turns.
    streams = [connection for live in table.all() for connection in live.upstream.connections]
    while not all(
        (relay := stream.active_stream) and relay.event_count == events for stream in streams
    ):
        await asyncio.sleep(0)


async def test_timeouts_of_thousands_of_streams_are_checked_in_short_steps() -> None:
    table = await busy_table()
    table.check_stalls(100.0)
    assert most_per_step(table.sweep_steps(100.1)) < MOST_INSTRUCTIONS


async def test_a_stream_that_opens_among_thousands_is_failed_when_its_engine_is_silent() -> None:
    table = await busy_table()
    pool = table.all()[-1].upstream
    late, ended = open_stream(pool)
    late.last_activity_at -= pool.timeouts.first_byte_s + 1.0
    for _ in table.sweep_steps(late.last_activity_at + pool.timeouts.first_byte_s + 0.5):
        pass
    await asyncio.sleep(0)
    assert isinstance(ended.exception(), UpstreamError)


async def test_streams_are_sampled_one_endpoint_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    table, calls = await busy_table(), list[list[tuple[int, int, float]]]()

    def record(_: SpeedRecord, streams: int, tokens: int, seconds: float, now: float) -> None:
        calls[-1].append((streams, tokens, seconds))

    replace_method(monkeypatch, SpeedRecord, "record_streams", record)
    now = 100.0
    for number in range(2 * round(REVIEW_S / STALL_CHECK_S)):
        if number == 10:
            for live in table.all():
                for connection in live.upstream.connections:
                    connection.data_received(TOKEN)
            await all_relayed(table, events=2)
        calls.append([])
        assert most_per_step(table.check_stalls(now) for _ in range(1)) < MOST_INSTRUCTIONS
        now += STALL_CHECK_S
    assert max(map(len, calls)) == 1
    samples = [sample for call in calls for sample in call]
    assert [streams for streams, *_ in samples] == [0] * ENDPOINTS + [STREAMS] * ENDPOINTS
    assert [tokens for _, tokens, _ in samples] == [0] * ENDPOINTS + [STREAMS] * ENDPOINTS
    for _, _, seconds in samples[ENDPOINTS:]:
        assert seconds == pytest.approx(REVIEW_S + (ENDPOINTS - 1) * STALL_CHECK_S, abs=0.06)


async def test_every_endpoint_is_reviewed_when_all_streams_have_been_sampled() -> None:
    table, reviewed = await busy_table(), list[int]()
    for number in range(ENDPOINTS):
        table.check_stalls(100.0 + number * STALL_CHECK_S)
        reviewed.append(len(table.speed_monitor.reviewed))
    assert reviewed == [0] * (ENDPOINTS - 1) + [ENDPOINTS]


async def test_every_endpoint_is_reviewed_although_samples_of_all_take_longer_than_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed_monitor, "COHORT", 2)
    monkeypatch.setattr(speed_monitor, "STREAMS_AT_ONCE", 1)
    size, rounds = round(1.5 * REVIEW_S / STALL_CHECK_S), 4
    table, *_ = table_of([f"http://127.0.0.1:{port}" for port in range(1, size + 1)])
    for live in table.all():
        open_stream(live.upstream)
    reviews = dict.fromkeys(table.all(), 0)
    for number in range(rounds * size):
        table.check_stalls(100.0 + number * STALL_CHECK_S)
        for live in table.speed_monitor.reviewed:
            reviews[live] += 1
    assert set(reviews.values()) == {rounds}


async def test_a_silence_among_thousands_of_streams_is_found_at_the_first_of_them() -> None:
    pool = (await busy_table()).all()[0].upstream
    now = pool.last_body_at + 3.0

    def measure() -> Iterator[float]:
        yield pool.silence_duration_s(now)

    assert most_per_step(measure()) < 200
    assert pool.silence_duration_s(now) == pytest.approx(3.0)


async def test_a_silence_begins_with_the_oldest_request_after_the_last_output() -> None:
    pool = (await busy_table()).all()[0].upstream
    for connection in pool.connections:
        connection.last_activity_at = pool.last_body_at + 5.0
    next(iter(pool.connections)).last_activity_at = pool.last_body_at + 4.0
    assert pool.silence_duration_s(pool.last_body_at + 7.0) == pytest.approx(3.0)
