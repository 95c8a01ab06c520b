"""A client that disconnects at any stage of a split request, or is refused by the decode engine.

In all cases both engines free their blocks, and no lease expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import GatewayProcess
from tests.real.asking import Answer, ask, body, prompt
from tests.real.engines import Engine, failure_counts
from tests.real.fronts import config, gateway
from tests.real.tap import Tap

FREE_WITHIN_S = 10.0  # a third of a lease; time for a step and the metrics on a busy machine
WAIT_S = 30.0


@pytest.fixture
def front(taps: tuple[Tap, Tap], tmp_path: Path) -> Iterator[Gateway]:
    """Yield a gateway that uses the engines through the taps, one request at a time each."""
    p, d = taps
    with gateway(
        tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")}, most=1)
    ) as started:
        yield started


@pytest.fixture(autouse=True)
async def resources_are_freed(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap]
) -> AsyncIterator[None]:
    before = await failure_counts(engines)
    yield
    freed_s = [await engine.await_idle(FREE_WITHIN_S) for engine in engines]
    print(f"blocks free after {freed_s[0]:.2f} s at P, {freed_s[1]:.2f} s at D")
    assert await failure_counts(engines) == before


def _start_request(front: Gateway, seed: int, **members: object) -> asyncio.Task[Answer]:
    request = body(prompt(1200, seed), stream=True, **members)  # type: ignore[arg-type]
    return asyncio.create_task(ask(front.url, request))


async def _disconnect(client: asyncio.Task[Answer]) -> None:
    """Disconnect a client. Its request must not have ended, or the stage would be over."""
    assert not client.done(), client.result()
    client.cancel()
    await asyncio.wait([client])


async def _await_event(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), WAIT_S)


async def test_a_client_disconnects_in_the_queue(front: Gateway, taps: tuple[Tap, Tap]) -> None:
    _, before_d = taps
    before_d.watch()
    busy = _start_request(front, 3001, max_tokens=400)
    await _await_event(before_d.answered)
    waiting = _start_request(front, 3002)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.3)
    await _disconnect(waiting)
    await _disconnect(busy)


async def test_a_client_disconnects_during_prefill(
    front: Gateway, taps: tuple[Tap, Tap], engines: tuple[Engine, Engine]
) -> None:
    before_p, before_d = taps
    before_p.watch()
    before_d.watch()
    client = _start_request(front, 3003)
    await _await_event(before_p.asked)
    await asyncio.sleep(0.02)  # the request is at the engine; its prefill takes longer
    await _disconnect(client)
    assert not before_p.answered.is_set(), "the prefill was over before the client left"
    assert not before_d.answered.is_set()


async def test_a_client_disconnects_between_the_legs(
    front: Gateway, taps: tuple[Tap, Tap], engines: tuple[Engine, Engine]
) -> None:
    _, before_d = taps
    before_d.watch(hold=True)
    client = _start_request(front, 3004)
    await _await_event(before_d.asked)
    await engines[0].await_blocks(WAIT_S)
    assert await engines[1].blocks_in_use() == 0
    await _disconnect(client)
    await asyncio.sleep(0.1)
    before_d.go_on()


async def test_a_client_disconnects_during_the_transfer(
    front: Gateway, taps: tuple[Tap, Tap]
) -> None:
    _, before_d = taps
    before_d.watch()
    client = _start_request(front, 3005)
    await _await_event(before_d.asked)
    await _disconnect(client)


async def test_a_client_disconnects_during_decode(
    front: Gateway, taps: tuple[Tap, Tap], engines: tuple[Engine, Engine]
) -> None:
    _, before_d = taps
    before_d.watch()
    client = _start_request(front, 3006, max_tokens=1000)
    await _await_event(before_d.answered)
    await engines[1].await_blocks(WAIT_S)
    await _disconnect(client)


async def test_clients_disconnect_around_the_end_of_the_prefill(
    front: Gateway, taps: tuple[Tap, Tap], engines: tuple[Engine, Engine]
) -> None:
    """Twenty clients disconnect at twenty times around the end of the prefill."""
    before_p, _ = taps
    for number in range(20):
        before_p.watch()
        client = _start_request(front, 3100 + number)
        await _await_event(before_p.asked)
        await asyncio.wait([client], timeout=0.02 * number)
        client.cancel()
        await asyncio.wait([client])


async def test_the_decode_engine_refuses_a_request_after_its_prefill(front: Gateway) -> None:
    """Only the decode request contains the invalid top_logprobs."""
    answer = await ask(front.url, body(prompt(400, 3200), top_logprobs=21))
    assert (answer.status, "logprobs" in answer.error) == (400, True), answer.error
