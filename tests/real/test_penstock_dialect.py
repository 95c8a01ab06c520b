"""Tests of split requests between two real engines with our KV connector (dialect `penstock`).

They send many requests through the gateway, and disconnect clients. The prefill engine computes 512
tokens per step, so that the KV of longer prompts is sent in several parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import Engine, idle_around
from tests.real.gateway_process import config, gateway
from tests.real.handoff_by_hand import SERVING, card_of, decode, prefill, push
from tests.real.test_connector import fetched, started

REQUESTS, AT_ONCE, PREFIXES = 200, 4, 8
SMALL_STEPS = ("--max-num-batched-tokens", "512")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    with started(tmp_path_factory.mktemp("kv"), 1, SMALL_STEPS) as engines:
        yield engines


@pytest.fixture
async def idle(pair: tuple[Engine, Engine]) -> AsyncIterator[tuple[Engine, Engine]]:
    async with idle_around(pair, 40.0, 15.0):
        yield pair


def text_of(number: int) -> str:
    # Return a prompt of 200 to 1,900 tokens. Half of them begin like others.
    if number % 2:
        return prompt(120 + 4 * number, seed=9000 + number)
    beginning = prompt(300, seed=9500 + number % PREFIXES)
    return f"{beginning} {prompt(60 + 2 * number, seed=9000 + number)}"


async def all_answers(url: str, **members: object) -> list[Answer]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Answer:
        async with gate:
            asked = body(text_of(number), stream=bool(number // 2 % 2), max_tokens=8, **members)
            return await ask(url, asked)

    return list(await asyncio.gather(*map(one, range(REQUESTS))))


async def test_split_answers_equal_the_aggregated_ones(
    idle: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = idle
    aggregated = await all_answers(d.url, cache_salt="aggregated")
    before, counted = await fetched(d), await d.numbers()
    engines = {"P": (p.url, "prefill"), "D": (d.url, "decode")}
    with gateway(tmp_path, config(engines, serving=SERVING)) as front:
        split = await all_answers(front.url)
    for whole, halved in zip(aggregated, split, strict=True):
        assert (halved.status, halved.error) == (200, "")
        assert differences(halved, whole) == []
        assert halved.finish_reason == whole.finish_reason
    for engine in idle:
        await engine.idle_within(10.0)
    now = await d.numbers()
    assert now["kv_ranks_not_received_total"] == counted["kv_ranks_not_received_total"]
    accepted = now["kv_handoffs_accepted_total"] - counted["kv_handoffs_accepted_total"]
    parts = now["kv_ranks_received_total"] - counted["kv_ranks_received_total"]
    print(f"\n{accepted:.0f} of {REQUESTS} were split, {parts:.0f} parts were received")
    assert accepted > REQUESTS * 3 / 4
    assert parts > 1.5 * accepted
    assert await fetched(d) > before


async def test_another_prompt_with_the_same_transfer_id_gets_the_right_answer(
    idle: tuple[Engine, Engine],
) -> None:
    p, d = idle
    card = await card_of(p, d)
    mine, other = body(prompt(500, seed=9801)), body(prompt(500, seed=9802))
    first = await push(p, d, mine, "mine", card)
    whole = await ask(d.url, mine | {"cache_salt": "w1"})
    assert (first.status, differences(first, whole)) == (200, [])
    # The prefill engine computes `mine` for the id, so the KV of `other` never comes.
    answer = decode(d, other | {"cache_salt": "o"}, "mine", card)
    await prefill(p, mine, "mine")
    foreign = await answer
    whole = await ask(d.url, other | {"cache_salt": "w2"})
    assert (foreign.status, differences(foreign, whole)) == (200, [])
    for engine in (p, d):
        await engine.idle_within(40.0)


async def test_clients_that_leave_at_any_moment_leave_no_block_behind(
    idle: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = idle
    engines = {"P": (p.url, "prefill"), "D": (d.url, "decode")}
    with gateway(tmp_path, config(engines, serving=SERVING)) as front:
        assert (await ask(front.url, body(prompt(300, seed=9900)))).status == 200
        for moment in range(16):
            asked = body(prompt(800, seed=9901 + moment), max_tokens=64, stream=True)
            leg = asyncio.ensure_future(ask(front.url, asked))
            await asyncio.sleep(0.03 * moment)
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
        for engine in (d, p):
            assert await engine.idle_within(15.0) < 15.0
