"""Tests of split streams whose decode engine dies: the client reads each word exactly once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mockgpu.mock_tokenizer import expected_text
from tests.duration_limits import PATIENCE_S, pace
from tests.e2e.split_fleet import MODEL, SENTENCE, SplitFleet, split_fleet, text_of

CAN_RESUME = ("vllm_nixl", "vllm_push", "penstock", "mooncake")
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


async def read(fleet: SplitFleet, body: dict[str, Any]) -> tuple[bytes, str]:
    # Send a request; return the bytes of the response, and the endpoint that began it.
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with fleet.http.post(fleet.app.url + path, json={"model": MODEL} | body) as answer:
        assert answer.status == 200
        return await answer.read(), answer.headers["x-penstock-endpoint"]


def events_of(raw: bytes) -> list[dict[str, Any]]:
    *events, done = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event]
    assert done == b"[DONE]"
    return [json.loads(event) for event in events]


async def assert_undisturbed(fleet: SplitFleet, body: dict[str, Any]) -> None:
    # Assert that the response is one consistent stream with the text of an undisturbed engine.
    raw, _ = await read(fleet, body)
    events = events_of(raw)
    assert text_of(raw) == expected_text(body, TOKENS)
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]


def resume_count(fleet: SplitFleet, **labels: str) -> float:
    return fleet.metric("penstock_resumes_total", **labels)


@pytest.mark.parametrize("dialect", CAN_RESUME)
@pytest.mark.parametrize(
    "fault", ["die-mid-decode:after=7", "reset-mid-stream:after=7", "cut:after=7"]
)
async def test_a_decoder_that_dies_during_a_response_loses_no_word(
    dialect: str, fault: str
) -> None:
    async with split_fleet(dialect, kv=FAST, models=models(dialect), health=HEALTH) as fleet:
        fleet.decode[0].faults.apply(fault)
        bodies = [body(number) for number in range(6) for body in (completion, chat)]
        await asyncio.gather(*(assert_undisturbed(fleet, body) for body in bodies))
        fleet.decode[0].faults.clear()
        assert resume_count(fleet, result="resumed") >= 1
        assert resume_count(fleet) == resume_count(fleet, result="resumed")
        assert fleet.metric("penstock_completion_tokens_total") == len(bodies) * TOKENS
        await fleet.at_rest(within_s=7 + SOON_S)


@pytest.mark.parametrize("dialect", CAN_RESUME)
async def test_a_resumed_stream_has_the_usage_and_chunks_of_an_unbroken_one(dialect: str) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}}
    async with split_fleet(dialect, kv=FAST, models=models(dialect), health=HEALTH) as fleet:
        await read(
            fleet, completion(0)
        )  # teaches concurrent dialects the prefill engines' identities
        body = completion(1) | options
        expected = events_of((await read(fleet, body))[0])
    async with split_fleet(dialect, kv=FAST, models=models(dialect), health=HEALTH) as fleet:
        await read(fleet, completion(0))
        for decoder in fleet.decode:
            decoder.faults.apply("cut:after=7")
        breaking = asyncio.create_task(read(fleet, body))
        async with asyncio.timeout(PATIENCE_S):
            while not fleet.metric("penstock_upstream_errors_total"):
                await asyncio.sleep(0)
        for decoder in fleet.decode:
            decoder.faults.clear()
        events = events_of((await breaking)[0])
        assert [event["choices"] for event in events] == [event["choices"] for event in expected]
        assert [event["usage"] for event in events] == [event["usage"] for event in expected]
        assert resume_count(fleet, result="resumed") == 1
        await fleet.at_rest(within_s=7 + SOON_S)


@pytest.mark.parametrize("dialect", CAN_RESUME)
async def test_without_another_decoder_the_stream_ends_with_an_error(dialect: str) -> None:
    settings = {"models": models(dialect), "health": HEALTH}
    async with split_fleet(dialect, groups=(2, 1), kv=FAST, **settings) as fleet:
        fleet.decode[0].faults.apply("cut:after=7")
        raw, endpoint = await read(fleet, completion(0))
        assert endpoint == fleet.decode[0].url.removeprefix("http://")
        assert b'"code":"stream_interrupted"' in raw
        assert b"[DONE]" not in raw
        assert resume_count(fleet, result="no_endpoint") == 1
        fleet.decode[0].faults.clear()
        await fleet.at_rest(within_s=7 + SOON_S)


@pytest.mark.parametrize("dialect", CANNOT_RESUME)
async def test_engines_that_report_no_token_ids_end_a_broken_stream_with_an_error(
    dialect: str,
) -> None:
    async with split_fleet(dialect, kv=FAST, models=models(dialect), health=HEALTH) as fleet:
        for decoder in fleet.decode:
            decoder.faults.apply("cut:after=7")
        raw, _ = await read(fleet, completion(0))
        assert b'"error"' in raw
        assert b"[DONE]" not in raw
        assert resume_count(fleet) == 0
        for decoder in fleet.decode:
            decoder.faults.clear()
        await assert_undisturbed(fleet, completion(1))
        await fleet.at_rest(within_s=7 + SOON_S)


async def test_a_client_that_disconnects_from_a_resumed_stream_leaves_nothing_held() -> None:
    settings = {"models": models("vllm_nixl"), "health": HEALTH}
    async with split_fleet("vllm_nixl", kv=FAST, speed=20.0, **settings) as fleet:
        fleet.decode[0].faults.apply("cut:after=5")
        for number in range(4):
            body = {"model": MODEL} | completion(number) | {"max_tokens": 400}
            async with fleet.http.post(f"{fleet.app.url}/v1/completions", json=body) as answer:
                for _ in range(20):
                    await answer.content.readline()
                answer.close()
        fleet.decode[0].faults.clear()
        await fleet.at_rest(within_s=10)
