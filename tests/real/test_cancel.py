"""Tests that engines free the KV of a split request whose client disconnects, at any stage.

It must be freed at once, not only when a time limit expires. This also applies to a request that
the decode engine refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import GatewayProcess
from tests.real.engine_requests import Answer, ask, body, prompt
from tests.real.engines import Engine, troubles
from tests.real.gateway_process import config, gateway
from tests.real.holding_relay import Tap

# Time for a step of the engine and its metrics page on a busy machine: a third of a lease.
FREE_WITHIN_S = 10.0
WAIT_S = 30.0


@pytest.fixture
def front(taps: tuple[Tap, Tap], tmp_path: Path) -> Iterator[GatewayProcess]:
    p, d = taps
    with gateway(
        tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")}, most=1)
    ) as started:
        yield started


@pytest.fixture(autouse=True)
async def nothing_is_left_behind(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap]
) -> AsyncIterator[None]:
    before = await troubles(engines)
    yield
    freed_s = [await engine.idle_within(FREE_WITHIN_S) for engine in engines]
    print(f"blocks free after {freed_s[0]:.2f} s at P, {freed_s[1]:.2f} s at D")
    assert await troubles(engines) == before


def _asks(front: GatewayProcess, seed: int, **members: object) -> asyncio.Task[Answer]:
    asked = body(prompt(1200, seed), stream=True, **members)  # type: ignore[arg-type]
    return asyncio.create_task(ask(front.url, asked))


async def _leave(client: asyncio.Task[Answer]) -> None:
    # Disconnect the client. Asserts that its request has not ended before.
    assert not client.done(), client.result()
    client.cancel()
    await asyncio.wait([client])


async def _passes(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), WAIT_S)


async def test_a_client_that_leaves_the_queue(front: GatewayProcess, taps: tuple[Tap, Tap]) -> None:
    _, before_d = taps
    before_d.watch()
    busy = _asks(front, 3001, max_tokens=400)
    await _passes(before_d.answered)
    waiting = _asks(front, 3002)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.3)
    await _leave(waiting)
    await _leave(busy)


async def test_a_client_that_leaves_during_prefill(
    front: GatewayProcess, taps: tuple[Tap, Tap], engines: tuple[Engine, Engine]
) -> None:
    before_p, before_d = taps
    before_p.watch()
    before_d.watch()
    client = _asks(front, 3003)
    await _passes(before_p.asked)
    await asyncio.sleep(0.02)  # the engine has the request now; the prefill takes longer than this
    await _leave(client)
    assert not before_p.answered.is_set(), "the prefill was over before the client left"
    assert not before_d.answered.is_set()


async def test_a_client_that_leaves_between_the_legs(
    front: GatewayProcess, taps: tuple[Tap, Tap], engines: tuple[Engine, Engine]
) -> None:
    _, before_d = taps
    before_d.watch(hold=True)
    client = _asks(front, 3004)
    await _passes(before_d.asked)
    await engines[0].holds_within(WAIT_S)
    assert await engines[1].blocks_held() == 0
    await _leave(client)
    await asyncio.sleep(0.1)
    before_d.go_on()


async def test_a_client_that_leaves_while_the_kv_cache_is_pulled(
    front: GatewayProcess, taps: tuple[Tap, Tap]
) -> None:
    _, before_d = taps
    before_d.watch()
    client = _asks(front, 3005)
    await _passes(before_d.asked)
    await _leave(client)


async def test_a_client_that_leaves_during_decode(
    front: GatewayProcess, taps: tuple[Tap, Tap], engines: tuple[Engine, Engine]
) -> None:
    _, before_d = taps
    before_d.watch()
    client = _asks(front, 3006, max_tokens=1000)
    await _passes(before_d.answered)
    await engines[1].holds_within(WAIT_S)
    await _leave(client)


async def test_a_prefill_whose_answer_nobody_waits_for_any_more(
    front: GatewayProcess, taps: tuple[Tap, Tap], engines: tuple[Engine, Engine]
) -> None:
    before_p, _ = taps
    for turn in range(20):
        before_p.watch()
        client = _asks(front, 3100 + turn)
        await _passes(before_p.asked)
        await asyncio.wait([client], timeout=0.02 * turn)
        client.cancel()
        await asyncio.wait([client])


async def test_a_request_that_the_decoder_refuses_after_its_prefill(front: GatewayProcess) -> None:
    # It requests more logprobs than vLLM allows, which the prefill request leaves out.
    answer = await ask(front.url, body(prompt(400, 3200), top_logprobs=21))
    assert (answer.status, "logprobs" in answer.error) == (400, True), answer.error
