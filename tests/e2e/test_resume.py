"""Tests that SDK clients read each word exactly once when an engine dies with open streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from mockgpu.mock_tokenizer import expected_text
from tests.chaos.fleet_processes import MockProcess
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.e2e.resumable_mocks import config_of, resumable_mocks, stall
from tests.metrics_page import total

STREAMS, TOKENS = 20, 50


@pytest.fixture
def mocks() -> Iterator[list[MockProcess]]:
    with resumable_mocks() as processes:
        yield processes


async def read_stream(sdk: openai.AsyncOpenAI, number: int, begun: asyncio.Semaphore) -> int:
    # Read one stream and compare it with an undisturbed one; return its completion tokens.
    #
    # `begun` is released at its first token.
    messages = [
        openai.types.chat.ChatCompletionUserMessageParam(
            role="user", content=f"What is the depth of {number}?"
        )
    ]
    stream = await sdk.chat.completions.create(
        model="chat",
        messages=messages,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, heads, reasons, counted = "", set(), [], []
    async for chunk in stream:
        heads.add((chunk.id, chunk.created, chunk.model))
        counted += [] if chunk.usage is None else [chunk.usage.completion_tokens]
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        if len(text) == 12:
            begun.release()
    assert text == expected_text({"messages": messages}, TOKENS)
    assert {model for _, _, model in heads} == {"chat"}
    assert (len(heads), reasons, len(counted)) == (1, ["length"], 1)
    return counted[0]


async def kill_during_streams(
    gateway: GatewayProcess, victim: MockProcess
) -> tuple[list[int], str]:
    begun = asyncio.Semaphore(0)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
    ) as sdk:
        streams = [
            asyncio.create_task(read_stream(sdk, number, begun)) for number in range(STREAMS)
        ]
        for _ in range(STREAMS):
            await begun.acquire()
        victim.kill()
        counted = await asyncio.gather(*streams)
    async with aiohttp.ClientSession() as http, http.get(f"{gateway.admin_url}/metrics") as answer:
        return counted, await answer.text()


def test_streams_survive_the_death_of_their_group_word_for_word(
    tmp_path: Path, mocks: list[MockProcess]
) -> None:
    stall(mocks[0], after=7)
    with gateway_process(tmp_path, config_of(mocks)) as gateway:
        counted, page = asyncio.run(kill_during_streams(gateway, mocks[0]))
    assert counted == [TOKENS] * STREAMS
    assert total(page, "penstock_resumes_total", result="resumed") == STREAMS / 2
    assert total(page, "penstock_resumes_total") == STREAMS / 2
