"""Tests of streamed answers that break off because their engine fails.

Another endpoint must continue the answer exactly where it broke, or it ends with an error event.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from mockgpu.mock_tokenizer import expected_text
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.duration_limits import PATIENCE_S
from tests.metrics_page import total
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

RESUME: dict[str, Any] = {"models": [{"name": "demo-8b", "pool": "main", "resume": {}}]}
NEVER = {"failures": 1000}


def asked(number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": "demo-8b",
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": f"talk {number}"}],
    }


async def read(fleet: GatewayFleet, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    # Send a streaming request; return how the stream ended, and its events.
    async with fleet.http.post(
        f"{fleet.app.url}/v1/chat/completions", json=body | {"stream": True}
    ) as answer:
        text = (await answer.read()).decode()
    *events, last, rest = text.split("\n\n")
    assert not rest
    if last != "data: [DONE]":
        return json.loads(last.removeprefix("data: "))["error"]["code"], []
    return "whole", [json.loads(event.removeprefix("data: ")) for event in events]


def resumes(fleet: GatewayFleet, **labels: str) -> float:
    return total(fleet.app.metrics.render().decode(), "penstock_resumes_total", **labels)


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(
        event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]
    )


async def streams(fleet: GatewayFleet, count: int, tokens: int, **more: Any) -> Counter[str]:
    # Send `count` streaming requests and count their outcomes.
    #
    # A complete stream must equal an undisturbed one.
    async def one(number: int) -> str:
        body = asked(number, tokens)
        fate, events = await read(fleet, body | more)
        if fate == "whole":
            assert text_of(events) == expected_text(body, tokens)
            assert len({(event["id"], event["created"]) for event in events}) == 1
        return fate

    return Counter(await asyncio.gather(*map(one, range(count))))


async def wait_for_silent_only(fleet: GatewayFleet, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while fleet.metric("penstock_requests_total") < count or fleet.groups[1].group.in_flight:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("fault", ["reset-mid-stream:after=7", "cut:after=7", "stall:after=7"])
async def test_a_broken_stream_continues_elsewhere_without_a_difference(fault: str) -> None:
    async with gateway_fleet(2, health=NEVER, **RESUME) as fleet:
        fleet.groups[0].faults.apply(fault)
        asking = asyncio.create_task(streams(fleet, 20, 60))
        if fault.startswith("stall"):
            await wait_for_silent_only(fleet, 10)
            fleet.lose_patience(0)
        assert await asking == {"whole": 20}
        assert resumes(fleet, result="resumed") == 10
        assert resumes(fleet) == 10
        assert fleet.metric("penstock_completion_tokens_total") == 20 * 60
        await fleet.at_rest()
        fleet.groups[0].faults.apply("")
        assert fleet.app.gateway.gate.retries.running == 0


async def test_resuming_is_off_by_default() -> None:
    async with gateway_fleet(2, health=NEVER) as fleet:
        fleet.groups[0].faults.apply("cut:after=7")
        assert await streams(fleet, 10, 60) == {"whole": 5, "stream_interrupted": 5}
        assert resumes(fleet) == 0
        await fleet.at_rest()


async def test_usage_covers_the_whole_answer_and_is_sent_once() -> None:
    async with gateway_fleet(2, health=NEVER, **RESUME) as fleet:
        fleet.groups[0].faults.apply("cut:after=7")
        fleet.groups[1].faults.apply("cut:after=9")
        body = asked(0, 60) | {"stream_options": {"include_usage": True}}
        undisturbed = gateway_fleet(1, **RESUME)
        async with undisturbed as other:
            _, expected = await read(other, body)
        fleet.groups[1].faults.apply("")
        for _ in range(2):  # at least one of the two requests starts on the failing group
            fate, events = await read(fleet, body)
            assert fate == "whole"
            assert [event["usage"] for event in events if event["usage"]] == [expected[-1]["usage"]]
            assert [event["choices"] for event in events] == [
                event["choices"] for event in expected
            ]
        assert resumes(fleet, result="resumed") >= 1


async def test_an_answer_without_a_bound_ends_where_it_would_have_ended() -> None:
    async with gateway_fleet(1) as other:
        body = {
            "model": "demo-8b",
            "messages": [{"role": "user", "content": "tell me a long story"}],
        }
        _, expected = await read(other, body)
    async with gateway_fleet(2, health=NEVER, **RESUME) as fleet:
        fleet.groups[0].faults.apply("cut:after=3")
        fleet.groups[1].faults.apply("cut:after=5")
        assert (await read(fleet, body))[0] == "stream_interrupted"
        fleet.groups[1].faults.apply("")
        for _ in range(2):
            fate, events = await read(fleet, body)
            assert (fate, text_of(events)) == ("whole", text_of(expected))
            assert (
                events[-1]["choices"][0]["finish_reason"]
                == expected[-1]["choices"][0]["finish_reason"]
                == "stop"
            )


async def test_three_engines_are_tried_and_no_more() -> None:
    async with gateway_fleet(5, health=NEVER, **RESUME) as fleet:
        for member in fleet.groups:
            member.faults.apply("cut:after=5")
        assert await streams(fleet, 5, 60) == {"stream_interrupted": 5}
        results = {result: resumes(fleet, result=result) for result in ("broke", "attempts")}
        assert results == {"broke": 10, "attempts": 5}
        await fleet.at_rest()


async def test_without_a_retry_permit_or_another_endpoint_it_ends_with_an_error() -> None:
    async with gateway_fleet(1, health=NEVER, **RESUME) as fleet:
        fleet.groups[0].faults.apply("cut:after=5")
        assert await streams(fleet, 2, 60) == {"stream_interrupted": 2}
        assert resumes(fleet, result="no_endpoint") == 2
        await fleet.at_rest()


@pytest.mark.parametrize(
    "more", [{"stop": ["zebra"]}, {"logprobs": True}, {"presence_penalty": 0.5}]
)
async def test_what_could_not_be_exact_is_not_continued(more: dict[str, Any]) -> None:
    async with gateway_fleet(2, health=NEVER, **RESUME) as fleet:
        fleet.groups[0].faults.apply("cut:after=5")
        fates = await streams(fleet, 4, 30, **more)
        assert fates == {"whole": 2, "stream_interrupted": 2}
        assert resumes(fleet) == 0
        await fleet.at_rest()


async def test_a_client_that_leaves_during_a_resume_leaves_nothing_behind() -> None:
    async with gateway_fleet(2, speed=2.0, health=NEVER, **RESUME) as fleet:
        fleet.groups[0].faults.apply("cut:after=5")
        body = json.dumps(asked(0, 4000) | {"stream": True})
        gone = 0
        for _ in range(2):
            async with fleet.http.post(f"{fleet.app.url}/v1/chat/completions", data=body) as answer:
                while (await answer.content.readline()).count(b"content") and gone < 40:
                    gone += 1
        await fleet.at_rest()
