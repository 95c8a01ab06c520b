"""Tests that split requests of every API have the same answers as directly at a real engine.

The gateway converts Messages and Responses to chat completions in order to split them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.real.api_answers import (
    CHAT,
    MESSAGES,
    PATHS,
    RESPONSES,
    ApiAnswer,
    ask_api,
    request_of,
)
from tests.real.engine_requests import prompt
from tests.real.engines import Engine, transfers, troubles
from tests.real.gateway_process import config, gateway

REQUESTS, AT_ONCE = 10, 4  # number of requests of each API, and how many run at once
TOKENS = 24


async def _answers(url: str, requests: list[tuple[str, dict[str, Any]]]) -> list[ApiAnswer]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(path: str, body: dict[str, Any]) -> ApiAnswer:
        async with gate:
            return await ask_api(url, path, body)

    return list(await asyncio.gather(*(one(*each) for each in requests)))


async def _assert_equal_split(
    engines: tuple[Engine, Engine], folder: Path, requests: list[tuple[str, dict[str, Any]]]
) -> list[ApiAnswer]:
    # Let the prefill engine answer the whole requests first, so that the decode engine has no KV of
    # their prompts.
    p, d = engines
    whole = await _answers(p.url, requests)
    moved, trouble = await transfers(engines), await troubles(engines)
    with gateway(folder, config({"P": (p.url, "prefill"), "D": (d.url, "decode")})) as front:
        split = await _answers(front.url, requests)
    for (path, body), one, other in zip(requests, whole, split, strict=True):
        assert one.error == "", (path, one)
        assert other.comparable == one.comparable, (path, body["stream"])
    assert await transfers(engines) - moved == len(requests)
    assert await troubles(engines) == trouble
    for engine in engines:
        await engine.idle_within(10.0)
    return split


async def test_split_answers_of_every_api_equal_the_engine_s_own(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    requests = [
        (path, request_of(path, prompt(150 + 30 * i, 9000 + 100 * n + i), TOKENS, stream=i % 2 > 0))
        for n, path in enumerate(PATHS)
        for i in range(REQUESTS)
    ]
    split = await _assert_equal_split(engines, tmp_path, requests)
    assert {answer.endpoint for answer in split} == {"D"}
    # All answers would be equal if the prompts lacked the clients' texts.
    assert len({answer.text for answer in split}) > len(requests) / 2


async def test_a_conversation_of_messages_and_one_of_responses_are_split_turn_by_turn(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    # Each prompt contains the previous answer, whose KV the decode engine has and P has not.
    p, d = engines
    with gateway(tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")})) as front:
        for path, member in ((MESSAGES, "messages"), (RESPONSES, "input"), (CHAT, "messages")):
            turns: list[dict[str, Any]] = []
            for turn in range(3):
                seed = 9700 + turn + 10 * PATHS.index(path)
                turns.append({"role": "user", "content": prompt(300, seed)})
                body = request_of(path, "", TOKENS, stream=turn % 2 > 0) | {member: turns}
                split = await ask_api(front.url, path, body)
                whole = await ask_api(p.url, path, body)
                assert split.comparable == whole.comparable, (path, turn)
                turns.append({"role": "assistant", "content": split.text})
    for engine in engines:
        await engine.idle_within(10.0)
