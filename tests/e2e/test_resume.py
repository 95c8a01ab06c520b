"""kill -9 of a TP group under open streams, as the official SDK reads it: every word once, and none is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from mockgpu.text import expected_text
from tests.chaos.stage import Mock
from tests.e2e.processes import Gateway, gateway
from tests.scraped import total

STREAMS, TOKENS = 20, 50
CONFIG = """
models: [{{name: chat, served_model: demo-8b, pool: main, resume: {{}}}}]
pools:
  main:
    policy: least_loaded
    endpoints: [{{url: '{0}', max_concurrency: 400}}, {{url: '{1}', max_concurrency: 400}}]
"""


@pytest.fixture
def mocks() -> Iterator[list[Mock]]:
    made = [Mock(0.05) for _ in range(2)]  # so slow that its clients cannot fall behind it
    try:
        for mock in made:
            mock.ready()
        yield made
    finally:
        for mock in made:
            mock.end()


async def told(sdk: openai.AsyncOpenAI, number: int, begun: asyncio.Semaphore) -> int:
    """One stream, read to its end and compared with what an undisturbed one would say; tokens as it counts them."""
    said = [openai.types.chat.ChatCompletionUserMessageParam(role="user", content=f"What is the depth of {number}?")]
    stream = await sdk.chat.completions.create(
        model="chat", messages=said, max_tokens=TOKENS, stream=True, stream_options={"include_usage": True}
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
    assert text == expected_text({"messages": said}, TOKENS)
    assert {model for _, _, model in heads} == {"chat"}
    assert (len(heads), reasons, len(counted)) == (1, ["length"], 1)
    return counted[0]


async def killed_under_them(home: Gateway, victim: Mock) -> tuple[list[int], str]:
    begun = asyncio.Semaphore(0)
    async with openai.AsyncOpenAI(base_url=f"{home.url}/v1", api_key="none", max_retries=0) as sdk:
        streams = [asyncio.create_task(told(sdk, number, begun)) for number in range(STREAMS)]
        for _ in range(STREAMS):
            await begun.acquire()
        assert not any(stream.done() for stream in streams)
        victim.kill()
        counted = await asyncio.gather(*streams)
    async with aiohttp.ClientSession() as http, http.get(f"{home.admin_url}/metrics") as answer:
        return counted, await answer.text()


def test_streams_outlive_the_group_that_began_them_word_for_word(tmp_path: Path, mocks: list[Mock]) -> None:
    with gateway(tmp_path, CONFIG.format(*(mock.url for mock in mocks))) as home:
        counted, page = asyncio.run(killed_under_them(home, mocks[0]))
    assert counted == [TOKENS] * STREAMS
    assert total(page, "penstock_resumes_total", result="resumed") == STREAMS / 2
    assert total(page, "penstock_resumes_total") == STREAMS / 2
