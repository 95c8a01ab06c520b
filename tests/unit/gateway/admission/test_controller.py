"""Admission: permits in order, capacity of removed endpoints, body memory, retries."""

from __future__ import annotations

import asyncio
from random import Random
from time import monotonic
from typing import Any

import msgspec
import pytest

from gateway.admission.controller import AT_ONCE, Gate, Room
from gateway.config import Config, WaitingRoom
from gateway.exchange import Exchange
from gateway.protocol.errors import GatewayError
from gateway.protocol.openai import Api
from policies.load import EndpointLoad
from policies.model import Ask, Candidate, Endpoint, Request


def candidate(slot: int, cap: int) -> Candidate:
    endpoint = Endpoint(
        f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "pool", "model", max_concurrency=cap
    )
    return Candidate(endpoint, EndpointLoad(slot))


def ask(**request: Any) -> Ask:
    return Ask(Request("id", "model", "tenant", 1000, 100, **request), monotonic(), Random(1))


def room(*caps: int, size: int = 10, timeout: str = "30s") -> tuple[Room, tuple[Candidate, ...]]:
    queue, candidates = Room("pool"), tuple(candidate(slot, cap) for slot, cap in enumerate(caps))
    queue.configure(WaitingRoom.model_validate({"size": size, "timeout": timeout}), candidates)
    return queue, candidates


def gate(**sections: Any) -> Gate:
    pools = {"main": {"endpoints": [{"url": "http://127.0.0.1:9000"}]}}
    return Gate(Config.model_validate({"version": 1, "pools": pools} | sections))


async def turns(count: int = 5) -> None:
    """Run the event loop until all ready tasks have continued."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_permits_are_granted_up_to_the_sum_of_caps_and_returned_on_exit() -> None:
    queue, _ = room(2, 1)
    for _ in range(3):
        await queue.enter(ask())
    waiting = asyncio.create_task(queue.enter(ask()))
    await turns()
    assert (queue.in_flight, queue.waiting, waiting.done()) == (3, 1, False)
    with queue:
        pass
    await turns()
    assert (queue.in_flight, queue.waiting, waiting.done()) == (3, 0, True)
    for _ in range(3):
        queue.__exit__()
    assert queue.in_flight == 0


async def test_a_queue_of_size_0_refuses_requests_beyond_the_capacity() -> None:
    queue, _ = room(1, size=0)
    await queue.enter(ask())
    with pytest.raises(GatewayError) as refused:
        await queue.enter(ask())
    assert (refused.value.status, refused.value.reason) == (429, "waiting_room_full")


async def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    queue, _ = room(1)
    await queue.enter(ask())
    entered: list[int] = []

    async def one(number: int) -> None:
        with await queue.enter(ask()):
            entered.append(number)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(number)) for number in range(6)]
    await turns()
    queue.__exit__()
    await asyncio.gather(*tasks)
    assert entered == list(range(6))
    assert (queue.in_flight, queue.waiting) == (0, 0)


async def test_a_long_queue_is_admitted_over_several_turns_of_the_loop() -> None:
    queue, candidates = room(1, 20, size=20)
    candidates[1].load.available = False
    queue.refresh()
    await queue.enter(ask())
    entered: list[int] = []

    async def one(number: int) -> None:
        await queue.enter(ask())
        entered.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(3 * AT_ONCE)]
    await turns()
    candidates[1].load.available = True
    queue.refresh()
    await turns(1)
    assert len(entered) == AT_ONCE
    await asyncio.gather(*tasks)
    assert entered == list(range(3 * AT_ONCE))
    assert (queue.in_flight, queue.waiting) == (1 + 3 * AT_ONCE, 0)


async def test_a_request_cancelled_before_its_verdict_passes_its_permit_on() -> None:
    queue, candidates = room(1, AT_ONCE + 1)
    candidates[1].load.available = False
    queue.refresh()
    await queue.enter(ask())
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(AT_ONCE + 2)]
    await turns()
    candidates[1].load.available = True
    queue.refresh()
    tasks[AT_ONCE].cancel()
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [
        number == AT_ONCE for number in range(AT_ONCE + 2)
    ]
    assert (queue.in_flight, queue.waiting) == (AT_ONCE + 2, 0)


async def test_a_new_request_does_not_overtake_waiting_ones() -> None:
    queue, _ = room(1, 1)
    await queue.enter(ask())
    await queue.enter(ask())
    first = asyncio.create_task(queue.enter(ask()))
    await turns()
    queue.__exit__()
    second = asyncio.create_task(queue.enter(ask()))
    await turns()
    assert (first.done(), second.done()) == (True, False)
    second.cancel()
    await turns()
    assert queue.waiting == 0


async def test_a_request_cancelled_while_waiting_leaks_no_permit() -> None:
    queue, _ = room(1)
    await queue.enter(ask())
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(3)]
    await turns()
    tasks[1].cancel()
    await turns()
    assert queue.waiting == 2
    queue.__exit__()
    await turns()
    assert (tasks[0].done(), tasks[2].done(), queue.in_flight) == (True, False, 1)
    tasks[2].cancel()
    await turns()
    queue.__exit__()
    assert (queue.in_flight, queue.waiting) == (0, 0)


async def test_a_permit_granted_at_the_moment_of_cancellation_goes_to_the_next() -> None:
    queue, _ = room(1)
    await queue.enter(ask())
    first, second = [asyncio.create_task(queue.enter(ask())) for _ in range(2)]
    await turns()
    queue.__exit__()  # admits the first waiter, whose task has not run yet
    first.cancel()
    await turns()
    assert first.cancelled()
    assert second.done()
    assert queue.in_flight == 1


async def test_a_full_queue_sheds_with_numbers() -> None:
    queue, _ = room(1, size=1)
    await queue.enter(ask())
    waiting = asyncio.create_task(queue.enter(ask()))
    await turns()
    with pytest.raises(GatewayError, match="1 of 1 places are taken and 1 requests wait") as shed:
        await queue.enter(ask())
    assert (shed.value.status, shed.value.reason) == (429, "waiting_room_full")
    waiting.cancel()
    await turns()


async def test_a_request_that_waited_too_long_is_shed_and_leaves_the_queue() -> None:
    queue, _ = room(1, timeout="10ms")
    await queue.enter(ask())
    with pytest.raises(GatewayError) as shed:
        await queue.enter(ask())
    assert (shed.value.status, shed.value.reason) == (429, "waited_too_long")
    assert (queue.in_flight, queue.waiting) == (1, 0)


async def test_a_request_that_cannot_meet_its_deadline_does_not_wait() -> None:
    queue, _ = room(1)
    await queue.enter(ask())
    with pytest.raises(GatewayError, match=r"The client gives up in 0\.0 s") as shed:
        await queue.enter(ask(deadline_s=monotonic() + 0.01))
    assert (shed.value.status, shed.value.reason) == (429, "deadline")
    assert (queue.in_flight, queue.waiting) == (1, 0)


async def test_without_an_available_endpoint_no_request_is_admitted() -> None:
    queue, candidates = room(2)
    candidates[0].load.available = False
    queue.refresh()
    with pytest.raises(GatewayError) as refused:
        await queue.enter(ask())
    assert (refused.value.status, refused.value.reason) == (503, "no_capacity")


async def test_streams_of_an_ejected_endpoint_use_no_capacity() -> None:
    queue, candidates = room(2, 2)
    for slot in (0, 0, 1, 1):
        await queue.enter(ask())
        candidates[slot].load.in_flight += 1
    waiting = asyncio.create_task(queue.enter(ask()))
    await turns()
    candidates[0].load.available = False
    queue.refresh()
    await turns()
    assert not waiting.done()
    assert queue.busy == 2
    queue.__exit__()
    candidates[1].load.in_flight -= 1
    queue.refresh()
    await turns()
    assert waiting.done()


async def test_a_returning_endpoint_admits_as_many_requests_as_its_cap() -> None:
    queue, candidates = room(2, 2)
    candidates[1].load.available = False
    queue.refresh()
    for _ in range(2):
        await queue.enter(ask())
        candidates[0].load.in_flight += 1
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(3)]
    await turns()
    candidates[1].load.available = True
    queue.refresh()
    await turns()
    assert [task.done() for task in tasks] == [True, True, False]
    tasks[2].cancel()
    await turns()


def test_bodies_share_one_budget() -> None:
    controller = gate(limits={"body": "60B", "body_budget": "100B"})
    assert controller.hold(60) == 60
    with pytest.raises(GatewayError, match="60 of 100") as shed:
        controller.hold(60)
    assert (shed.value.status, shed.value.reason) == (429, "body_budget")
    controller.release(60)
    controller.hold(100)
    controller.release(100)
    assert controller.body_bytes == 0


async def test_retries_beyond_the_budget_wait() -> None:
    controller = gate(retries={"floor": 2})
    assert await controller.retry_turn()
    assert await controller.retry_turn()
    third = asyncio.create_task(controller.retry_turn())
    await turns()
    assert not third.done()
    controller.give_back_turn()
    await turns()
    assert third.result()
    controller.give_back_turn()
    controller.give_back_turn()
    assert controller.retries_running == 0


@pytest.mark.parametrize("active", [0, 1, 3, 4])
async def test_the_number_of_retries_left_is_the_number_granted(active: int) -> None:
    controller = gate(retries={"floor": 0, "budget": 0.3})
    place = controller.room("main")
    place.configure(WaitingRoom(), (candidate(0, 24),))
    controller.open(place)
    for _ in range(active):
        await place.enter(ask())
    left = controller.retries_left
    granted = sum(controller.retry_at_once() for _ in range(10))
    assert (granted, controller.retries_left) == (left, 0)


def test_without_a_retry_budget_the_number_of_retries_left_is_none() -> None:
    controller = gate(retries={"floor": 0, "budget": 0})
    assert (controller.retries_left, controller.retry_at_once()) == (None, False)


async def test_a_request_cancelled_while_waiting_for_a_retry_keeps_none() -> None:
    controller = gate(retries={"floor": 1})
    await controller.retry_turn()
    tasks = [asyncio.create_task(controller.retry_turn()) for _ in range(3)]
    await turns()
    controller.give_back_turn()  # to the first waiter, which is cancelled before its task runs
    tasks[0].cancel()
    tasks[1].cancel()
    await turns()
    assert tasks[2].result()
    controller.give_back_turn()
    assert controller.retries_running == 0


async def test_a_shrinking_budget_grants_all_waiting_retries_in_the_end() -> None:
    """The budget shrinks as requests end: a returned retry may not be available any more."""
    controller = gate(retries={"floor": 1, "budget": 0.5})
    place = controller.room("main")
    place.configure(WaitingRoom(), (candidate(0, 24),))
    controller.open(place)
    for _ in range(2):
        await place.enter(ask())
    assert await controller.retry_turn()
    assert await controller.retry_turn()
    waiting = asyncio.create_task(controller.retry_turn())
    await turns()
    place.__exit__()
    place.__exit__()
    controller.give_back_turn()  # one of two retries, and only one is allowed now
    await turns()
    assert not waiting.done()
    controller.give_back_turn()
    await turns()
    assert waiting.result()
    controller.give_back_turn()
    assert controller.retries_running == 0


async def test_a_stopping_gateway_refuses_waiting_and_new_retries() -> None:
    controller = gate(retries={"floor": 1})
    assert await controller.retry_turn()
    waiting = asyncio.create_task(controller.retry_turn())
    await turns()
    controller.end_retries()
    await turns()
    assert not waiting.result()
    controller.give_back_turn()
    assert not await controller.retry_turn()
    assert controller.retries_running == 0


async def test_many_requests_cancelled_as_a_permit_is_freed_leave_it_free() -> None:
    queue, _ = room(1, size=2000)
    await queue.enter(ask())
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(1500)]
    await turns()
    for task in tasks:
        task.cancel()
    queue.__exit__()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.in_flight, queue.waiting) == (0, 0)


async def test_a_fallback_into_a_full_queue_evicts_no_request() -> None:
    queue, _ = room(1, size=2)
    await queue.enter(ask())
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(2)]
    await turns()
    stranger = ask()
    assert not queue.enter_now(
        msgspec.structs.replace(stranger, request=Request("o", "model", "other", 1000, 100))
    )
    await turns()
    assert ([task.done() for task in tasks], queue.waiting) == ([False, False], 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_the_memory_of_a_body_is_released_at_the_first_token() -> None:
    controller = gate(limits={"body": "60B", "body_budget": "100B"})
    x = Exchange("r", Api.CHAT, "127.0.0.1", 0.0)
    x.hold(controller, 20)
    x.hold(controller, 60)
    x.first_token()
    assert (controller.body_bytes, x.body_bytes) == (0, 60)
    controller.hold(100)
    x.let_go()
    assert controller.body_bytes == 100
