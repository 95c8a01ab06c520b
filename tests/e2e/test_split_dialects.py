"""Split requests through the whole gateway, two prefill and two decode groups of each dialect, real KV bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from gateway.disagg.handoffs import RELEASE_TIMEOUT_S
from mockgpu.handoff.kv_handoff import DECLINE_S
from tests.e2e.split_house import SENTENCE, SplitHouse, split_house

REQUESTS = int(os.environ.get("PENSTOCK_SPLIT_REQUESTS", "500"))
DIALECTS = ("vllm_nixl", "vllm_push", "mooncake", "sglang", "trtllm")


def mixed(count: int, seed: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Requests short and long, chat and completions, stream and not, some with beginnings in common."""
    rng = Random(seed)
    for number in range(count):
        beginning = SENTENCE * rng.choice((0, 0, 10, 30))
        prompt = beginning + f"Question {number}? " + SENTENCE * int(rng.expovariate(1 / 12))
        body = {"max_tokens": rng.randint(1, 24), "stream": rng.random() < 0.5}
        if rng.random() < 0.5:
            yield body | {"prompt": prompt}, "/v1/completions"
        else:
            yield body | {"messages": [{"role": "user", "content": prompt}]}, "/v1/chat/completions"


async def all_right(house: SplitHouse, count: int, seed: int, at_once: int = 24) -> None:
    places = asyncio.Semaphore(at_once)

    async def one(body: dict[str, Any], path: str) -> None:
        async with places:
            await house.right(body, path)

    await asyncio.gather(*(one(body, path) for body, path in mixed(count, seed)))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_mixed_requests_are_answered_as_by_one_group_alone(dialect: str) -> None:
    async with split_house(dialect) as house:
        await all_right(house, REQUESTS, seed=DIALECTS.index(dialect))
        await house.at_rest()
        assert house.metric("penstock_split_decisions_total", decision="split") > REQUESTS / 4
        assert house.metric("penstock_split_legs_total", outcome="broke") == 0
        for stage in ("queue", "prefill", "transfer", "first_token"):
            assert house.metric("penstock_split_stage_seconds_count", stage=stage) > REQUESTS / 4
        if dialect != "sglang":  # its decode servers serve nobody alone
            assert house.metric("penstock_split_decisions_total", decision="whole", reason="short") > REQUESTS / 16


@pytest.mark.parametrize("model", ["demo-8b", "deepseek-v3"])
@pytest.mark.parametrize("tps", [(4, 2), (2, 4), (8, 8)])
async def test_groups_of_other_shapes_are_paired(tps: tuple[int, int], model: str) -> None:
    if model == "deepseek-v3":
        tps = tps[0] * 4, tps[1] * 4
    async with split_house("vllm_nixl", tps, model=model, kv_tokens=16_384) as house:
        await all_right(house, 40, seed=5)
        await house.at_rest()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(dialect: str) -> None:
    async with split_house(dialect, speed=20.0, kv={"gbps": 40.0}) as house:
        rng = Random(7)

        async def leave(number: int) -> None:
            body = {"prompt": f"{number} " + SENTENCE * 40, "max_tokens": 40, "stream": True}
            asking = asyncio.ensure_future(house.ask(body))
            await asyncio.sleep(rng.random() * 0.12)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        for batch in range(6):
            await asyncio.gather(*(leave(batch * 100 + number) for number in range(6)))
        # What frees KV for nobody is let go of at last, and a leg closed before its engine saw it declines by name.
        await house.at_rest(within_s=RELEASE_TIMEOUT_S + DECLINE_S + 5.0)
        await house.right({"prompt": "and still " + SENTENCE * 20, "max_tokens": 8})
        await house.at_rest()
