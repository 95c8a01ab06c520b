"""Tests of the wait queue of a pool at run time: order of requests, permits, removed endpoints."""

from __future__ import annotations

import asyncio
from random import Random
from time import monotonic
from typing import Any

import msgspec
import pytest

from gateway.admission.pool_queue import VERDICTS_PER_TURN, PoolQueue
from gateway.config import WaitingRoom
from gateway.protocol.errors import GatewayError
from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate, Endpoint, Request, RoutingQuery


def candidate(slot: int, cap: int) -> Candidate:
    endpoint = Endpoint(
        f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "pool", "model", max_concurrency=cap
    )
    return Candidate(endpoint, EndpointLoad(slot))


def ask(**request: Any) -> RoutingQuery:
    return RoutingQuery(
        Request("id", "model", "tenant", 1000, 100, **request), monotonic(), Random(1)
    )


def room(
    *caps: int, size: int = 10, timeout: str = "30s"
) -> tuple[PoolQueue, tuple[Candidate, ...]]:
    queue, candidates = (
        PoolQueue("pool"),
        tuple(candidate(slot, cap) for slot, cap in enumerate(caps)),
    )
    queue.configure(WaitingRoom.model_validate({"size": size, "timeout": timeout}), candidates)
    return queue, candidates


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_request_on_a_reserved_place_enters_before_all_that_wait() -> None:
    queue, _ = room(1)
    await queue.enter_first()
    order: list[str] = []

    async def enter(name: str) -> None:
        await (queue.enter_first() if name.startswith("first") else queue.enter(ask()))
        order.append(name)

    tasks = []
    for name in ("usual", "first 1", "first 2"):
        tasks.append(asyncio.create_task(enter(name)))
        await turns()
    assert queue.queue_length == 3
    for _ in range(3):
        queue.__exit__()
        assert not queue.try_take()  # the free permit belongs to the request that waits
        await turns()
    assert order == ["first 1", "first 2", "usual"]
    queue.__exit__()
    assert (queue.in_flight, queue.queue_length) == (0, 0)


async def test_a_cancelled_request_on_a_reserved_place_leaves_its_permit_to_the_next() -> None:
    queue, _ = room(1)
    await queue.enter_first()
    tasks = [asyncio.create_task(queue.enter_first()) for _ in range(3)]
    await turns()
    tasks[0].cancel()
    queue.__exit__()  # release a permit before the cancelled task has left the queue
    # Cancel the next task in the event loop iteration in which it gets the permit.
    tasks[1].cancel()
    await turns()
    assert [task.cancelled() for task in tasks] == [True, True, False]
    assert tasks[2].done()
    assert (queue.in_flight, queue.queue_length) == (1, 0)


async def test_permits_are_granted_up_to_the_sum_of_caps_and_returned_on_exit() -> None:
    queue, _ = room(2, 1)
    for _ in range(3):
        await queue.enter(ask())
    waiting = asyncio.create_task(queue.enter(ask()))
    await turns()
    assert (queue.in_flight, queue.queue_length, waiting.done()) == (3, 1, False)
    with queue:
        pass
    await turns()
    assert (queue.in_flight, queue.queue_length, waiting.done()) == (3, 0, True)
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
    assert (queue.in_flight, queue.queue_length) == (0, 0)


async def test_a_long_queue_is_admitted_over_several_turns_of_the_loop() -> None:
    queue, candidates = room(1, 20, size=20)
    candidates[1].load.is_available = False
    queue.refresh()
    await queue.enter(ask())
    entered: list[int] = []

    async def one(number: int) -> None:
        await queue.enter(ask())
        entered.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(3 * VERDICTS_PER_TURN)]
    await turns()
    candidates[1].load.is_available = True
    queue.refresh()
    await turns(1)
    assert len(entered) == VERDICTS_PER_TURN
    await asyncio.gather(*tasks)
    assert entered == list(range(3 * VERDICTS_PER_TURN))
    assert (queue.in_flight, queue.queue_length) == (1 + 3 * VERDICTS_PER_TURN, 0)


async def test_a_request_cancelled_before_its_verdict_passes_its_permit_on() -> None:
    queue, candidates = room(1, VERDICTS_PER_TURN + 1)
    candidates[1].load.is_available = False
    queue.refresh()
    await queue.enter(ask())
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(VERDICTS_PER_TURN + 2)]
    await turns()
    candidates[1].load.is_available = True
    queue.refresh()
    tasks[VERDICTS_PER_TURN].cancel()
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [
        number == VERDICTS_PER_TURN for number in range(VERDICTS_PER_TURN + 2)
    ]
    assert (queue.in_flight, queue.queue_length) == (VERDICTS_PER_TURN + 2, 0)


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
    assert queue.queue_length == 0


async def test_a_request_cancelled_while_waiting_leaks_no_permit() -> None:
    queue, _ = room(1)
    await queue.enter(ask())
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(3)]
    await turns()
    tasks[1].cancel()
    await turns()
    assert queue.queue_length == 2
    queue.__exit__()
    await turns()
    assert (tasks[0].done(), tasks[2].done(), queue.in_flight) == (True, False, 1)
    tasks[2].cancel()
    await turns()
    queue.__exit__()
    assert (queue.in_flight, queue.queue_length) == (0, 0)


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
    with pytest.raises(GatewayError, match="1 of at most 1 requests running and 1 waiting") as shed:
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
    assert (queue.in_flight, queue.queue_length) == (1, 0)


async def test_a_request_that_cannot_meet_its_deadline_does_not_wait() -> None:
    queue, _ = room(1)
    await queue.enter(ask())
    with pytest.raises(GatewayError, match=r"The client gives up in 0\.0 s") as shed:
        await queue.enter(ask(deadline_s=monotonic() + 0.01))
    assert (shed.value.status, shed.value.reason) == (429, "deadline")
    assert (queue.in_flight, queue.queue_length) == (1, 0)


async def test_without_an_available_endpoint_no_request_is_admitted() -> None:
    queue, candidates = room(2)
    candidates[0].load.is_available = False
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
    candidates[0].load.is_available = False
    queue.refresh()
    await turns()
    assert not waiting.done()
    assert queue.permits_in_use == 2
    queue.__exit__()
    candidates[1].load.in_flight -= 1
    queue.refresh()
    await turns()
    assert waiting.done()


async def test_a_returning_endpoint_admits_as_many_requests_as_its_cap() -> None:
    queue, candidates = room(2, 2)
    candidates[1].load.is_available = False
    queue.refresh()
    for _ in range(2):
        await queue.enter(ask())
        candidates[0].load.in_flight += 1
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(3)]
    await turns()
    candidates[1].load.is_available = True
    queue.refresh()
    await turns()
    assert [task.done() for task in tasks] == [True, True, False]
    tasks[2].cancel()
    await turns()


async def test_many_requests_cancelled_as_a_permit_is_freed_leave_it_free() -> None:
    queue, _ = room(1, size=2000)
    await queue.enter(ask())
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(1500)]
    await turns()
    for task in tasks:
        task.cancel()
    queue.__exit__()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.in_flight, queue.queue_length) == (0, 0)


async def test_a_fallback_into_a_full_queue_evicts_no_request() -> None:
    queue, _ = room(1, size=2)
    await queue.enter(ask())
    tasks = [asyncio.create_task(queue.enter(ask())) for _ in range(2)]
    await turns()
    stranger = ask()
    assert not queue.try_enter(
        msgspec.structs.replace(stranger, request=Request("o", "model", "other", 1000, 100))
    )
    await turns()
    assert ([task.done() for task in tasks], queue.queue_length) == ([False, False], 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
