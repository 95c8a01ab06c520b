"""Tests that requests of many clients begin in turn, by client address."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

from gateway.http.request_turns import REQUESTS_PER_ITERATION, RequestTurns
from tests.unit.gateway.http.connection_harness import FakeTransport, Harness, request, turns


class Connection:
    """A connection with requests that wait for their turn; `begun` records its name for each."""

    def __init__(self, name: str, begun: list[str]) -> None:
        self.name, self._begun = name, begun

    def begin_request(self) -> None:
        self._begun.append(self.name)


def new_turns() -> RequestTurns:
    return RequestTurns(asyncio.get_running_loop())


async def test_a_request_begins_at_once_if_few_others_do() -> None:
    waiting, begun = new_turns(), list[str]()
    for _ in range(5):
        for number in range(REQUESTS_PER_ITERATION):
            assert waiting.may_begin(Connection("a", begun), "192.0.2.1"), number
        await asyncio.sleep(0)
    assert not begun


async def test_an_iteration_begins_few_requests() -> None:
    waiting, begun = new_turns(), list[str]()
    at_once = [waiting.may_begin(Connection(f"{n}", begun), "192.0.2.1") for n in range(9)]
    assert at_once == [n < REQUESTS_PER_ITERATION for n in range(9)]
    counts = [0]
    while len(begun) < 9 - REQUESTS_PER_ITERATION:
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert max(later - earlier for earlier, later in pairwise(counts)) == (REQUESTS_PER_ITERATION)
    assert begun == [f"{n}" for n in range(REQUESTS_PER_ITERATION, 9)]
    await asyncio.sleep(0)
    assert waiting.may_begin(Connection("later", begun), "192.0.2.1")


async def test_an_address_with_one_client_does_not_wait_behind_all_clients_of_another() -> None:
    waiting, begun = new_turns(), list[str]()
    for _ in range(1000):
        waiting.wait(Connection("many", begun), "192.0.2.1")
    waiting.wait(Connection("one", begun), "192.0.2.2")
    await asyncio.sleep(0)
    assert Counter(begun) == {"many": REQUESTS_PER_ITERATION - 1, "one": 1}
    await asyncio.sleep(0)
    assert waiting.may_begin(Connection("other", begun), "192.0.2.3") is False


async def test_a_client_that_connects_in_a_crowd_is_answered_in_its_turn() -> None:
    harness = Harness()
    transports = [FakeTransport(harness.fast_connection()) for _ in range(40)]
    for transport in transports:
        transport.protocol.connection_made(transport)
        transport.protocol.data_received(request(b"{}"))
    assert len(harness.served) == REQUESTS_PER_ITERATION
    for _ in range(20):
        await turns()
    assert len(harness.served) == 40
    assert all(transport.text.count(b"HTTP/1.1 ") == 1 for transport in transports)
    for transport in transports:
        transport.close()
    await turns()


async def test_a_request_that_arrives_in_pieces_while_it_waits_is_served_whole() -> None:
    harness = Harness()
    crowd = [FakeTransport(harness.fast_connection()) for _ in range(REQUESTS_PER_ITERATION)]
    for transport in crowd:
        transport.protocol.connection_made(transport)
        transport.protocol.data_received(request(b"{}"))
    last = FakeTransport(harness.fast_connection())
    last.protocol.connection_made(last)
    text = request(b"{}")
    last.protocol.data_received(text[:10])
    last.protocol.data_received(text[10:])
    assert len(harness.served) == REQUESTS_PER_ITERATION
    await turns()
    assert len(harness.served) == REQUESTS_PER_ITERATION + 1
    for transport in (*crowd, last):
        transport.close()
    await turns()


@pytest.mark.parametrize("ends", ["leaves", "drains"])
async def test_a_connection_may_end_before_its_turn(ends: str) -> None:
    harness = Harness()
    transports = [FakeTransport(harness.fast_connection()) for _ in range(9)]
    for transport in transports:
        transport.protocol.connection_made(transport)
        transport.protocol.data_received(request(b"{}"))
    begun = len(harness.served)
    for transport in transports[begun:]:
        if ends == "leaves":
            transport.protocol.connection_lost(None)
        else:
            transport.protocol.close_when_idle()
    for _ in range(9):
        await turns()
    # A request that was received before a drain is still answered.
    assert len(harness.served) == (begun if ends == "leaves" else 9)
    for transport in transports:
        transport.close()
    await turns()
