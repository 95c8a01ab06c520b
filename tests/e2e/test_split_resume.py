"""Streams whose decoder dies in mid-answer: the client reads every word once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mockgpu.text import expected_text
from tests.e2e.split_house import MODEL, SENTENCE, SplitHouse, split_house, text_of
from tests.fair_time import pace

CAN_RESUME = ("vllm_nixl", "vllm_push", "mooncake")
CANNOT_RESUME = ("sglang", "trtllm")
TOKENS = 24
SOON_S = 0.6 * pace()
FAST = {"wait_s": SOON_S, "lease_s": SOON_S}
HEALTH = {"failures": 1000}


def models(dialect: str, **resume: Any) -> list[dict[str, Any]]:
    split = {"dialect": dialect, "threshold_tokens": 64, "hysteresis": 0.0}
    return [{"name": MODEL, "pool": "main", "split": split, "resume": resume}]


def completion(number: int) -> dict[str, Any]:
    return {"prompt": f"{number} " + SENTENCE * 20, "max_tokens": TOKENS, "stream": True}


def chat(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{number} " + SENTENCE * 20}]
    return {"messages": messages, "max_tokens": TOKENS, "stream": True}


async def read(house: SplitHouse, body: dict[str, Any]) -> tuple[bytes, str]:
    """The bytes of an answer and the endpoint that began it."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with house.http.post(house.app.url + path, json={"model": MODEL} | body) as answer:
        assert answer.status == 200
        return await answer.read(), answer.headers["x-penstock-endpoint"]


def events_of(raw: bytes) -> list[dict[str, Any]]:
    *events, done = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    assert done == b"[DONE]"
    return [json.loads(event) for event in events]


async def whole(house: SplitHouse, body: dict[str, Any]) -> None:
    """The answer is word for word that of one undisturbed group, in one consistent stream."""
    raw, _ = await read(house, body)
    events = events_of(raw)
    assert text_of(raw) == expected_text(body, TOKENS)
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]


def resumes(house: SplitHouse, **labels: str) -> float:
    return house.metric("penstock_resumes_total", **labels)


@pytest.mark.parametrize("dialect", CAN_RESUME)
@pytest.mark.parametrize(
    "fault", ["die-mid-decode:after=7", "reset-mid-stream:after=7", "cut:after=7"]
)
async def test_a_decoder_that_dies_in_mid_answer_costs_its_clients_no_word(
    dialect: str, fault: str
) -> None:
    async with split_house(dialect, kv=FAST, models=models(dialect), health=HEALTH) as house:
        house.decode[0].faults.apply(fault)
        bodies = [body(number) for number in range(6) for body in (completion, chat)]
        await asyncio.gather(*(whole(house, body) for body in bodies))
        house.decode[0].faults.clear()
        assert resumes(house, result="resumed") >= 1
        assert resumes(house) == resumes(house, result="resumed")
        assert house.metric("penstock_completion_tokens_total") == len(bodies) * TOKENS
        await house.at_rest(within_s=7 + SOON_S)


@pytest.mark.parametrize("dialect", CAN_RESUME)
async def test_counts_and_chunks_are_those_of_an_answer_that_did_not_break(dialect: str) -> None:
    """The count of cached tokens is the prefiller's, whichever endpoint computed the rest."""
    options: dict[str, Any] = {"stream_options": {"include_usage": True}}
    async with split_house(dialect, kv=FAST, models=models(dialect), health=HEALTH) as house:
        await read(house, completion(0))  # concurrent dialects have learned who the prefillers are
        body = completion(1) | options
        expected = events_of((await read(house, body))[0])
    async with split_house(dialect, kv=FAST, models=models(dialect), health=HEALTH) as house:
        await read(house, completion(0))
        for decoder in house.decode:
            decoder.faults.apply("cut:after=7")
        breaking = asyncio.create_task(read(house, body))
        async with asyncio.timeout(10 * pace()):
            while not house.metric("penstock_upstream_errors_total"):
                await asyncio.sleep(0)
        for decoder in house.decode:
            decoder.faults.clear()
        events = events_of((await breaking)[0])
        assert [event["choices"] for event in events] == [event["choices"] for event in expected]
        assert [event["usage"] for event in events] == [event["usage"] for event in expected]
        assert resumes(house, result="resumed") == 1
        await house.at_rest(within_s=7 + SOON_S)


@pytest.mark.parametrize("dialect", CAN_RESUME)
async def test_without_another_decoder_the_stream_ends_with_an_error(dialect: str) -> None:
    settings = {"models": models(dialect), "health": HEALTH}
    async with split_house(dialect, groups=(2, 1), kv=FAST, **settings) as house:
        house.decode[0].faults.apply("cut:after=7")
        raw, endpoint = await read(house, completion(0))
        assert endpoint == house.decode[0].url.removeprefix("http://")
        assert b'"code":"stream_interrupted"' in raw
        assert b"[DONE]" not in raw
        assert resumes(house, result="nobody") == 1
        house.decode[0].faults.clear()
        await house.at_rest(within_s=7 + SOON_S)


@pytest.mark.parametrize("dialect", CANNOT_RESUME)
async def test_engines_that_report_no_token_ids_end_a_broken_stream_with_an_error(
    dialect: str,
) -> None:
    async with split_house(dialect, kv=FAST, models=models(dialect), health=HEALTH) as house:
        for decoder in house.decode:
            decoder.faults.apply("cut:after=7")
        raw, _ = await read(house, completion(0))
        assert b'"error"' in raw
        assert b"[DONE]" not in raw
        assert resumes(house) == 0
        for decoder in house.decode:
            decoder.faults.clear()
        await whole(house, completion(1))
        await house.at_rest(within_s=7 + SOON_S)


async def test_a_client_that_leaves_a_resumed_stream_leaves_nothing_behind() -> None:
    settings = {"models": models("vllm_nixl"), "health": HEALTH}
    async with split_house("vllm_nixl", kv=FAST, speed=20.0, **settings) as house:
        house.decode[0].faults.apply("cut:after=5")
        for number in range(4):
            body = {"model": MODEL} | completion(number) | {"max_tokens": 400}
            async with house.http.post(f"{house.app.url}/v1/completions", json=body) as answer:
                for _ in range(20):
                    await answer.content.readline()
                answer.close()
        house.decode[0].faults.clear()
        await house.at_rest(within_s=10)
