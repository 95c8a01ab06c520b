"""Tests that simultaneous requests of many clients begin in turn, and that none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from gateway.config import Limits
from gateway.http import connection_fairness
from gateway.http.aiohttp_connection import WEIGHT, AiohttpConnection
from gateway.http.client_timeouts import HEAD
from gateway.http.connection_fairness import (
    BEGINNINGS,
    LATER_BEGINNINGS,
    MAX_HELD_BYTES,
    MAX_SKIPPED,
    RequestTurns,
)
from gateway.http.fast_connection import MAX_UNREAD, FastConnection
from tests.unit.gateway.http.connection_harness import FakeTransport, Harness, request, turns

GET = b"GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n"


class Client:
    def __init__(self, begun: list[str], name: str = "", *, has_left: bool = False) -> None:
        self._begun, self._name, self._has_left = begun, name, has_left

    def begin(self) -> bool:
        if not self._has_left:
            self._begun.append(self._name)
        return not self._has_left


class BrokenClient:
    def begin(self) -> bool:
        raise RuntimeError("the test's client cannot begin its turn")


def new_turns() -> RequestTurns:
    return RequestTurns(asyncio.get_running_loop())


async def test_few_begin_per_iteration_in_order() -> None:
    waiting, begun = new_turns(), list[str]()
    for number in range(9):
        waiting.wait(Client(begun, f"{number}"), "192.0.2.1")
    counts = [0]
    while counts[-1] < 9:
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert {later - earlier for earlier, later in pairwise(counts[:-1])} == {BEGINNINGS}
    assert begun == [f"{number}" for number in range(9)]


@pytest.mark.parametrize("other", ["192.0.2.2", "2001:db8:1::1"])
async def test_one_client_does_not_wait_behind_all_those_of_another_address(other: str) -> None:
    waiting, begun = new_turns(), list[str]()
    for number in range(1000):
        waiting.wait(Client(begun, "many"), f"2001:db8::{number}")  # one /64: one client
    waiting.wait(Client(begun, "one"), other)
    await asyncio.sleep(0)
    assert Counter(begun) == {"many": BEGINNINGS - 1, "one": 1}


async def test_clients_that_have_left_use_no_turns() -> None:
    waiting, begun = new_turns(), list[str]()
    for _ in range(MAX_SKIPPED + 1):
        waiting.wait(Client(begun, has_left=True), "192.0.2.1")
    for _ in range(BEGINNINGS):
        waiting.wait(Client(begun, "present"), "192.0.2.1")
    await asyncio.sleep(0)
    assert not begun  # looking at many clients that have left takes a turn too
    await asyncio.sleep(0)
    assert begun == ["present"] * BEGINNINGS


async def test_all_that_wait_begin_when_the_gateway_stops() -> None:
    waiting, begun = new_turns(), list[str]()
    for number in range(100):
        waiting.wait(Client(begun, f"{number}"), f"192.0.2.{number % 3}", 10)
    waiting.wait(BrokenClient(), "192.0.2.3")
    assert waiting.begin_all()
    assert Counter(begun) == Counter(f"{number}" for number in range(100))
    assert not waiting.begin_all()
    assert waiting.may_begin("192.0.2.1", MAX_HELD_BYTES)


async def test_one_that_cannot_begin_does_not_stop_the_others() -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    waiting, begun = new_turns(), list[str]()
    waiting.wait(BrokenClient(), "192.0.2.1")
    for _ in range(2 * BEGINNINGS):
        waiting.wait(Client(begun), "192.0.2.1")
    await turns()
    assert (len(failures), len(begun)) == (1, 2 * BEGINNINGS)


async def test_a_request_begins_at_once_if_few_have_begun_and_none_waits() -> None:
    waiting, begun = new_turns(), list[str]()
    assert [waiting.may_begin("192.0.2.1", 1) for _ in range(BEGINNINGS + 1)] == [
        *[True] * BEGINNINGS,
        False,
    ]
    await asyncio.sleep(0)
    assert waiting.may_begin("192.0.2.1", 1)
    for _ in range(2):
        waiting.wait(Client(begun), "192.0.2.1")
    assert not waiting.may_begin("192.0.2.1", 1)
    await turns()
    assert waiting.may_begin("192.0.2.1", 1)
    await turns()


async def test_requests_begin_at_once_where_those_that_wait_take_too_much_memory() -> None:
    waiting, begun = new_turns(), list[str]()
    for _ in range(BEGINNINGS):
        assert waiting.may_begin("192.0.2.1", 1)
    waiting.wait(Client(begun), "192.0.2.1", MAX_HELD_BYTES)
    assert waiting.may_begin("192.0.2.2", 1)
    waiting.wait(Client(begun), "192.0.2.1")
    await asyncio.sleep(0)
    assert not waiting.may_begin("192.0.2.2", 1)  # the one that held them has begun
    await turns()


def connect(harness: Harness, number: int) -> list[FakeTransport]:
    transports = [FakeTransport(harness.fast_connection()) for _ in range(number)]
    for transport in transports:
        transport.protocol.connection_made(transport)
    return transports


def hold_one(harness: Harness, data: bytes) -> tuple[FakeTransport, list[FakeTransport]]:
    # Return a connection whose first bytes are `data`, which wait, and those that are before it.
    others = connect(harness, BEGINNINGS)
    for transport in others:
        transport.protocol.data_received(request())
    (held,) = connect(harness, 1)
    held.protocol.data_received(data)
    assert len(harness.served) == BEGINNINGS
    return held, others


async def hold_later(harness: Harness, data: bytes) -> tuple[FakeTransport, list[FakeTransport]]:
    # Return a connection whose second request, `data`, waits, and those that are before it.
    held, *others = await connect_served(harness, LATER_BEGINNINGS + 1)
    for transport in others:
        transport.protocol.data_received(request())
    held.protocol.data_received(data)
    assert len(harness.served) == len(others)
    return held, others


async def connect_served(harness: Harness, number: int) -> list[FakeTransport]:
    # Return connections that have served a request each; the texts of these are forgotten.
    transports = connect(harness, number)
    for transport in transports:
        await transport.deliver(request())
        assert transport.text.count(b"HTTP/1.1 200") == 1
        transport.text = b""
    harness.served.clear()
    return transports


async def hold(
    kind: str, harness: Harness, data: bytes
) -> tuple[FakeTransport, list[FakeTransport]]:
    # Return a connection with a request that waits, and the others.
    if kind == "first":
        return hold_one(harness, data)
    if kind == "later":
        return await hold_later(harness, data)
    (waiting,) = connect(harness, 1)
    waiting.protocol.data_received(request() + data)
    return waiting, []


async def end(harness: Harness, *transports: FakeTransport) -> None:
    for transport in transports:
        transport.close()
    await turns()
    assert len(harness.connections) == harness.budget.reserved == 0
    assert harness.connections.unread_bytes == 0


async def test_the_first_requests_of_a_crowd_are_all_answered_in_turn() -> None:
    harness = Harness()
    transports = connect(harness, 40)
    for transport in transports:
        transport.protocol.data_received(request())
    assert len(harness.served) == BEGINNINGS
    assert sum(transport.paused for transport in transports) == 40 - BEGINNINGS
    for number in range(1, 20):
        assert len(harness.served) == number * BEGINNINGS
        await asyncio.sleep(0)
    await turns()
    assert all(transport.text.count(b"HTTP/1.1 200") == 1 for transport in transports)
    assert not any(transport.paused for transport in transports)
    await end(harness, *transports)


async def test_the_later_requests_of_a_crowd_are_all_answered_in_turn() -> None:
    harness = Harness()
    transports = await connect_served(harness, LATER_BEGINNINGS + 21)
    last = transports.pop()
    last.protocol.address = "192.0.2.9"  # type: ignore[attr-defined]
    for transport in transports:
        transport.protocol.data_received(request())
    assert len(harness.served) == LATER_BEGINNINGS
    assert sum(transport.paused for transport in transports) == 20
    await asyncio.sleep(0)
    last.protocol.data_received(request())  # another client, in the next iteration
    assert len(harness.served) == LATER_BEGINNINGS + BEGINNINGS + 1
    await turns()
    for transport in (last, *transports):
        assert transport.text.count(b"HTTP/1.1 200") == 1
        assert not transport.paused
    await end(harness, last, *transports)


async def test_a_client_whose_requests_wait_begins_none_before_them() -> None:
    harness = Harness()
    transports = await connect_served(harness, LATER_BEGINNINGS + 9)
    for number, transport in enumerate(transports[:-1]):
        transport.protocol.data_received(request(b"a" * (number + 1)))
    await asyncio.sleep(0)
    transports[-1].protocol.data_received(request(b"last"))
    await turns()
    bodies = [body for _, body, _ in harness.served]
    assert bodies == [*(b"a" * (number + 1) for number in range(len(bodies) - 1)), b"last"]
    await end(harness, *transports)


async def test_later_requests_that_aiohttp_serves_begin_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    transports = await connect_served(harness, LATER_BEGINNINGS + 10)
    for weight in (1, WEIGHT):  # FastConnection receives the first GET
        monkeypatch.setattr(connection_fairness, "BEGINNINGS", 0)
        for transport in transports:
            transport.text = b""
            transport.protocol.data_received(GET)
        await turns()
        answered = sum(b"HTTP/1.1 404" in transport.text for transport in transports)
        assert answered == LATER_BEGINNINGS // weight
        monkeypatch.setattr(connection_fairness, "BEGINNINGS", BEGINNINGS)
        await turns()
        assert all(transport.text.count(b"HTTP/1.1 404") == 1 for transport in transports)
    await end(harness, *transports)


async def before_aiohttp(harness: Harness) -> list[FakeTransport]:
    # Return a connection that aiohttp's parser serves and whose next request must wait, and those
    # whose requests have begun in this event loop iteration.
    held, *others = await connect_served(harness, LATER_BEGINNINGS + 1)
    await held.deliver(GET)
    held.text = b""
    for transport in others:
        transport.protocol.data_received(request())
    return [held, *others]


@pytest.mark.parametrize("part", [5, len(GET) - 1])
async def test_a_later_request_to_aiohttp_that_waits_may_arrive_in_parts(part: int) -> None:
    harness = Harness()
    held, *others = await before_aiohttp(harness)
    held.protocol.data_received(GET[:part])
    assert held.paused
    held.protocol.data_received(GET[part:])  # a TLS transport may have read it before the pause
    await turns()
    assert held.text.count(b"HTTP/1.1 404") == 1
    assert not held.paused
    await end(harness, held, *others)


async def served_by_aiohttp(harness: Harness, number: int) -> list[FakeTransport]:
    # Return connections on which aiohttp's parser has served a request each.
    transports = connect(harness, number)
    for transport in transports:
        await transport.deliver(GET)
        transport.text = b""
    return transports


async def test_the_body_of_a_request_whose_head_was_parsed_does_not_wait() -> None:
    harness = Harness()
    transports = await served_by_aiohttp(harness, LATER_BEGINNINGS + 20)
    head = request(b"", length="Transfer-Encoding: chunked")
    for transport in transports:
        transport.protocol.data_received(head + b"5\r\nhello\r\n")
    for _ in range(3):
        for transport in transports:  # a TLS transport may have read it before a pause
            transport.protocol.data_received(b"5\r\nhello\r\n")
        await asyncio.sleep(0)
    for transport in transports:
        transport.protocol.data_received(b"0\r\n\r\n")
    for _ in range(5):
        await turns()
    assert [body for _, body, _ in harness.served] == [b"hello" * 4] * len(transports)
    assert all(transport.text.count(b"HTTP/1.1 200") == 1 for transport in transports)
    await end(harness, *transports)


async def test_later_requests_to_aiohttp_whose_heads_arrive_in_parts_begin_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    transports = await served_by_aiohttp(harness, LATER_BEGINNINGS + 10)
    for transport in transports:
        await transport.deliver(GET[:3])
    monkeypatch.setattr(connection_fairness, "BEGINNINGS", 0)
    for transport in transports:
        transport.protocol.data_received(GET[3:])
    await turns()
    answered = sum(b"HTTP/1.1 404" in transport.text for transport in transports)
    assert 0 < answered <= LATER_BEGINNINGS  # the first parts counted too
    monkeypatch.setattr(connection_fairness, "BEGINNINGS", BEGINNINGS)
    await turns()
    assert all(b"HTTP/1.1 404" in transport.text for transport in transports)
    await end(harness, *transports)


@pytest.mark.parametrize("kind", ["first", "later"])
async def test_a_request_that_waits_is_not_served_if_its_client_has_left_meanwhile(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness()
    held, others = await hold(kind, harness, request())
    monkeypatch.setattr(FastConnection, "_has_hung_up", True)
    served = len(harness.served)
    await turns()
    assert len(harness.served) == served
    assert not held.paused  # so that the event loop ends the connection
    await end(harness, held, *others)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_later_request_to_aiohttp_that_waits_is_answered_when_the_gateway_stops(
    leaves: bool,
) -> None:
    harness = Harness()
    held, *others = await before_aiohttp(harness)
    held.protocol.data_received(GET)
    connection = held.protocol
    assert isinstance(connection, AiohttpConnection)
    assert not connection.sweep(connection.phase_since + 1000.0)  # it waits for the gateway
    if leaves:
        held.close()
        await asyncio.sleep(0)
    connection.drain()
    harness.turns.begin_all()
    await turns()
    assert held.text.count(b"HTTP/1.1 404") == (0 if leaves else 1)
    assert held.closed
    await end(harness, held, *others)


async def test_requests_that_wait_do_not_count_as_unread_bytes() -> None:
    harness = Harness()
    harness.limits = Limits(unread_budget="1MiB")
    transports = connect(harness, 100)
    for transport in transports:
        transport.protocol.data_received(request(b"a" * 50_000))
    assert harness.connections.unread_bytes == harness.budget.reserved == 0
    for _ in range(5):
        await turns()
    assert not harness.refused
    assert all(transport.text.count(b"HTTP/1.1 200") == 1 for transport in transports)
    await end(harness, *transports)


async def test_a_request_right_after_the_response_does_not_count_as_unread_bytes() -> None:
    harness = Harness(slow=True)
    harness.limits = Limits(unread_budget="1MiB")
    transports = connect(harness, 20)
    for transport in transports:
        transport.protocol.data_received(request(b"a" * 100_000))
    sent = Counter(transports)
    while min(transport.text.count(b"HTTP/1.1 200") for transport in transports) < 3:
        await asyncio.sleep(0)
        for transport in transports:
            if transport.text.count(b"HTTP/1.1 200") == sent[transport] < 3:
                sent[transport] += 1
                transport.protocol.data_received(request(b"a" * 100_000))
                assert harness.connections.unread_bytes == 0
        assert not harness.refused
    await end(harness, *transports)


@pytest.mark.parametrize("part", [10, 90, len(request(b"a" * 100)) - 1])
async def test_a_request_that_waits_may_arrive_in_parts(part: int) -> None:
    harness = Harness()
    text = request(b"a" * 100)
    held, others = hold_one(harness, text[:part])
    held.protocol.data_received(text[part:])  # a TLS transport may have read it before the pause
    await turns()
    assert held.text.count(b"HTTP/1.1 200") == 1
    await end(harness, held, *others)


async def test_the_rest_of_a_request_is_read_after_its_turn() -> None:
    harness = Harness()
    text = request(b"a" * 200_000)
    held, others = hold_one(harness, text[:70_000])
    await turns()
    assert not held.paused
    held.protocol.data_received(text[70_000:])
    await turns()
    assert held.text.count(b"HTTP/1.1 200") == 1
    await end(harness, held, *others)


async def test_the_deadline_of_a_head_does_not_begin_anew_after_its_turn() -> None:
    harness = Harness()
    text = b"POST /v1/completions HTTP/1.1\r\nHost"
    (slow,) = connect(harness, 1)
    slow.protocol.data_received(text)
    await turns()
    connection = slow.protocol
    assert isinstance(connection, FastConnection)
    assert connection.phase is HEAD
    since = connection.phase_since = connection.phase_since - 9.0
    for transport in connect(harness, BEGINNINGS):
        transport.protocol.data_received(request())
    slow.protocol.data_received(b": test\r\nContent-Length: 2\r\n\r\n")
    assert connection.phase_since == since
    # The connection waits for the gateway and not for the client, so it does not time out.
    assert not connection.sweep(since + 1000.0)
    await turns()
    assert not slow.text
    slow.protocol.data_received(b"{}")
    await turns()
    assert slow.text.count(b"HTTP/1.1 200") == 1
    for each in tuple(harness.connections):
        each.abort()
    await turns()


async def test_an_unusual_request_passes_to_aiohttp_in_its_turn() -> None:
    harness = Harness()
    held, others = hold_one(harness, GET)
    assert isinstance(held.protocol, FastConnection)
    await turns()
    assert held.text.count(b"HTTP/1.1 404") == 1
    await end(harness, held, *others)


async def test_a_client_that_leaves_while_its_request_waits_is_not_served() -> None:
    harness = Harness()
    held, others = hold_one(harness, request())
    held.protocol.connection_lost(None)
    await turns()
    assert len(harness.served) == BEGINNINGS
    await end(harness, *others)


@pytest.mark.parametrize("kind", ["first", "later", "pipelined"])
@pytest.mark.parametrize("data", [request(b"a"), GET, request(b"a") + request(b"b")])
async def test_a_request_that_waits_is_answered_when_the_gateway_drains(
    kind: str, data: bytes
) -> None:
    harness = Harness()
    waiting, others = await hold(kind, harness, data)
    connection = waiting.protocol
    assert isinstance(connection, FastConnection)
    connection.drain()
    await turns()
    answers = waiting.text.count(b"HTTP/1.1 ")
    assert answers == (2 if kind == "pipelined" else 1)
    assert waiting.text.lower().count(b"connection: close") == 1
    assert waiting.closed
    await end(harness, *others)


@pytest.mark.parametrize("kind", ["first", "later", "pipelined"])
@pytest.mark.parametrize("data", [request(b"a"), GET])
async def test_a_request_that_waits_is_answered_when_the_gateway_stops(
    kind: str, data: bytes
) -> None:
    harness = Harness()
    waiting, others = await hold(kind, harness, data)
    connection = waiting.protocol
    assert isinstance(connection, FastConnection)
    closed = connection.close_when_idle()
    await turns()
    assert waiting.text.count(b"HTTP/1.1 ") == (2 if kind == "pipelined" else 1)
    assert closed.done()
    assert waiting.closed
    await end(harness, *others)


@pytest.mark.parametrize("size", [100, 3 * MAX_UNREAD])
async def test_a_pipelined_request_of_which_a_part_has_arrived_survives_a_drain(size: int) -> None:
    harness = Harness()
    text = request(b"a" * size)
    (waiting,) = connect(harness, 1)
    waiting.protocol.data_received(request() + text[: size // 2])
    connection = waiting.protocol
    assert isinstance(connection, FastConnection)
    connection.drain()
    waiting.protocol.data_received(text[size // 2 : -1])
    await turns()
    assert not waiting.paused
    waiting.protocol.data_received(text[-1:])
    await turns()
    assert [len(body) for _, body, _ in harness.served] == [2, size]
    assert waiting.text.lower().count(b"connection: close") == 1
    await end(harness)


async def test_the_pipelined_requests_of_all_connections_share_the_turns() -> None:
    harness = Harness()
    transports = connect(harness, 20)
    for transport in transports:
        transport.protocol.data_received(request() * 5)
    for number in range(1, 20):
        assert len(harness.served) <= (number + 1) * BEGINNINGS
        await asyncio.sleep(0)
    for _ in range(10):
        await turns()
    assert len(harness.served) == 100
    await end(harness, *transports)


async def test_aiohttps_connections_share_the_turns_of_pipelined_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    transports = [FakeTransport(harness.aiohttp_connection()) for _ in range(9)]
    for transport in transports:
        transport.protocol.connection_made(transport)
        transport.protocol.data_received(request() * 2)
    monkeypatch.setattr(connection_fairness, "BEGINNINGS", 0)
    await turns()
    assert len(harness.served) == 9
    monkeypatch.undo()
    for _ in range(3):
        await turns()
    assert len(harness.served) == 18
    for transport in transports:
        transport.close()
    await turns()
