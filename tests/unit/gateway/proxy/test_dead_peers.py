"""Tests that the attempt after a failure goes to an endpoint that passes a health check.

Most engines here die at the same moment. They accept connections and close them, and no health
check has noticed yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest

from policies.health.endpoint_health import HealthState
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    TEXT,
    EngineRequest,
    Script,
    ScriptedEngine,
    SplitGateway,
    decodes,
    prefills,
    resets,
    split_gateway,
    streams_one_token,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

NO_PROBES = {"interval": "60s"}  # no probes except those that requests cause
DEAD, ALIVE = 24, 2


def whole(engines: Sequence[Script], **options: Any) -> AbstractAsyncContextManager[SplitGateway]:
    usual = {"models": [{"name": MODEL, "pool": "main"}], "health": NO_PROBES}
    return split_gateway("vllm_nixl", [], list(engines), decode_role="both", **(usual | options))


def kill(halves: Sequence[ScriptedEngine]) -> None:
    for half in halves:
        half.die()


@pytest.mark.parametrize("policy", ["prefix_aware", "round_robin", "power_of_two"])
async def test_a_request_succeeds_when_most_engines_died_at_once(policy: str) -> None:
    async with whole([decodes] * (DEAD + ALIVE), policy=policy) as running:
        await asyncio.gather(*(running.ask(words=3) for _ in range(DEAD)))
        kill(running.decode[:DEAD])
        replies = [await running.ask(words=3) for _ in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        await running.at_rest()


async def test_a_prompt_that_kills_engines_reaches_only_as_many_as_there_are_attempts() -> None:
    async with whole([resets] * 8) as running:
        reply = await running.ask(words=3)
        assert (reply.status, reply.json["error"]["code"]) == (502, "upstream_failed")
        assert sum(len(half.requests) for half in running.decode) == 3
        await running.at_rest()


async def test_an_engine_that_fails_its_check_is_ejected_and_costs_no_attempt() -> None:
    async with whole([decodes] * 4, policy="round_robin", retries={"attempts": 2}) as running:
        kill(running.decode[:3])
        replies = [await running.ask(words=3) for _ in range(2)]
        assert [reply.status for reply in replies] == [200] * 2
        states = [live.health.state for live in running.app.gateway.endpoints.all()]
        assert states.count(HealthState.EJECTED) == 3
        await running.at_rest()


async def test_an_engine_whose_check_times_out_is_used_when_there_is_no_other() -> None:
    quick = NO_PROBES | {"timeout": "100ms"}
    async with whole([resets, decodes, decodes], policy="round_robin", health=quick) as running:
        for half in running.decode[1:]:
            half.is_silent = True
        replies = await asyncio.gather(*(running.ask(words=3) for _ in range(3)))
        assert [reply.status for reply in replies] == [200] * 3


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_split_request_succeeds_when_most_engines_of_a_role_died_at_once(half: str) -> None:
    many, few = DEAD + ALIVE, ALIVE
    counts = (many, few) if half == "prefill" else (few, many)
    async with split_gateway(
        "vllm_nixl", [prefills()] * counts[0], [decodes] * counts[1], health=NO_PROBES
    ) as running:
        kill((running.prefill if half == "prefill" else running.decode)[:DEAD])
        replies = [await running.ask() for _ in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        await running.at_rest()


async def test_a_stream_is_continued_by_an_engine_that_passes_its_check() -> None:
    async def dies_with_most_others(asked: EngineRequest) -> None:
        if "prompt" in asked.json:
            send_rest(asked)
            return
        send_token(asked)
        await asked.writer.drain()
        await asyncio.sleep(0.05)  # the token must arrive before the connection is lost
        kill([half for half in running.decode[:DEAD] if asked not in half.requests])
        asked.writer.transport.abort()

    models = [{"name": MODEL, "pool": "main", "resume": {}}]
    async with whole(
        [dies_with_most_others] * (DEAD + ALIVE), models=models, policy="round_robin"
    ) as running:
        reply = await running.ask(words=3, stream=True)
        assert (reply.status, reply.text) == (200, "".join(TEXT))
        assert running.metric("penstock_resumes_total", result="resumed") == 1
        assert running.metric("penstock_resumes_total") == 1


async def test_a_retry_releases_its_budget_when_its_response_begins() -> None:
    async with whole(
        [streams_one_token] * 3, policy="round_robin", retries={"budget": 0.0, "floor": 1}
    ) as running:
        kill(running.decode[:2])
        async with AsyncExitStack() as streams:
            opening = [streams.enter_async_context(running.listen()) for _ in range(3)]
            heads = [await stream.readline() for stream in await asyncio.gather(*opening)]
        assert all(TEXT[0].encode() in head for head in heads)
        await running.at_rest()


HEAD = {"id": "one", "model": MODEL, "created": 1}


def send_token(asked: EngineRequest) -> None:
    asked.open_stream()
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    asked.event(HEAD | {"choices": [role], "prompt_token_ids": [1, 2], "usage": used(0)})
    token = {"index": 0, "delta": {"content": TEXT[0]}, "token_ids": [7]}
    asked.event(HEAD | {"choices": [token], "usage": used(1)})


def send_rest(asked: EngineRequest) -> None:
    asked.open_stream()
    asked.event(
        HEAD | {"choices": [{"index": 0, "text": TEXT[1], "token_ids": [8]}], "usage": used(1)}
    )
    last = {"index": 0, "text": TEXT[2], "token_ids": [9], "finish_reason": "stop"}
    asked.event(HEAD | {"choices": [last], "usage": used(2)})
    asked.end_stream()


def used(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 2, "completion_tokens": tokens}
