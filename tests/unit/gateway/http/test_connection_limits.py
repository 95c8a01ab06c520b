"""Tests of limits for clients without a valid key: connections, incomplete requests, pipelining."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Limits
from gateway.http import connection_limits
from gateway.http.aiohttp_connection import PARSER_SLICE, AiohttpConnection
from gateway.http.client_connection import ClientConnection
from gateway.http.connection_limits import ENDED_AT_ONCE, SWEPT_AT_ONCE, ClientConnections
from gateway.http.fast_connection import MAX_UNREAD, FastConnection
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.request_head import MAX_HEAD_BYTES
from gateway.util.client_networks import Networks
from tests.replacement import stand_in
from tests.unit.gateway.http.connection_harness import (
    FakeBudget,
    FakeTransport,
    Harness,
    request,
    turns,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


class FakeConnection:
    def __init__(self) -> None:
        self.drops = self.aborts = 0
        self.swept_at = list[float]()
        self.is_late = False

    def drop_unread(self) -> None:
        self.drops += 1

    def abort(self) -> None:
        self.aborts += 1

    def sweep(self, now: float) -> bool:
        self.swept_at.append(now)
        return self.is_late


def new_connections(
    trusted: Networks | None = None,
) -> tuple[ClientConnections, FakeBudget, list[str]]:
    budget, refused = FakeBudget(), list[str]()
    return ClientConnections(budget, trusted or Networks(()), refused.append), budget, refused


def new_connection() -> ClientConnection:
    return cast(ClientConnection, FakeConnection())


def new_protocol(harness: Harness, kind: str) -> FastConnection | AiohttpConnection:
    return harness.fast_connection() if kind == "fast" else harness.aiohttp_connection()


def drops(connection: ClientConnection) -> int:
    return cast(FakeConnection, connection).drops


def test_connections_of_one_client_are_limited_and_others_are_not() -> None:
    everyone, _, refused = new_connections()
    limits = Limits(connections=6, connections_per_address=2)
    mine = [new_connection() for _ in range(3)]
    assert [everyone.admit(each, "192.0.2.1", limits) for each in mine] == [True, True, False]
    assert everyone.admit(new_connection(), "192.0.2.2", limits)
    assert [everyone.admit(new_connection(), f"2001:db8::{n}", limits) for n in range(3)] == [
        True,
        True,
        False,
    ]
    everyone.remove(mine[0])
    everyone.remove(mine[2])
    assert everyone.admit(new_connection(), "192.0.2.1", limits)
    assert everyone.admit(new_connection(), "192.0.2.3", limits)
    assert not everyone.admit(new_connection(), "192.0.2.4", limits)
    assert refused == ["connections_per_address"] * 2 + ["connections"]


def test_a_thousand_clients_behind_one_address_are_admitted_by_default() -> None:
    everyone, _, refused = new_connections()
    limits = Limits()
    results = [everyone.admit(new_connection(), "192.0.2.1", limits) for _ in range(10_000)]
    assert all(results[: 2 * 1_000])  # two connections for each client
    assert (results[-1], set(refused)) == (False, {"connections_per_address"})
    assert everyone.admit(new_connection(), "192.0.2.2", limits)


def test_a_trusted_proxy_is_exempt_from_the_limit_per_client() -> None:
    everyone, _, refused = new_connections(Networks(("10.0.0.0/8",)))
    limits = Limits(connections=5, connections_per_address=1)
    assert [everyone.admit(new_connection(), "10.0.0.9", limits) for _ in range(6)] == [
        True
    ] * 5 + [False]
    assert refused == ["connections"]


def test_no_counter_remains_after_the_last_connection_of_a_client() -> None:
    everyone, _, _ = new_connections()
    some = [new_connection() for _ in range(100)]
    for number, each in enumerate(some):
        assert everyone.admit(each, f"192.0.2.{number}", Limits())
    assert len(everyone) == len(everyone._per_client) == 100
    for each in some:
        everyone.remove(each)
    assert not everyone._per_client
    assert len(everyone) == 0


def test_the_oldest_unread_bytes_are_dropped_when_the_budget_is_used_up() -> None:
    everyone, budget, refused = new_connections()
    first, second, third = new_connection(), new_connection(), new_connection()
    for each in (first, second, third):
        everyone.admit(each, "192.0.2.1", Limits())
    everyone.set_unread(first, 40, 100)
    everyone.set_unread(second, 40, 100)
    everyone.set_unread(first, 50, 100)
    assert (drops(first), budget.reserved) == (0, 90)
    everyone.set_unread(third, 20, 100)
    assert [drops(each) for each in (first, second, third)] == [1, 0, 0]
    assert (everyone.unread_bytes, budget.reserved, refused) == (60, 60, ["unread_budget"])


@pytest.mark.parametrize("leave", ["closes", "moves to the other parser"])
def test_a_connection_that_leaves_with_unread_bytes_does_not_affect_others(leave: str) -> None:
    everyone, budget, refused = new_connections()
    other, leaving = new_connection(), new_connection()
    for each in (other, leaving):
        assert everyone.admit(each, "192.0.2.1", Limits())
        everyone.set_unread(each, 500, 10_000)
    if leave == "closes":
        everyone.remove(leaving)
    else:
        everyone.replace(leaving, new_connection())
    assert (drops(other), drops(leaving), refused) == (0, 0, [])
    assert everyone.unread_bytes == budget.reserved == 500


def test_unread_bytes_beyond_the_body_budget_are_dropped() -> None:
    everyone, budget, _ = new_connections()
    budget.capacity = 50
    first, second = new_connection(), new_connection()
    everyone.set_unread(first, 40, 100)
    everyone.set_unread(second, 20, 100)
    assert (drops(first), drops(second), budget.reserved) == (0, 1, 40)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), max_size=80))
def test_the_budget_equals_the_unread_bytes_of_all_connections(
    steps: list[tuple[int, int]],
) -> None:
    everyone, budget, _ = new_connections()
    some = [new_connection() for _ in range(8)]
    for number, unread in steps:
        everyone.set_unread(some[number], unread, 100)
        assert everyone.unread_bytes == budget.reserved == sum(everyone._unread.values()) <= 100


async def test_reading_resumes_only_when_few_bytes_are_left() -> None:
    # A long backlog is processed first; reading does not resume after each response.
    harness = Harness(slow=True)
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    many = request(b"x" * 1000) * 200
    connection.data_received(many)
    assert transport.paused
    reads = 0
    while transport.paused:
        reads += 1
        assert harness.budget.reserved == harness.connections.unread_bytes > MAX_UNREAD
        await turns()
    served = len(harness.served)
    assert (200 - served) * len(many) // 200 <= MAX_UNREAD + len(many) // 20
    assert reads > 10
    for _ in range(200):
        await turns()
    assert len(harness.served) == 200
    assert harness.budget.reserved == 0
    transport.close()
    await turns()


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
async def test_pipelined_requests_of_one_connection_take_turns_with_others(kind: str) -> None:
    harness = Harness()
    connections = [new_protocol(harness, kind) for _ in range(2)]
    transports = [FakeTransport(connection) for connection in connections]
    for connection, transport, mark in zip(
        connections, transports, ("first", "second"), strict=True
    ):
        connection.connection_made(transport)
        connection.data_received(request(b"{}", f"X-Mark: {mark}") * 20)
    await turns()
    await turns()
    await turns()
    marks = [mark for _, _, mark in harness.served[2:20]]
    assert all(earlier != later for earlier, later in pairwise(marks))
    for transport in transports:
        transport.close()
    await turns()


async def test_a_backlog_is_not_copied_for_every_request_in_it() -> None:
    harness = Harness()
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    copied = CountingBytes(request(b"x" * 50) * 1500)
    connection.data_received(stand_in(bytes, copied))
    connection.data_received(b"")
    for _ in range(140):
        await turns()
    assert len(harness.served) == 1500
    assert copied.bytes < 2 * len(copied)
    transport.close()
    await turns()


class CountingBytes(bytes):
    counts: list[int]

    def __new__(cls, data: bytes, counts: list[int] | None = None) -> CountingBytes:
        counting = super().__new__(cls, data)
        counting.counts = [] if counts is None else counts
        return counting

    @property
    def bytes(self) -> int:
        return sum(self.counts)

    def __getitem__(self, key: object) -> CountingBytes:  # type: ignore[override]
        part = super().__getitem__(key)  # type: ignore[call-overload]
        self.counts.append(len(part))
        return CountingBytes(part, self.counts)


async def test_a_connection_whose_pipelined_requests_are_dropped_closes_after_its_response() -> (
    None
):
    harness = Harness(slow=True)
    harness.budget.capacity = 100_000
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    connection.data_received(request(b"first"))
    connection.data_received(request(b"x" * 200_000))
    assert transport.paused
    assert harness.budget.reserved == 0
    await turns()
    await turns()
    assert [body for _, body, _ in harness.served] == [b"first"]
    assert b"connection: close" in transport.text
    assert transport.text.count(b"HTTP/1.1 ") == 1
    assert transport.half_closed
    assert harness.refused == ["unread_budget"]
    transport.close()
    await turns()


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
async def test_the_kernels_buffer_of_a_paused_connection_counts_as_unread(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A connection that loses its bytes is aborted, because only that frees the kernel's buffer.
    monkeypatch.setattr(connection_limits, "ABORT_DELAY_S", (0.0, 0.0))
    harness = Harness(slow=True)
    harness.limits = Limits(unread_budget="1MiB")  # type: ignore[arg-type]
    transports = []
    for _ in range(2):
        protocol = new_protocol(harness, kind)
        transport = BufferedTransport(protocol, 400_000)
        protocol.connection_made(transport)
        harness.connections.admit(protocol, "192.0.2.1", harness.limits)
        protocol.data_received(request(b"x" * 1000) * 80)
        transports.append(transport)
    assert [transport.aborted for transport in transports] == [False, False]
    assert harness.budget.reserved > 2 * 400_000
    newest = harness.fast_connection()
    transports.append(BufferedTransport(newest, 400_000))
    newest.connection_made(transports[-1])
    newest.data_received(request(b"x" * 1000) * 80)
    assert [transport.aborted for transport in transports] == [False, False, False]
    assert transports[0].paused
    await turns()
    assert [transport.aborted for transport in transports] == [True, False, False]
    for _ in range(40):
        await turns()
    assert harness.budget.reserved == 0
    for transport in transports:
        transport.close()
    await turns()


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
async def test_the_rest_of_a_dropped_request_is_never_served_as_a_request(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "ABORT_DELAY_S", (0.02, 0.02))
    harness = Harness()
    protocol = new_protocol(harness, kind)
    transport = BufferedTransport(protocol, 400_000)
    protocol.connection_made(transport)
    harness.connections.admit(protocol, "192.0.2.1", harness.limits)
    hidden = request(b'{"hidden":1}', "X-Mark: hidden")
    pipelined = request(b"y" * 100_000 + hidden)
    # The second request waits for its turn while its bytes are dropped.
    protocol.data_received(request(b"{}") + pipelined[: -len(hidden)])
    protocol.drop_unread()
    for _ in range(5):
        await turns()
    protocol.data_received(hidden)  # these bytes were in the kernel's buffer
    for _ in range(2000):
        if transport.aborted:
            break
        await asyncio.sleep(0.005)
    assert transport.aborted
    await turns()
    assert "hidden" not in [mark for _, _, mark in harness.served]
    assert not len(harness.connections)
    transport.close()
    await turns()


async def test_clients_whose_bytes_were_dropped_cannot_connect_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_DELAYED_BYTES", 1000)
    monkeypatch.setattr(connection_limits, "ABORT_DELAY_S", (0.02, 0.02))
    everyone, _, _ = new_connections()
    dropped = [FakeConnection() for _ in range(4)]
    for connection in dropped[:3]:
        everyone.abort_later(connection, 400)
    assert [each.aborts for each in dropped[:3]] == [0, 0, 1]  # the kernel may hold 800 bytes now
    while not dropped[1].aborts:
        await asyncio.sleep(0.005)
    everyone.abort_later(dropped[3], 1000)
    assert [each.aborts for each in dropped] == [1, 1, 1, 0]


def test_one_connection_cannot_displace_the_unread_bytes_of_all_others() -> None:
    everyone, budget, _ = new_connections()
    large, other = new_connection(), new_connection()
    everyone.set_unread(other, 1000, 2**24)
    everyone.set_unread(large, 2**23, 2**24)
    assert (drops(large), drops(other), budget.reserved) == (1, 0, 1000)


class BufferedTransport(FakeTransport):
    """A fake transport whose socket has a receive buffer of this size.

    `aborted` becomes true when it is aborted.
    """

    def __init__(self, protocol: asyncio.Protocol, receive_buffer: int) -> None:
        super().__init__(protocol)
        self._socket = Mock(fileno=lambda: 1, getsockopt=lambda *_: receive_buffer)
        self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else super().get_extra_info(name, default)

    def abort(self) -> None:
        self.aborted = True
        self.close()


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
async def test_the_oldest_unfinished_head_is_refused_for_a_newer_one(kind: str) -> None:
    harness = Harness()
    harness.limits = Limits(unread_budget="10KiB")  # type: ignore[arg-type]
    transports = []
    for _ in range(4):
        protocol = new_protocol(harness, kind)
        transport = FakeTransport(protocol)
        protocol.connection_made(transport)
        harness.connections.admit(protocol, "192.0.2.1", harness.limits)
        transports.append(transport)
        await transport.deliver(request()[:-4] + b"X-Long: " + b"a" * 4000)
    assert [b" 429 " in transport.text for transport in transports] == [True, True, False, False]
    assert harness.budget.reserved <= 10 * 1024
    for transport in transports:
        transport.close()
    await turns()
    assert harness.budget.reserved == 0


async def test_a_head_is_limited_to_64_kib() -> None:
    # Each line is within its own limit, but 128 fields of 8 KiB would add up to 1 MiB.
    harness = Harness()
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    sent, most = 0, 0
    await transport.deliver(b"GET /v1/models HTTP/1.1\r\nHost: test\r\n")
    while not transport.half_closed:
        line = b"X-%d: %b\r\n" % (sent, b"a" * 7000)
        sent += len(line)
        await transport.deliver(line)
        most = max(most, harness.budget.reserved)
        assert sent < 2 * MAX_HEAD_BYTES
    assert MAX_HEAD_BYTES - PARSER_SLICE < most <= MAX_HEAD_BYTES
    assert transport.text.startswith(b"HTTP/1.1 431 ")
    assert harness.budget.reserved == 0
    transport.close()
    await turns()


async def test_aiohttp_parses_one_request_at_a_time() -> None:
    # Parsed heads take many times their size, so that only one may be queued.
    harness = Harness(slow=True)
    connection = harness.aiohttp_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    harness.connections.admit(connection, "192.0.2.1", harness.limits)
    await transport.deliver(request(b"{}", "X_Odd: 1")[:-1])
    connection.data_received(b"}" + request(b"{}", "X_Odd: 2") * 2000)
    most = 0
    for _ in range(2000):
        most = max(most, len(connection._messages))
        await turns()
    assert most <= 1
    assert len(harness.served) == 2001
    assert not transport.paused
    assert harness.budget.reserved == 0
    transport.close()
    await turns()


async def test_the_aiohttp_connection_pauses_reading_at_its_limit() -> None:
    harness = Harness(slow=True)
    connection = harness.aiohttp_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    harness.connections.admit(connection, "192.0.2.1", harness.limits)
    connection.data_received(request(b"{}", "X_Odd: 1") * 2000)
    assert transport.paused
    assert harness.budget.reserved > MAX_UNREAD
    while transport.paused:
        await turns()
    assert MAX_UNREAD - PARSER_SLICE <= harness.budget.reserved <= MAX_UNREAD
    transport.close()
    await turns()
    assert harness.budget.reserved == 0


async def test_a_connection_switches_to_aiohttp_with_its_backlog_and_reads_on() -> None:
    harness = Harness(slow=True)
    connection = harness.fast_connection()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    odd = request(b"{}", "X_Odd: 1")
    connection.data_received(request(b"first"))
    connection.data_received(odd * 1200)
    assert transport.paused
    for _ in range(1300):
        await turns()
    assert isinstance(transport.protocol, AiohttpConnection)
    assert len(harness.served) == 1201
    assert not transport.paused
    assert len(harness.connections) == 1
    assert harness.budget.reserved == 0
    transport.close()
    await turns()
    assert len(harness.connections) == 0


@pytest.mark.parametrize("kind", ["fast", "aiohttp"])
async def test_a_refused_body_is_freed_while_its_connection_lingers(kind: str) -> None:
    harness = Harness()

    def refuse(body_bytes: int) -> None:
        if body_bytes > 150_000:
            raise GatewayError(Failure.OVERLOADED, "the test's memory for bodies is full")

    harness.reserve = refuse
    protocol = new_protocol(harness, kind)
    transport = FakeTransport(protocol)
    protocol.connection_made(transport)
    odd = () if kind == "fast" else ("X_Odd: 1",)
    await transport.deliver(request(b"", *odd, length="Content-Length: 300000") + b"x" * 100_000)
    await transport.deliver(b"x" * 100_000)
    assert transport.half_closed
    assert not protocol._unread
    assert not getattr(protocol, "_pieces", None)
    transport.close()
    await turns()


@pytest.mark.parametrize(("count", "sweeps"), [(3, 1), (SWEPT_AT_ONCE, 1), (3 * SWEPT_AT_ONCE, 3)])
async def test_every_connection_is_swept_in_its_turn(count: int, sweeps: int) -> None:
    connections, _, _ = new_connections()
    opened = [FakeConnection() for _ in range(count)]
    for number, connection in enumerate(opened):
        address = f"10.{number >> 8}.{number & 255}.1"
        assert connections.admit(cast(ClientConnection, connection), address, Limits())
    for turn in range(2 * sweeps):
        await connections.sweep(float(turn))
    assert {len(connection.swept_at) for connection in opened} == {2}
    assert max(connection.swept_at[0] for connection in opened) == sweeps - 1.0


async def test_a_connection_that_has_closed_is_not_swept() -> None:
    connections, _, _ = new_connections()
    opened = [FakeConnection() for _ in range(2 * SWEPT_AT_ONCE)]
    for number, connection in enumerate(opened):
        connections.admit(
            cast(ClientConnection, connection), f"10.{number >> 8}.{number & 255}.1", Limits()
        )
    await connections.sweep(0.0)
    (waiting, *_) = [connection for connection in opened if not connection.swept_at]
    connections.remove(cast(ClientConnection, waiting))
    await connections.sweep(1.0)
    assert waiting.swept_at == []


async def test_late_connections_are_ended_over_several_loop_iterations() -> None:
    connections, _, _ = new_connections()
    opened = [FakeConnection() for _ in range(3 * ENDED_AT_ONCE)]
    for number, connection in enumerate(opened):
        connection.is_late = True
        connections.admit(cast(ClientConnection, connection), f"10.0.{number}.1", Limits())
    sweep = asyncio.create_task(connections.sweep(0.0))
    for iteration in range(1, 4):
        await asyncio.sleep(0)
        swept = sum(bool(connection.swept_at) for connection in opened)
        assert swept == iteration * ENDED_AT_ONCE
    await sweep
