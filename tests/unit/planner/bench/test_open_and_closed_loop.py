"""Tests of open and closed load loops: times of requests, and failed responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from planner.bench import BenchError, BenchPlan, BenchReport, PlanError, RunProgress, run

GOOD = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"so "}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"it is"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
    b"data: [DONE]\n\n"
)
Answer = Callable[[dict[str, Any]], Awaitable[bytes | int]]


class Stub:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.authorization: set[str | None] = set()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.authorization.add(request.headers.get("authorization"))
        answer = await self.answer(body)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "no"}}, status=answer)
        return web.Response(body=answer, content_type="text/event-stream")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub-model"}]})


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Stub, str]]:
    stub = Stub(answer)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", stub.chat)
    app.router.add_get("/v1/models", stub.models)
    async with TestServer(app) as server:
        yield stub, str(server.make_url("/"))


async def good(body: dict[str, Any]) -> bytes | int:
    return GOOD


async def bench(answer: Answer, **options: Any) -> tuple[Stub, BenchReport]:
    async with serving(answer) as (stub, url):
        return stub, await run(BenchPlan(url=url, **options))


async def test_an_open_loop_sends_on_while_no_answer_comes() -> None:
    arrived = 0
    all_here = asyncio.Event()

    async def answer_when_all_are_here(body: dict[str, Any]) -> bytes | int:
        nonlocal arrived
        arrived += 1
        if arrived == 40:
            all_here.set()
        await all_here.wait()  # a sender that waited for an answer would wait for ever
        return GOOD

    _, report = await bench(answer_when_all_are_here, rate=2000.0, requests=40)
    assert len(report.completed) == 40
    assert report.peak == 40
    assert report.lag is not None
    assert report.lag.min >= 0, "no request may leave before its moment"


async def test_a_closed_loop_never_has_more_requests_out_than_users() -> None:
    stub, report = await bench(good, concurrency=3, requests=30)
    assert report.peak == 3
    assert len(stub.bodies) == len(report.completed) == 30


async def test_the_report_matches_the_stream() -> None:
    stub, report = await bench(good, concurrency=1, requests=4, api_key="sk-test")
    assert report.cached_ratio == 0.5
    assert report.output_tokens == 8
    assert report.plan.model == "stub-model"
    assert stub.authorization == {"Bearer sk-test"}
    assert all(
        body["stream"] and body["stream_options"] == {"include_usage": True} for body in stub.bodies
    )
    assert report.ttft is not None
    assert report.e2e is not None
    assert 0 < report.ttft.min <= report.e2e.max


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (429, "http_429"),
        (503, "http_503"),
        (GOOD.replace(b"data: [DONE]\n\n", b""), "truncated"),
        (GOOD.replace(b'{"choices":[{"delta":{"content":"so "}}]}', b"{oops"), "truncated"),
        (b"data: [DONE]\n\n", "empty"),
        (b'data: {"error":{"code":"stream_interrupted"}}\n\n', "stream_error"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error_of_its_kind(
    answer: bytes | int, kind: str
) -> None:
    async def bad(body: dict[str, Any]) -> bytes | int:
        return answer

    _, report = await bench(bad, concurrency=1, requests=2)
    assert report.errors == {kind: 2}
    assert report.completed == []


async def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    async def never(body: dict[str, Any]) -> bytes | int:
        await asyncio.Event().wait()
        return 500

    _, report = await bench(never, concurrency=1, requests=1, timeout_s=0.05)
    assert report.errors == {"timeout": 1}


async def test_a_turn_of_an_agent_carries_the_answer_before_it() -> None:
    stub, _ = await bench(good, shape="agent", concurrency=1, requests=12, think=0.0)
    grown = [body["messages"] for body in stub.bodies if len(body["messages"]) > 2]
    assert grown, "twelve requests with eight turns a session hold second turns"
    for messages in grown:
        roles = [message["role"] for message in messages]
        assert roles == ["system", "user", *["assistant", "user"] * ((len(roles) - 2) // 2)]
        assert messages[2]["content"] == "so it is"


async def test_equal_seeds_send_equal_requests_and_warm_up_sends_others() -> None:
    one, _ = await bench(good, concurrency=1, requests=5, seed=7)
    two, report = await bench(good, concurrency=1, requests=5, seed=7, warmup=2)
    assert one.bodies == two.bodies[2:]
    assert two.bodies[0] not in one.bodies
    assert len(report.records) == 5


async def test_a_trace_is_sent_with_its_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, %d]}\n'
    path.write_text("".join(line % number for number in (1, 2, 3)))
    stub, report = await bench(good, trace=path, speed=1000.0)
    assert len(report.completed) == 3
    assert {body["max_tokens"] for body in stub.bodies} == {7}
    assert len({body["messages"][0]["content"][:2048] for body in stub.bodies}) == 1


async def test_a_run_cut_short_reports_what_was_done() -> None:
    async with serving(good) as (_, url):
        event = asyncio.Event()

        def watch(progress: RunProgress) -> None:
            if progress.sent > progress.in_flight:
                event.set()

        task = asyncio.create_task(run(BenchPlan(url=url, concurrency=2), watch))
        await event.wait()
        task.cancel()
        report = await task
    assert report.interrupted
    assert report.completed
    assert report.errors.keys() <= {"unfinished"}


async def test_a_missing_server_is_reported() -> None:
    with pytest.raises(BenchError, match="cannot be reached"):
        await run(BenchPlan(url="http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "tea"}, "--shape tea"),
        ({"rate": 1.0, "concurrency": 2}, "cannot be combined"),
        ({"rate": 1.0, "trace": Path("x")}, "--speed"),
        ({"limit": 3}, "--limit requires --trace"),
    ],
)
async def test_a_plan_that_makes_no_sense_is_refused_with_the_option(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        await run(BenchPlan(url="http://127.0.0.1:1", **options))


async def test_a_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(PlanError, match="http://"):
        await run(BenchPlan(url="localhost:8080"))
