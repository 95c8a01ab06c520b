"""Deaths and harm at every stage of split requests, seen from the client: the right words or a clean error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.split_house import SENTENCE, split_house
from tests.fair_time import at_most, pace

DIALECTS = ("vllm_nixl", "vllm_push", "mooncake", "sglang", "trtllm")
SOON_S = 0.6 * pace()
FAST = {"wait_s": SOON_S, "lease_s": SOON_S}
SPLIT = {"transfer_timeout": f"{SOON_S:.1f}s"}


def long(number: int, **members: Any) -> dict[str, Any]:
    return {"prompt": f"{number} " + SENTENCE * 20, "max_tokens": 12} | members


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("role", "what"),
    [
        ("prefill", "die-in-prefill"),
        ("prefill", "die-in-transfer"),
        ("prefill", "kv-lost"),
        ("prefill", "5xx:status=500"),
        ("prefill", "refuse"),
        ("decode", "die-in-pull"),
        ("decode", "die-mid-decode:after=3"),
        ("decode", "5xx:status=503"),
        ("decode", "refuse"),
    ],
)
async def test_whichever_endpoint_fails_the_client_gets_the_right_answer_and_nothing_stays_held(
    dialect: str, role: str, what: str
) -> None:
    async with split_house(dialect, kv=FAST, split=SPLIT) as house:
        await house.right(long(0))
        member = (house.prefill if role == "prefill" else house.decode)[0]
        member.faults.apply(what)
        await asyncio.gather(*(house.right(long(number)) for number in range(1, 9)))
        member.faults.clear()
        await house.at_rest(within_s=7 + SOON_S)  # a decoder asks the bootstrap server of a dead engine for 5 s


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_that_dies_after_its_first_words_ends_with_an_error(dialect: str) -> None:
    async with split_house(dialect, kv=FAST) as house:
        for member in house.decode:
            member.faults.apply("die-mid-decode:after=3")
        body = {"model": "m", "stream": True} | long(1)
        async with house.http.post(f"{house.app.url}/v1/completions", json=body) as answer:
            raw = await answer.read()
        assert b'data: {"error"' in raw or b'"code":500' in raw
        for member in house.members:
            member.faults.clear()
        await house.at_rest(within_s=4 + SOON_S)


@pytest.mark.parametrize("harm", ["wire-corrupt:after=300", "wire-cut:after=300", "wire-replay:after=0"])
async def test_harm_on_the_wire_costs_time_and_never_a_word(harm: str) -> None:
    kv = FAST | {"transport": "tcp", "wire_faults": True}
    async with split_house("vllm_nixl", kv=kv, split=SPLIT) as house:
        house.prefill[0].faults.apply(harm)
        await asyncio.gather(*(house.right(long(number)) for number in range(8)))
        house.prefill[0].faults.clear()
        await house.at_rest(within_s=4 + SOON_S)


async def test_a_frozen_prefiller_is_noticed_and_the_request_computed_elsewhere() -> None:
    kv = FAST | {"transport": "tcp", "wire_faults": True}
    async with split_house("vllm_nixl", kv=kv, split=SPLIT) as house:
        for number in range(4):
            await house.right(long(number))
        house.prefill[0].faults.apply("wire-stall")
        house.prefill[1].faults.apply("wire-stall")
        async with at_most(2.0 + SOON_S):
            await house.right(long(10))
        for member in house.prefill:
            member.faults.clear()
        await house.at_rest(within_s=4 + SOON_S)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_storm_of_clients_that_leave_at_the_first_byte_leaves_nothing_behind(dialect: str) -> None:
    async with split_house(dialect, speed=50.0) as house:

        async def leave_at_first_byte(number: int) -> None:
            body = {"model": "m", "stream": True} | long(number, max_tokens=200)
            async with house.http.post(f"{house.app.url}/v1/completions", json=body) as answer:
                await answer.content.readany()
                answer.close()

        stays = [house.right(long(number)) for number in range(0, 60, 10)]
        leaves = [leave_at_first_byte(number) for number in range(60) if number % 10]
        await asyncio.gather(*stays, *leaves)
        await house.at_rest(within_s=10)
