"""Tests of split and resumed requests whose engines have the Messages and Responses APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mockgpu.mock_tokenizer import expected_text
from tests.chaos.fleet_processes import MockProcess
from tests.e2e.processes import GatewayProcess, gateway_process
from tests.e2e.resumable_mocks import config_of, resumable_mocks, stall
from tests.e2e.split_fleet import MODEL, SENTENCE, SplitFleet, split_fleet
from tests.metrics_page import total
from tests.unit.gateway.protocol.translate.chats import events, message_of, response_of

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
TOKENS = 24
PROMPT = SENTENCE * 20
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": TOKENS,
    "metadata": {"user_id": "someone"},
}
RESPONSE: dict[str, Any] = {"input": PROMPT, "max_output_tokens": TOKENS}


async def post(fleet: SplitFleet, path: str, body: dict[str, Any]) -> tuple[bytes, str]:
    # Send a request; return the response's body, and the request's id.
    async with fleet.http.post(fleet.app.url + path, json={"model": MODEL} | body) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        return raw, answer.headers["x-request-id"]


def text_of(path: str, raw: bytes, *, stream: bool) -> tuple[str, int]:
    # Return the text of an answer, and its number of output tokens.
    if path == MESSAGES:
        message = message_of(raw) if stream else json.loads(raw)
        return message["content"][0]["text"], message["usage"]["output_tokens"]
    response = response_of(raw) if stream else json.loads(raw)
    return response["output"][0]["content"][0]["text"], response["usage"]["output_tokens"]


async def explained(fleet: SplitFleet, request_id: str) -> dict[str, Any]:
    async with fleet.http.get(f"{fleet.app.admin_url}/explain/{request_id}") as answer:
        page: dict[str, Any] = await answer.json()
        return page


@pytest.mark.parametrize("dialect", ["vllm_nixl", "sglang", "trtllm"])
async def test_requests_of_every_api_are_split_and_have_the_text_of_one_engine(
    dialect: str,
) -> None:
    expected = expected_text({"messages": MESSAGE["messages"]}, TOKENS), TOKENS
    async with split_fleet(dialect) as fleet:
        for path, body in ((MESSAGES, MESSAGE), (RESPONSES, RESPONSE)):
            for stream in (True, False):
                before = fleet.metric("penstock_split_decisions_total", decision="split")
                raw, request_id = await post(fleet, path, body | {"stream": stream})
                assert text_of(path, raw, stream=stream) == expected
                page = await explained(fleet, request_id)
                assert page["api"] == path
                assert page["engine_api"] == {"path": CHAT, "reason": "split"}
                after = fleet.metric("penstock_split_decisions_total", decision="split")
                # A prompt that the decode engine has cached by now is not split again.
                assert after == before + 1 or page["split"]["reason"] == "short"
        assert fleet.metric("penstock_split_decisions_total", decision="split") >= 1
        await fleet.at_rest()


@pytest.mark.parametrize(
    ("path", "body", "member"),
    [
        (MESSAGES, MESSAGE | {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, MESSAGE | {"context_management": {"edits": []}}, "context_management"),
        (
            MESSAGES,
            MESSAGE
            | {"messages": [*MESSAGE["messages"], {"role": "system", "content": "Be brief."}]},
            "messages",
        ),
        (RESPONSES, RESPONSE | {"tools": [{"type": "web_search"}]}, "tools"),
        (RESPONSES, RESPONSE | {"input": [{"role": "developer", "content": PROMPT}]}, "input"),
        (RESPONSES, RESPONSE | {"truncation": "auto"}, "truncation"),
    ],
)
async def test_a_request_that_would_lose_something_goes_whole_to_an_engine_as_it_is(
    path: str, body: dict[str, Any], member: str
) -> None:
    async with split_fleet("vllm_nixl") as fleet:
        _, request_id = await post(fleet, path, body)
        page = await explained(fleet, request_id)
        reason = f"not translated: {member}"
        assert page["engine_api"] == {"path": path, "reason": reason}
        assert page["split"] == {"reason": "api", "prefill": ""}


REQUESTS = 4
LENGTH = 50
DELTAS = (b"event: content_block_delta", b"event: response.output_text.delta")


@pytest.fixture
def mocks() -> Iterator[list[MockProcess]]:
    with resumable_mocks() as processes:
        yield processes


def asked() -> list[tuple[str, dict[str, Any]]]:
    # Return requests of both APIs, streamed and whole. If two engines get them in turn, each engine
    # gets requests of all four kinds.
    requests: list[tuple[str, dict[str, Any]]] = []
    for number in range(REQUESTS):
        text = f"How deep is {number}?"
        message = {"messages": [{"role": "user", "content": text}], "max_tokens": LENGTH}
        response = {"input": text, "max_output_tokens": LENGTH}
        first = number % 2 == 0
        for path, body, stream in (
            (MESSAGES, message, first),
            (MESSAGES, message, not first),
            (RESPONSES, response, not first),
            (RESPONSES, response, first),
        ):
            requests.append((path, {"model": "chat", "stream": stream} | body))
    return requests


async def read(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], reached: asyncio.Event, after: int
) -> bytes:
    # Read one answer; set `reached` once `after` pieces of a stream have arrived.
    data = b""
    async with http.post(path, json=body) as answer:
        assert answer.status == 200
        async for piece in answer.content.iter_any():
            data += piece
            if sum(map(data.count, DELTAS)) >= after:
                reached.set()
    return data


async def read_all(url: str, after: int, victim: MockProcess | None) -> list[bytes]:
    # Send all requests; kill an engine once every stream has `after` pieces.
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        requests = [(path, body, asyncio.Event()) for path, body in asked()]
        tasks = [
            asyncio.create_task(read(http, path, body, reached, after))
            for path, body, reached in requests
        ]
        for _, body, reached in requests:
            if body["stream"]:
                await reached.wait()
        if victim is not None:
            victim.kill()
        return list(await asyncio.gather(*tasks))


VARYING = ("id", "item_id", "created_at")


def plain(value: Any) -> Any:
    # Return an answer without ids and times, which differ between any two answers.
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if name not in VARYING}
    return value


def ids(value: Any) -> list[tuple[str, Any]]:
    # Return the ids and times of an answer by name, in order.
    if isinstance(value, list):
        return [pair for item in value for pair in ids(item)]
    if not isinstance(value, dict):
        return []
    own = [(name, item) for name, item in value.items() if name in VARYING]
    return own + [pair for item in value.values() for pair in ids(item)]


def numbered(value: Any) -> list[tuple[str, int]]:
    # Return the ids of an answer as numbers in the order of their first occurrence.
    found = ids(value)
    distinct = list(dict.fromkeys(found))
    return [(pair[0], distinct.index(pair)) for pair in found]


def metrics(running: GatewayProcess) -> str:
    async def get() -> str:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{running.admin_url}/metrics") as answer,
        ):
            return await answer.text()

    return asyncio.run(get())


@pytest.mark.parametrize("after", [1, 6, 12])
def test_answers_survive_the_death_of_their_engine_event_for_event(
    tmp_path: Path, mocks: list[MockProcess], after: int
) -> None:
    with gateway_process(tmp_path, config_of(mocks)) as running:
        undisturbed = asyncio.run(read_all(running.url, after, None))
        stall(mocks[0], after + 1)
        answers = asyncio.run(read_all(running.url, after, mocks[0]))
        page = metrics(running)
        assert "Traceback" not in running.stderr_text, running.stderr_text
    for (_, body), before, now in zip(asked(), undisturbed, answers, strict=True):
        first, second = (events(x) if body["stream"] else json.loads(x) for x in (before, now))
        assert plain(second) == plain(first)
        assert numbered(second) == numbered(first)
    assert total(page, "penstock_resumes_total", result="resumed") >= 1
    assert total(page, "penstock_resumes_total", result="resumed") == total(
        page, "penstock_resumes_total"
    )
