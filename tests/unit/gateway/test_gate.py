"""The gate: permits in turn, places of those who left, memory for bodies, turns for retries."""

from __future__ import annotations

import asyncio
from random import Random
from time import monotonic
from typing import Any

import msgspec
import pytest

from gateway.answer import GatewayError
from gateway.config import Config, WaitingRoom
from gateway.exchange import Exchange
from gateway.gate import AT_ONCE, Gate, Room
from gateway.openai import Api
from policies.load import EndpointLoad
from policies.model import Ask, Candidate, Endpoint, Request


def candidate(slot: int, cap: int) -> Candidate:
    endpoint = Endpoint(f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "pool", "model", max_concurrency=cap)
    return Candidate(endpoint, EndpointLoad(slot))


def ask(**request: Any) -> Ask:
    return Ask(Request("id", "model", "tenant", 1000, 100, **request), monotonic(), Random(1))


def room(*caps: int, size: int = 10, timeout: str = "30s") -> tuple[Room, tuple[Candidate, ...]]:
    made, candidates = Room("pool"), tuple(candidate(slot, cap) for slot, cap in enumerate(caps))
    made.configure(WaitingRoom.model_validate({"size": size, "timeout": timeout}), candidates)
    return made, candidates


def gate(**sections: Any) -> Gate:
    pools = {"main": {"endpoints": [{"url": "http://127.0.0.1:9000"}]}}
    return Gate(Config.model_validate({"version": 1, "pools": pools} | sections))


async def turns(count: int = 5) -> None:
    """Let whoever can go on go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_permits_are_given_up_to_the_sum_of_caps_and_given_back_on_leaving() -> None:
    made, _ = room(2, 1)
    for _ in range(3):
        await made.enter(ask())
    waiting = asyncio.create_task(made.enter(ask()))
    await turns()
    assert (made.in_flight, made.waiting, waiting.done()) == (3, 1, False)
    with made:
        pass
    await turns()
    assert (made.in_flight, made.waiting, waiting.done()) == (3, 0, True)
    for _ in range(3):
        made.__exit__()
    assert made.in_flight == 0


async def test_a_room_without_chairs_refuses_whoever_finds_no_place() -> None:
    made, _ = room(1, size=0)
    await made.enter(ask())
    with pytest.raises(GatewayError) as refused:
        await made.enter(ask())
    assert (refused.value.status, refused.value.reason) == (429, "waiting_room_full")


async def test_those_who_wait_enter_in_the_order_they_came() -> None:
    made, _ = room(1)
    await made.enter(ask())
    entered: list[int] = []

    async def one(number: int) -> None:
        with await made.enter(ask()):
            entered.append(number)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(number)) for number in range(6)]
    await turns()
    made.__exit__()
    await asyncio.gather(*tasks)
    assert entered == list(range(6))
    assert (made.in_flight, made.waiting) == (0, 0)


async def test_a_line_that_goes_in_as_one_leaves_turns_of_the_loop_to_others() -> None:
    made, candidates = room(1, 20, size=20)
    candidates[1].load.available = False
    made.refresh()
    await made.enter(ask())
    entered: list[int] = []

    async def one(number: int) -> None:
        await made.enter(ask())
        entered.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(3 * AT_ONCE)]
    await turns()
    candidates[1].load.available = True
    made.refresh()
    await turns(1)
    assert len(entered) == AT_ONCE
    await asyncio.gather(*tasks)
    assert entered == list(range(3 * AT_ONCE))
    assert (made.in_flight, made.waiting) == (1 + 3 * AT_ONCE, 0)


async def test_who_leaves_before_being_told_of_its_place_leaves_it_to_the_next() -> None:
    made, candidates = room(1, AT_ONCE + 1)
    candidates[1].load.available = False
    made.refresh()
    await made.enter(ask())
    tasks = [asyncio.create_task(made.enter(ask())) for _ in range(AT_ONCE + 2)]
    await turns()
    candidates[1].load.available = True
    made.refresh()
    tasks[AT_ONCE].cancel()
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [number == AT_ONCE for number in range(AT_ONCE + 2)]
    assert (made.in_flight, made.waiting) == (AT_ONCE + 2, 0)


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    made, _ = room(1, 1)
    await made.enter(ask())
    await made.enter(ask())
    first = asyncio.create_task(made.enter(ask()))
    await turns()
    made.__exit__()
    second = asyncio.create_task(made.enter(ask()))
    await turns()
    assert (first.done(), second.done()) == (True, False)
    second.cancel()
    await turns()
    assert made.waiting == 0


async def test_who_leaves_the_line_leaves_no_permit_behind() -> None:
    made, _ = room(1)
    await made.enter(ask())
    tasks = [asyncio.create_task(made.enter(ask())) for _ in range(3)]
    await turns()
    tasks[1].cancel()
    await turns()
    assert made.waiting == 2
    made.__exit__()
    await turns()
    assert (tasks[0].done(), tasks[2].done(), made.in_flight) == (True, False, 1)
    tasks[2].cancel()
    await turns()
    made.__exit__()
    assert (made.in_flight, made.waiting) == (0, 0)


async def test_a_permit_that_comes_in_the_moment_of_leaving_goes_to_the_next() -> None:
    made, _ = room(1)
    await made.enter(ask())
    first, second = [asyncio.create_task(made.enter(ask())) for _ in range(2)]
    await turns()
    made.__exit__()  # gives the first its turn, which it has not seen yet
    first.cancel()
    await turns()
    assert first.cancelled()
    assert second.done()
    assert made.in_flight == 1


async def test_a_full_waiting_room_sheds_with_numbers() -> None:
    made, _ = room(1, size=1)
    await made.enter(ask())
    waiting = asyncio.create_task(made.enter(ask()))
    await turns()
    with pytest.raises(GatewayError, match="1 of 1 places are taken and 1 requests wait") as shed:
        await made.enter(ask())
    assert (shed.value.status, shed.value.reason) == (429, "waiting_room_full")
    waiting.cancel()
    await turns()


async def test_who_waited_too_long_is_shed_and_out_of_the_line() -> None:
    made, _ = room(1, timeout="10ms")
    await made.enter(ask())
    with pytest.raises(GatewayError) as shed:
        await made.enter(ask())
    assert (shed.value.status, shed.value.reason) == (429, "waited_too_long")
    assert (made.in_flight, made.waiting) == (1, 0)


async def test_who_cannot_be_served_before_its_client_gives_up_is_not_kept_waiting() -> None:
    made, _ = room(1)
    await made.enter(ask())
    with pytest.raises(GatewayError, match=r"The client gives up in 0\.0 s") as shed:
        await made.enter(ask(deadline_s=monotonic() + 0.01))
    assert (shed.value.status, shed.value.reason) == (429, "deadline")
    assert (made.in_flight, made.waiting) == (1, 0)


async def test_without_an_available_endpoint_nobody_enters() -> None:
    made, candidates = room(2)
    candidates[0].load.available = False
    made.refresh()
    with pytest.raises(GatewayError) as refused:
        await made.enter(ask())
    assert (refused.value.status, refused.value.reason) == (503, "no_capacity")


async def test_streams_of_an_ejected_endpoint_take_nobodys_place() -> None:
    made, candidates = room(2, 2)
    for slot in (0, 0, 1, 1):
        await made.enter(ask())
        candidates[slot].load.in_flight += 1
    waiting = asyncio.create_task(made.enter(ask()))
    await turns()
    candidates[0].load.available = False
    made.refresh()
    await turns()
    assert not waiting.done()
    assert made.busy == 2
    made.__exit__()
    candidates[1].load.in_flight -= 1
    made.refresh()
    await turns()
    assert waiting.done()


async def test_a_returning_endpoint_lets_in_as_many_as_it_has_places() -> None:
    made, candidates = room(2, 2)
    candidates[1].load.available = False
    made.refresh()
    for _ in range(2):
        await made.enter(ask())
        candidates[0].load.in_flight += 1
    tasks = [asyncio.create_task(made.enter(ask())) for _ in range(3)]
    await turns()
    candidates[1].load.available = True
    made.refresh()
    await turns()
    assert [task.done() for task in tasks] == [True, True, False]
    tasks[2].cancel()
    await turns()


def test_bodies_share_one_budget() -> None:
    made = gate(limits={"body": "60B", "body_budget": "100B"})
    assert made.hold(60) == 60
    with pytest.raises(GatewayError, match="60 of 100") as shed:
        made.hold(60)
    assert (shed.value.status, shed.value.reason) == (429, "body_budget")
    made.release(60)
    made.hold(100)
    made.release(100)
    assert made.body_bytes == 0


async def test_retries_beyond_the_budget_wait_for_a_turn() -> None:
    made = gate(retries={"floor": 2})
    assert await made.retry_turn()
    assert await made.retry_turn()
    third = asyncio.create_task(made.retry_turn())
    await turns()
    assert not third.done()
    made.give_back_turn()
    await turns()
    assert third.result()
    made.give_back_turn()
    made.give_back_turn()
    assert made.retries_running == 0


@pytest.mark.parametrize("active", [0, 1, 3, 4])
async def test_as_many_retries_are_said_to_be_left_as_are_granted(active: int) -> None:
    made = gate(retries={"floor": 0, "budget": 0.3})
    place = made.room("main")
    place.configure(WaitingRoom(), (candidate(0, 24),))
    made.open(place)
    for _ in range(active):
        await place.enter(ask())
    left = made.retries_left
    granted = sum(made.retry_at_once() for _ in range(10))
    assert (granted, made.retries_left) == (left, 0)


def test_a_gateway_that_is_to_retry_nothing_has_no_number_of_retries_left() -> None:
    made = gate(retries={"floor": 0, "budget": 0})
    assert (made.retries_left, made.retry_at_once()) == (None, False)


async def test_who_gives_up_waiting_for_a_turn_keeps_none() -> None:
    made = gate(retries={"floor": 1})
    await made.retry_turn()
    tasks = [asyncio.create_task(made.retry_turn()) for _ in range(3)]
    await turns()
    made.give_back_turn()  # to the first, which is cancelled before it sees it
    tasks[0].cancel()
    tasks[1].cancel()
    await turns()
    assert tasks[2].result()
    made.give_back_turn()
    assert made.retries_running == 0


async def test_a_smaller_budget_forgets_nobody_who_waits() -> None:
    """As requests leave the budget shrinks: a turn given back may be no turn any more, and the next one is."""
    made = gate(retries={"floor": 1, "budget": 0.5})
    place = made.room("main")
    place.configure(WaitingRoom(), (candidate(0, 24),))
    made.open(place)
    for _ in range(2):
        await place.enter(ask())
    assert await made.retry_turn()
    assert await made.retry_turn()
    waiting = asyncio.create_task(made.retry_turn())
    await turns()
    place.__exit__()
    place.__exit__()
    made.give_back_turn()  # one of two, where only one is allowed now
    await turns()
    assert not waiting.done()
    made.give_back_turn()
    await turns()
    assert waiting.result()
    made.give_back_turn()
    assert made.retries_running == 0


async def test_a_gateway_that_stops_gives_nobody_a_turn_and_lets_nobody_wait_for_one() -> None:
    made = gate(retries={"floor": 1})
    assert await made.retry_turn()
    waiting = asyncio.create_task(made.retry_turn())
    await turns()
    made.end_retries()
    await turns()
    assert not waiting.result()
    made.give_back_turn()
    assert not await made.retry_turn()
    assert made.retries_running == 0


async def test_a_crowd_that_leaves_as_a_place_comes_free_leaves_the_place_free() -> None:
    made, _ = room(1, size=2000)
    await made.enter(ask())
    tasks = [asyncio.create_task(made.enter(ask())) for _ in range(1500)]
    await turns()
    for task in tasks:
        task.cancel()
    made.__exit__()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (made.in_flight, made.waiting) == (0, 0)


async def test_one_who_overflows_into_a_full_room_sends_nobody_there_away() -> None:
    made, _ = room(1, size=2)
    await made.enter(ask())
    tasks = [asyncio.create_task(made.enter(ask())) for _ in range(2)]
    await turns()
    stranger = ask()
    assert not made.enter_now(msgspec.structs.replace(stranger, request=Request("o", "model", "other", 1000, 100)))
    await turns()
    assert ([task.done() for task in tasks], made.waiting) == ([False, False], 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_body_that_nobody_can_need_again_takes_no_memory_while_its_answer_goes_on() -> None:
    made = gate(limits={"body": "60B", "body_budget": "100B"})
    x = Exchange("r", Api.CHAT, "127.0.0.1", 0.0)
    x.hold(made, 20)
    x.hold(made, 60)
    x.first_token()
    assert (made.body_bytes, x.body_bytes) == (0, 60)
    made.hold(100)
    x.let_go()
    assert made.body_bytes == 100
