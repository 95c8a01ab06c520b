"""Tests of translated API requests that are split, also if a decode engine dies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mockgpu.mock_tokenizer import expected_text
from tests.duration_limits import pace
from tests.e2e.split_fleet import MODEL, SENTENCE, SplitFleet, split_fleet
from tests.unit.gateway.protocol.translate.chats import message_of, response_of

TOKENS = 24
SOON_S = 0.6 * pace()
FAST = {"wait_s": SOON_S, "lease_s": SOON_S}
TRANSLATED = {"native_apis": []}


def models(dialect: str) -> list[dict[str, Any]]:
    split = {"dialect": dialect, "threshold_tokens": 64, "hysteresis": 0.0}
    return [{"name": MODEL, "pool": "main", "split": split, "resume": {}}]


def prompt(number: int) -> str:
    return f"{number} " + SENTENCE * 20


async def post(fleet: SplitFleet, path: str, body: dict[str, Any]) -> bytes:
    async with fleet.http.post(fleet.app.url + path, json={"model": MODEL} | body) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        return raw


async def message(fleet: SplitFleet, number: int, *, stream: bool) -> tuple[str, int]:
    # Send a message; return the answer's text and its number of output tokens.
    turns = [{"role": "user", "content": prompt(number)}]
    body = {"messages": turns, "max_tokens": TOKENS, "stream": stream}
    raw = await post(fleet, "/v1/messages", body)
    result = message_of(raw) if stream else json.loads(raw)
    return result["content"][0]["text"], result["usage"]["output_tokens"]


async def response(fleet: SplitFleet, number: int, *, stream: bool) -> tuple[str, int]:
    # Send a Responses request; return the answer's text and its number of output tokens.
    body = {"input": prompt(number), "max_output_tokens": TOKENS, "stream": stream}
    raw = await post(fleet, "/v1/responses", body)
    result = response_of(raw) if stream else json.loads(raw)
    return result["output"][0]["content"][0]["text"], result["usage"]["output_tokens"]


def expected(number: int) -> tuple[str, int]:
    chat = {"messages": [{"role": "user", "content": prompt(number)}]}
    return expected_text(chat, TOKENS), TOKENS


@pytest.mark.parametrize("dialect", ["vllm_nixl", "sglang", "trtllm"])
async def test_a_split_request_has_the_text_of_one_group_alone(dialect: str) -> None:
    async with split_fleet(dialect, kv=FAST, pool=TRANSLATED) as fleet:
        for number, ask in enumerate((message, response)):
            for stream in (True, False):
                assert await ask(fleet, number, stream=stream) == expected(number)
        assert fleet.metric("penstock_split_decisions_total", decision="split") >= 2


@pytest.mark.parametrize("pool", [TRANSLATED, {}], ids=["lacking", "native"])
@pytest.mark.parametrize("fault", ["die-mid-decode:after=7", "cut:after=7"])
async def test_a_stream_whose_decoder_dies_is_continued_word_for_word(
    fault: str, pool: dict[str, Any]
) -> None:
    options = {"kv": FAST, "models": models("vllm_nixl"), "health": {"failures": 1000}}
    async with split_fleet("vllm_nixl", pool=pool, **options) as fleet:
        fleet.decode[0].faults.apply(fault)
        asks = [(ask, number) for number in range(5) for ask in (message, response)]
        answers = await asyncio.gather(*(ask(fleet, number, stream=True) for ask, number in asks))
        assert list(answers) == [expected(number) for _, number in asks]
        assert fleet.metric("penstock_resumes_total", result="resumed") >= 1
