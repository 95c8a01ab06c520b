"""Tests of split requests through a gateway, for each kind of engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from gateway.disagg.handoffs import RELEASE_TIMEOUT_S
from mockgpu.handoff.kv_handoff import DECLINE_S
from tests.e2e.split_fleet import SENTENCE, SplitFleet, split_fleet

REQUESTS = int(os.environ.get("PENSTOCK_SPLIT_REQUESTS", "500"))
DIALECTS = ("vllm_nixl", "vllm_push", "penstock", "mooncake", "sglang", "trtllm")


def mixed_requests(count: int, seed: int) -> Iterator[tuple[dict[str, Any], str]]:
    # Yield random requests with their paths: short and long, chat and completion.
    #
    # Some are streamed, and some share a prefix.
    rng = Random(seed)
    for number in range(count):
        beginning = SENTENCE * rng.choice((0, 0, 10, 30))
        prompt = beginning + f"Question {number}? " + SENTENCE * int(rng.expovariate(1 / 12))
        body = {"max_tokens": rng.randint(1, 24), "stream": rng.random() < 0.5}
        if rng.random() < 0.5:
            yield body | {"prompt": prompt}, "/v1/completions"
        else:
            yield body | {"messages": [{"role": "user", "content": prompt}]}, "/v1/chat/completions"


async def assert_all_right(fleet: SplitFleet, count: int, seed: int, at_once: int = 24) -> None:
    places = asyncio.Semaphore(at_once)

    async def one(body: dict[str, Any], path: str) -> None:
        async with places:
            await fleet.assert_right_answer(body, path)

    await asyncio.gather(*(one(body, path) for body, path in mixed_requests(count, seed)))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_mixed_requests_get_the_text_of_one_group_alone(dialect: str) -> None:
    async with split_fleet(dialect) as fleet:
        await assert_all_right(fleet, REQUESTS, seed=DIALECTS.index(dialect))
        await fleet.at_rest()
        assert fleet.metric("penstock_split_decisions_total", decision="split") > REQUESTS / 4
        assert fleet.metric("penstock_split_legs_total", outcome="broke") == 0
        for stage in ("queue", "prefill", "transfer", "first_token"):
            assert fleet.metric("penstock_split_stage_seconds_count", stage=stage) > REQUESTS / 4
        if dialect != "sglang":  # SGLang's decode servers serve no request alone
            assert (
                fleet.metric("penstock_split_decisions_total", decision="whole", reason="short")
                > REQUESTS / 16
            )


@pytest.mark.parametrize("model", ["demo-8b", "deepseek-v3"])
@pytest.mark.parametrize("tps", [(4, 2), (2, 4), (8, 8)])
async def test_groups_of_different_tp_sizes_are_paired(tps: tuple[int, int], model: str) -> None:
    if model == "deepseek-v3":
        tps = tps[0] * 4, tps[1] * 4
    async with split_fleet("vllm_nixl", tps, model=model, kv_tokens=16_384) as fleet:
        await assert_all_right(fleet, 40, seed=5)
        await fleet.at_rest()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_clients_that_disconnect_at_any_time_leave_nothing_held(dialect: str) -> None:
    async with split_fleet(dialect, speed=20.0, kv={"gbps": 40.0}) as fleet:
        rng = Random(7)

        async def leave(number: int) -> None:
            body = {"prompt": f"{number} " + SENTENCE * 40, "max_tokens": 40, "stream": True}
            asking = asyncio.ensure_future(fleet.ask(body))
            await asyncio.sleep(rng.random() * 0.12)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        for batch in range(6):
            await asyncio.gather(*(leave(batch * 100 + number) for number in range(6)))
            # A request sent only to free KV is closed after TAKEN_S. A decode group declines a leg
            # that was closed before the engine saw it within DECLINING_S.
        await fleet.at_rest(within_s=RELEASE_TIMEOUT_S + DECLINE_S + 5.0)
        await fleet.assert_right_answer({"prompt": "and still " + SENTENCE * 20, "max_tokens": 8})
        await fleet.at_rest()
