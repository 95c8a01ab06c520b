"""What clients may hold before they have shown a key: connections, unfinished heads and requests sent ahead."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answer import Failure, GatewayError
from gateway.config import Limits
from gateway.connections import ClientConnections
from gateway.front import MAX_AHEAD
from gateway.lobby import MAX_HEAD, SLICE, Lobby
from gateway.networks import Networks
from gateway.talk import Talk
from tests.replaced import stand_in
from tests.unit.gateway.seam import Bytes, House, Pipe, request, turns


class Dropped:
    """A connection that only notes that its unread bytes were dropped."""

    def __init__(self) -> None:
        self.drops = 0

    def drop_unread(self) -> None:
        self.drops += 1


def connections(trusted: Networks | None = None) -> tuple[ClientConnections, Bytes, list[str]]:
    budget, refused = Bytes(), list[str]()
    return ClientConnections(budget, trusted or Networks(()), refused.append), budget, refused


def one() -> Talk:
    return cast(Talk, Dropped())


def drops(connection: Talk) -> int:
    return cast(Dropped, connection).drops


def test_connections_of_one_client_are_limited_and_others_are_not() -> None:
    all_of_them, _, refused = connections()
    limits = Limits(connections=6, connections_per_address=2)
    mine = [one() for _ in range(3)]
    assert [all_of_them.admit(each, "192.0.2.1", limits) for each in mine] == [True, True, False]
    assert all_of_them.admit(one(), "192.0.2.2", limits)
    assert [all_of_them.admit(one(), f"2001:db8::{n}", limits) for n in range(3)] == [True, True, False]
    all_of_them.remove(mine[0])
    all_of_them.remove(mine[2])
    assert all_of_them.admit(one(), "192.0.2.1", limits)
    assert all_of_them.admit(one(), "192.0.2.3", limits)
    assert not all_of_them.admit(one(), "192.0.2.4", limits)
    assert refused == ["connections_per_address"] * 2 + ["connections"]


def test_a_trusted_proxy_may_have_as_many_connections_as_all() -> None:
    all_of_them, _, refused = connections(Networks(("10.0.0.0/8",)))
    limits = Limits(connections=5, connections_per_address=1)
    assert [all_of_them.admit(one(), "10.0.0.9", limits) for _ in range(6)] == [True] * 5 + [False]
    assert refused == ["connections"]


def test_counters_go_with_the_last_connection_of_a_client() -> None:
    all_of_them, _, _ = connections()
    some = [one() for _ in range(100)]
    for number, each in enumerate(some):
        assert all_of_them.admit(each, f"192.0.2.{number}", Limits())
    assert len(all_of_them) == len(all_of_them._per_client) == 100
    for each in some:
        all_of_them.remove(each)
    assert not all_of_them._per_client
    assert len(all_of_them) == 0


def test_the_oldest_unread_bytes_are_dropped_when_the_budget_is_used_up() -> None:
    all_of_them, budget, refused = connections()
    first, second, third = one(), one(), one()
    for each in (first, second, third):
        all_of_them.admit(each, "192.0.2.1", Limits())
    all_of_them.hold(first, 40, 100)
    all_of_them.hold(second, 40, 100)
    all_of_them.hold(first, 50, 100)
    assert (drops(first), budget.held) == (0, 90)
    all_of_them.hold(third, 20, 100)
    assert [drops(each) for each in (first, second, third)] == [1, 0, 0]
    assert (all_of_them.unread_bytes, budget.held, refused) == (60, 60, ["unread_budget"])


@pytest.mark.parametrize("leave", ["closes", "moves to the other parser"])
def test_a_connection_that_leaves_with_unread_bytes_costs_others_none(leave: str) -> None:
    all_of_them, budget, refused = connections()
    other, leaving = one(), one()
    for each in (other, leaving):
        assert all_of_them.admit(each, "192.0.2.1", Limits())
        all_of_them.hold(each, 500, 10_000)
    if leave == "closes":
        all_of_them.remove(leaving)
    else:
        all_of_them.replace(leaving, one())
    assert (drops(other), drops(leaving), refused) == (0, 0, [])
    assert all_of_them.unread_bytes == budget.held == 500


def test_bytes_that_the_body_budget_has_no_room_for_are_dropped() -> None:
    all_of_them, budget, _ = connections()
    budget.most = 50
    first, second = one(), one()
    all_of_them.hold(first, 40, 100)
    all_of_them.hold(second, 20, 100)
    assert (drops(first), drops(second), budget.held) == (0, 1, 40)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), max_size=80))
def test_what_is_counted_is_what_connections_hold(steps: list[tuple[int, int]]) -> None:
    all_of_them, budget, _ = connections()
    some = [one() for _ in range(8)]
    for number, unread in steps:
        all_of_them.hold(some[number], unread, 100)
        assert all_of_them.unread_bytes == budget.held == sum(all_of_them._unread.values()) <= 100


async def test_reading_resumes_only_when_few_bytes_are_left() -> None:
    """Each answer used to let another read in while the backlog was still above the bound."""
    house = House(slow=True)
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    many = request(b"x" * 1000) * 200
    front.data_received(many)
    assert pipe.paused
    reads = 0
    while pipe.paused:
        reads += 1
        assert house.budget.held == house.fronts.unread_bytes > MAX_AHEAD
        await turns()
    served = len(house.served)
    assert (200 - served) * len(many) // 200 <= MAX_AHEAD + len(many) // 20
    assert reads > 10
    for _ in range(200):
        await turns()
    assert len(house.served) == 200
    assert house.budget.held == 0
    pipe.close()
    await turns()


@pytest.mark.parametrize("kind", ["front", "lobby"])
async def test_pipelined_requests_of_one_connection_take_turns_with_others(kind: str) -> None:
    house = House()
    fronts = [house.front() if kind == "front" else house.lobby() for _ in range(2)]
    pipes = [Pipe(front) for front in fronts]
    for front, pipe, mark in zip(fronts, pipes, ("first", "second"), strict=True):
        front.connection_made(pipe)
        front.data_received(request(b"{}", f"X-Mark: {mark}") * 20)
    await turns()
    await turns()
    await turns()
    assert [mark for _, _, mark in house.served[2:20]] == ["first", "second"] * 9
    for pipe in pipes:
        pipe.close()
    await turns()


async def test_a_backlog_is_not_copied_for_every_request_in_it() -> None:
    """Bytes that are copied out of it, for each one that came: bodies, and the rest of each read."""
    house = House()
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    copied = Slices(request(b"x" * 50) * 1500)
    front.data_received(stand_in(bytes, copied))
    front.data_received(b"")
    for _ in range(140):
        await turns()
    assert len(house.served) == 1500
    assert copied.bytes < 2 * len(copied)
    pipe.close()
    await turns()


class Slices(bytes):
    """Bytes that count what is sliced out of them, and whose slices do."""

    counts: list[int]

    def __new__(cls, data: bytes, counts: list[int] | None = None) -> Slices:
        made = super().__new__(cls, data)
        made.counts = [] if counts is None else counts
        return made

    @property
    def bytes(self) -> int:
        return sum(self.counts)

    def __getitem__(self, key: object) -> Slices:  # type: ignore[override]
        found = super().__getitem__(key)  # type: ignore[call-overload]
        self.counts.append(len(found))
        return Slices(found, self.counts)


async def test_a_connection_whose_requests_ahead_are_dropped_ends_after_its_answer() -> None:
    house = House(slow=True)
    house.budget.most = 100_000
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    front.data_received(request(b"first"))
    front.data_received(request(b"x" * 200_000))
    assert pipe.paused
    assert house.budget.held == 0
    await turns()
    await turns()
    assert [body for _, body, _ in house.served] == [b"first"]
    assert b"connection: close" in pipe.text
    assert pipe.text.count(b"HTTP/1.1 ") == 1
    assert pipe.half_closed
    assert house.refused == ["unread_budget"]
    pipe.close()
    await turns()


@pytest.mark.parametrize("kind", ["front", "lobby"])
async def test_bytes_that_the_kernel_holds_of_a_paused_connection_count(kind: str) -> None:
    """A connection that loses its bytes is cut: only that frees what the kernel holds."""
    house = House(slow=True)
    house.limits = Limits(unread_budget="1MiB")  # type: ignore[arg-type]
    pipes = []
    for _ in range(2):
        protocol = house.front() if kind == "front" else house.lobby()
        pipe = Buffered(protocol, 400_000)
        protocol.connection_made(pipe)
        house.fronts.admit(protocol, "192.0.2.1", house.limits)
        protocol.data_received(request(b"x" * 1000) * 80)
        pipes.append(pipe)
    assert [pipe.aborted for pipe in pipes] == [False, False]
    assert house.budget.held > 2 * 400_000
    protocol = house.front()
    pipes.append(Buffered(protocol, 400_000))
    protocol.connection_made(pipes[-1])
    protocol.data_received(request(b"x" * 1000) * 80)
    assert [pipe.aborted for pipe in pipes] == [True, False, False]
    for _ in range(40):
        await turns()
    assert house.budget.held == 0
    for pipe in pipes:
        pipe.close()
    await turns()


def test_a_connection_may_not_take_the_place_of_all_others() -> None:
    all_of_them, budget, _ = connections()
    mine, other = one(), one()
    all_of_them.hold(other, 1000, 2**24)
    all_of_them.hold(mine, 2**23, 2**24)
    assert (drops(mine), drops(other), budget.held) == (1, 0, 1000)


class Buffered(Pipe):
    """A transport whose socket has so many bytes of receive buffer. `aborted`: it was cut."""

    def __init__(self, protocol: asyncio.Protocol, receive_bytes: int) -> None:
        super().__init__(protocol)
        self._socket = Mock(fileno=lambda: 1, getsockopt=lambda *_: receive_bytes)
        self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else super().get_extra_info(name, default)

    def abort(self) -> None:
        self.aborted = True
        self.close()


@pytest.mark.parametrize("kind", ["front", "lobby"])
async def test_the_oldest_unfinished_head_is_refused_for_a_newer_one(kind: str) -> None:
    house = House()
    house.limits = Limits(unread_budget="10KiB")  # type: ignore[arg-type]
    pipes = []
    for _ in range(4):
        protocol = house.front() if kind == "front" else house.lobby()
        pipe = Pipe(protocol)
        protocol.connection_made(pipe)
        house.fronts.admit(protocol, "192.0.2.1", house.limits)
        pipes.append(pipe)
        await pipe.deliver(request()[:-4] + b"X-Long: " + b"a" * 4000)
    assert [b" 429 " in pipe.text for pipe in pipes] == [True, True, False, False]
    assert house.budget.held <= 10 * 1024
    for pipe in pipes:
        pipe.close()
    await turns()
    assert house.budget.held == 0


async def test_a_head_takes_64_kib_at_most() -> None:
    """Line by line, each below every limit of its own: 128 fields of 8 KiB came to 1.9 MiB."""
    house = House()
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    sent, most = 0, 0
    await pipe.deliver(b"GET /v1/models HTTP/1.1\r\nHost: test\r\n")
    while not pipe.half_closed:
        line = b"X-%d: %b\r\n" % (sent, b"a" * 7000)
        sent += len(line)
        await pipe.deliver(line)
        most = max(most, house.budget.held)
        assert sent < 2 * MAX_HEAD
    assert MAX_HEAD - SLICE < most <= MAX_HEAD
    assert pipe.text.startswith(b"HTTP/1.1 431 ")
    assert house.budget.held == 0
    pipe.close()
    await turns()


async def test_one_request_at_a_time_leaves_the_parser_of_the_lobby() -> None:
    """Heads are many times as large once they are parsed."""
    house = House(slow=True)
    lobby = house.lobby()
    pipe = Pipe(lobby)
    lobby.connection_made(pipe)
    house.fronts.admit(lobby, "192.0.2.1", house.limits)
    await pipe.deliver(request(b"{}", "X_Odd: 1")[:-1])
    lobby.data_received(b"}" + request(b"{}", "X_Odd: 2") * 2000)
    most = 0
    for _ in range(2000):
        most = max(most, len(lobby._messages))
        await turns()
    assert most <= 1
    assert len(house.served) == 2001
    assert not pipe.paused
    assert house.budget.held == 0
    pipe.close()
    await turns()


async def test_the_lobby_reads_no_more_than_it_may_keep() -> None:
    house = House(slow=True)
    lobby = house.lobby()
    pipe = Pipe(lobby)
    lobby.connection_made(pipe)
    house.fronts.admit(lobby, "192.0.2.1", house.limits)
    lobby.data_received(request(b"{}", "X_Odd: 1") * 2000)
    assert pipe.paused
    assert house.budget.held > MAX_AHEAD
    while pipe.paused:
        await turns()
    assert MAX_AHEAD - SLICE <= house.budget.held <= MAX_AHEAD
    pipe.close()
    await turns()
    assert house.budget.held == 0


async def test_a_connection_moves_to_the_lobby_with_its_backlog_and_reads_on() -> None:
    house = House(slow=True)
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    odd = request(b"{}", "X_Odd: 1")
    front.data_received(request(b"first"))
    front.data_received(odd * 1200)
    assert pipe.paused
    for _ in range(1300):
        await turns()
    assert isinstance(pipe.protocol, Lobby)
    assert len(house.served) == 1201
    assert not pipe.paused
    assert len(house.fronts) == 1
    assert house.budget.held == 0
    pipe.close()
    await turns()
    assert len(house.fronts) == 0


async def test_a_body_in_tiny_pieces_is_kept_in_few(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    front = house.front()
    pipe = Pipe(front)
    front.connection_made(pipe)
    sent = request(b"x" * 40_000)
    front.data_received(sent[:-40_000])
    most = 0
    for _ in range(20_000):
        front.data_received(b"xx")
        most = max(most, len(front._pieces))
    await turns()
    assert most < 12
    assert [body for _, body, _ in house.served] == [b"x" * 40_000]
    pipe.close()
    await turns()


async def test_a_body_of_many_tiny_chunks_is_parsed_in_many_turns() -> None:
    house = House()
    lobby, other = house.lobby(), house.front()
    pipes = [Pipe(lobby), Pipe(other)]
    for protocol, pipe in zip((lobby, other), pipes, strict=True):
        protocol.connection_made(pipe)
    chunks = b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n"
    lobby.data_received(request(b"", length="Transfer-Encoding: chunked") + chunks)
    for _ in range(5):
        await turns()
        other.data_received(request())
    assert [body for _, body, _ in house.served] == [b"{}"] * 5
    for _ in range(30):
        await turns()
    assert house.served[-1][1] == b"x" * 10_000
    for pipe in pipes:
        pipe.close()
    await turns()


@pytest.mark.parametrize("kind", ["front", "lobby"])
async def test_a_refused_body_is_freed_while_its_connection_lingers(kind: str) -> None:
    house = House()

    def refuse(body_bytes: int) -> None:
        if body_bytes > 150_000:
            raise GatewayError(Failure.OVERLOADED, "full")

    house.hold = refuse
    protocol = house.front() if kind == "front" else house.lobby()
    pipe = Pipe(protocol)
    protocol.connection_made(pipe)
    odd = () if kind == "front" else ("X_Odd: 1",)
    await pipe.deliver(request(b"", *odd, length="Content-Length: 300000") + b"x" * 100_000)
    await pipe.deliver(b"x" * 100_000)
    assert pipe.half_closed
    kept = [value for name in ("_ahead", "_pieces") if (value := getattr(protocol, name, None))]
    assert not kept
    pipe.close()
    await turns()
