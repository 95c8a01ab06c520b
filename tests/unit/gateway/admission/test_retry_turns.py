"""Tests of retries within the retry budget: how many run at once, and which wait for a turn."""

from __future__ import annotations

import asyncio

import pytest

from gateway.admission.retry_turns import RetryTurns
from policies.health.retry_budget import RetryLimits


class ActiveRequests:
    """A stand-in for the gateway's number of running requests, which the test sets."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def __call__(self) -> int:
        return self.count


def retry_turns(floor: int, share: float = 0.2, active: ActiveRequests | None = None) -> RetryTurns:
    retries = RetryTurns(active or ActiveRequests())
    retries.configure(RetryLimits(share, floor))
    return retries


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_retries_beyond_the_budget_wait() -> None:
    retries = retry_turns(floor=2)
    assert await retries.acquire()
    assert await retries.acquire()
    third = asyncio.create_task(retries.acquire())
    await turns()
    assert not third.done()
    retries.release()
    await turns()
    assert third.result()
    retries.release()
    retries.release()
    assert retries.running == 0


@pytest.mark.parametrize("active", [0, 1, 3, 4])
async def test_the_number_of_retries_left_is_the_number_granted(active: int) -> None:
    retries = retry_turns(floor=0, share=0.3, active=ActiveRequests(active))
    left = retries.left
    granted = sum(retries.try_acquire() for _ in range(10))
    assert (granted, retries.left) == (left, 0)


def test_without_a_retry_budget_the_number_of_retries_left_is_none() -> None:
    retries = retry_turns(floor=0, share=0)
    assert (retries.left, retries.try_acquire()) == (None, False)


async def test_a_request_cancelled_while_waiting_for_a_retry_keeps_none() -> None:
    retries = retry_turns(floor=1)
    await retries.acquire()
    tasks = [asyncio.create_task(retries.acquire()) for _ in range(3)]
    await turns()
    retries.release()  # to the first waiter, which is cancelled before its task runs
    tasks[0].cancel()
    tasks[1].cancel()
    await turns()
    assert tasks[2].result()
    retries.release()
    assert retries.running == 0


async def test_a_shrinking_budget_grants_all_waiting_retries_in_the_end() -> None:
    # The budget shrinks as requests end, so that a returned retry may not be free any more.
    active = ActiveRequests(2)
    retries = retry_turns(floor=1, share=0.5, active=active)
    assert await retries.acquire()
    assert await retries.acquire()
    waiting = asyncio.create_task(retries.acquire())
    await turns()
    active.count = 0
    retries.release()  # one of the two retries ends, but only one is allowed now
    await turns()
    assert not waiting.done()
    retries.release()
    await turns()
    assert waiting.result()
    retries.release()
    assert retries.running == 0


async def test_a_stopping_gateway_refuses_waiting_and_new_retries() -> None:
    retries = retry_turns(floor=1)
    assert await retries.acquire()
    waiting = asyncio.create_task(retries.acquire())
    await turns()
    retries.stop()
    await turns()
    assert not waiting.result()
    retries.release()
    assert not await retries.acquire()
    assert retries.running == 0
