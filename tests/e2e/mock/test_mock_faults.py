"""Tests that a mock engine on real sockets shows the faults that are injected into it.

Some test the command that serves mock engines.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import aiohttp
import pytest

from mockgpu.mock_tokenizer import expected_text
from mockgpu.tp_group import GroupSpec
from tests.duration_limits import PATIENCE_S
from tests.e2e.mock_group import CHAT, SPEC, MockGroup, mock_group, slow_group

pytestmark = pytest.mark.filterwarnings(
    "ignore:Overriding the .event_loop_policy. fixture is deprecated"
)


# Faults


async def test_one_lost_rank_fails_the_whole_group_at_once() -> None:
    spec = GroupSpec("demo-8b", SPEC.model, SPEC.gpu, tp=4, speed=5)
    async with mock_group(spec) as group:
        body = CHAT | {"max_tokens": 5000}
        whole = asyncio.ensure_future(group.answer("/v1/chat/completions", body))
        stream = asyncio.ensure_future(group.stream(body))
        await group.until("vllm:num_requests_running", 2)
        await group.fault("lost-rank:rank=2")
        status, answer = await whole
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        events = await stream
        assert json.loads(events[-2])["error"]["code"] == 500
        assert events[-1] == "[DONE]"
        assert await group.status("/health") == 503
        for streamed in (True, False):
            assert (await group.answer("/v1/chat/completions", CHAT | {"stream": streamed}))[
                0
            ] == 500
        assert await group.metric("vllm:kv_cache_usage_perc") == 0
        async with group.http.delete(group.member.url + "/mock/fault"):
            assert await group.status("/health") == 200
        await group.sdk.chat.completions.create(**CHAT, max_tokens=3)


async def test_a_hanging_rank_leaves_health_checks_passing_and_can_recover() -> None:
    async with mock_group(slow_group()) as group:
        request = asyncio.ensure_future(
            group.answer("/v1/chat/completions", CHAT | {"max_tokens": 40})
        )
        await group.until("vllm:num_requests_running", 1)
        await group.fault("lost-rank:hang")
        assert await group.status("/health") == 200
        steps = await group.metric("mock:engine_steps_total")
        late = asyncio.ensure_future(group.answer("/v1/chat/completions", CHAT | {"max_tokens": 2}))
        done, _ = await asyncio.wait([request, late], timeout=0.1)
        assert not done
        assert await group.metric("mock:engine_steps_total") == steps
        await group.fault("")
        assert [(await task)[0] for task in (request, late)] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reset_before_headers_closes_the_connection(group: MockGroup, stream: bool) -> None:
    await group.fault("reset-before-headers")
    with pytest.raises(aiohttp.ClientConnectionError):
        await group.answer("/v1/chat/completions", CHAT | {"stream": stream})
    assert await group.metric("vllm:num_requests_running") == 0


async def test_a_reset_after_headers_leaves_a_status_and_no_event(group: MockGroup) -> None:
    await group.fault("reset-after-headers")
    async with group.post("/v1/chat/completions", CHAT | {"stream": True}) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_a_reset_mid_stream_comes_after_the_configured_tokens(group: MockGroup) -> None:
    await group.fault("reset-mid-stream:after=5")
    received = b""
    async with group.post(
        "/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 50}
    ) as response:
        with pytest.raises(aiohttp.ClientError):  # noqa: PT012 - one of the reads fails
            async for data in response.content.iter_any():
                received += data
                # A reset discards what the peer has not read yet, so it gets at most five tokens.
    assert received.count(b'"content":" ') <= 5
    assert b"[DONE]" not in received
    await group.until("vllm:num_requests_running", 0)


async def test_a_stalled_stream_sends_nothing_and_is_freed_when_the_client_leaves() -> None:
    async with mock_group(slow_group()) as group:
        await group.fault("stall:after=3")
        async with group.post(
            "/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 5000}
        ) as response:
            received = b""
            while received.count(b"data: ") < 4:
                received += await response.content.readany()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await response.content.readany()
        await group.until("vllm:num_requests_running", 0)


@pytest.mark.parametrize(
    "spec", ["reset-after-headers", "reset-mid-stream:after=2", "reset-before-headers"]
)
async def test_a_group_survives_many_broken_connections(spec: str) -> None:
    async with mock_group(slow_group()) as group:
        await group.fault(f"{spec}@0.7")
        body = CHAT | {"stream": True, "max_tokens": 20}
        await asyncio.gather(
            *(group.answer("/v1/chat/completions", body) for _ in range(60)), return_exceptions=True
        )
        await group.fault("")
        await group.until("vllm:num_requests_running", 0)
        assert (await group.stream(body))[-1] == "[DONE]"


@pytest.mark.parametrize("spec", ["reset-after-headers", "reset-mid-stream", "cut"])
async def test_an_unstreamed_response_can_break_off(group: MockGroup, spec: str) -> None:
    await group.fault(spec)
    async with group.post("/v1/chat/completions", CHAT) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_a_cut_stream_ends_cleanly_and_without_done(group: MockGroup) -> None:
    await group.fault("cut:after=3")
    events = await group.stream(CHAT | {"max_tokens": 50})
    assert len(events) == 1 + 3
    assert "[DONE]" not in events
    await group.until("vllm:num_requests_running", 0)


async def test_the_sdk_ignores_comments_between_events(group: MockGroup) -> None:
    await group.fault("comments")
    stream = await group.sdk.chat.completions.create(**CHAT, max_tokens=5, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == expected_text(CHAT, 5)
    assert (await group.stream(CHAT | {"max_tokens": 5})).count(": keep-alive") == 5


async def test_a_pinned_rank_that_does_not_exist_is_refused(group: MockGroup) -> None:
    served, refused = ("0", "-0", "--5", "none"), ("1", "-1", "1" * 5000)
    for rank, status in [*((rank, 200) for rank in served), *((rank, 400) for rank in refused)]:
        headers = {"X-data-parallel-rank": rank}
        assert (await group.answer("/v1/completions", {"prompt": "x"}, headers=headers))[
            0
        ] == status


async def test_events_split_across_writes_form_the_same_stream(group: MockGroup) -> None:
    body = CHAT | {"max_tokens": 6}
    whole = [json.loads(e)["choices"][0] for e in (await group.stream(body))[:-1]]
    await group.fault("split")
    assert [json.loads(e)["choices"][0] for e in (await group.stream(body))[:-1]] == whole


async def test_the_5xx_fault_has_its_probability_and_status() -> None:
    async with mock_group(seed=7) as group:
        await group.fault("5xx:status=502@0.3")
        statuses = [
            (await group.answer("/v1/chat/completions", CHAT | {"max_tokens": 1}))[0]
            for _ in range(100)
        ]
        assert set(statuses) == {200, 502}
        assert 15 <= statuses.count(502) <= 45


async def test_the_5xx_fault_names_a_time_to_retry_if_it_has_one() -> None:
    async with mock_group() as group:
        for spec, expected in (
            ("5xx:status=429:retry-after=7", (429, "7")),
            ("5xx:status=503", (503, None)),
        ):
            await group.fault(spec)
            for path, body in (
                ("/v1/chat/completions", CHAT),
                ("/v1/embeddings", {"model": CHAT["model"], "input": "x"}),
            ):
                async with group.post(path, body) as answer:
                    assert (answer.status, answer.headers.get("Retry-After")) == expected


@pytest.mark.virtual_time
async def test_the_slow_fault_multiplies_the_step_time() -> None:
    async with mock_group(GroupSpec("demo-8b", SPEC.model, SPEC.gpu, speed=2)) as group:
        loop, took = asyncio.get_running_loop(), []
        for spec in ("", "slow:x=10"):
            await group.fault(spec)
            started = loop.time()
            await group.answer("/v1/chat/completions", CHAT | {"max_tokens": 12})
            took.append(loop.time() - started)
        assert 8 < took[1] / took[0] < 10  # less than 10, because not all of the time is steps


@pytest.mark.virtual_time
async def test_a_group_refuses_connections_until_the_fault_window_ends() -> None:
    async with mock_group() as group:
        await group.fault("refuse@0-0.3")
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as fresh, fresh.get(group.member.url + "/health"):
                pass
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with (
                        aiohttp.ClientSession() as fresh,
                        fresh.get(group.member.url + "/health") as response,
                    ):
                        assert response.status == 200
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)


async def test_a_refuse_fault_set_twice_lasts_until_it_is_cleared() -> None:
    async with mock_group() as group:
        for spec, answered in (("refuse", False), ("refuse", False), ("", True)):
            group.member.faults.apply(spec)
            await group.member.listener.wait_rebound()
            try:
                async with (
                    aiohttp.ClientSession() as fresh,
                    fresh.get(group.member.url + "/health") as response,
                ):
                    assert (response.status, answered) == (200, True)
            except aiohttp.ClientConnectionError:
                assert not answered


async def test_an_invalid_fault_spec_is_refused_and_changes_nothing(group: MockGroup) -> None:
    await group.fault("slow:x=2")
    status, answer = await group.answer("/mock/fault", {"spec": "explode"})
    assert (status, "unknown fault" in answer["error"]["message"]) == (400, True)
    async with group.http.get(group.member.url + "/mock/fault") as response:
        assert await response.json() == {"spec": "slow:x=2"}

        # The process


async def start(*options: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mockgpu", *options, stdout=pipe, stderr=pipe
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_command_serves_its_groups_and_exits_cleanly_during_a_stream(
    number: signal.Signals,
) -> None:
    process = await start(
        "--port", "0", "--groups", "2", "--json", "--model", "llama-3.1-70b", "--gpu", "h200"
    )
    assert process.stdout is not None
    async with asyncio.timeout(3 * PATIENCE_S):
        ready = [json.loads(await process.stdout.readline()) for _ in range(2)]
        assert [(r["model"], r["gpu"], r["tp"]) for r in ready] == [
            ("llama-3.1-70b", "h200", 4)
        ] * 2
        body = {"prompt": "x", "stream": True, "max_tokens": 1000}
        async with (
            aiohttp.ClientSession() as http,
            http.post(ready[1]["ready"] + "/v1/completions", json=body) as response,
        ):
            await response.content.readany()
            process.send_signal(number)
            assert await process.wait() == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--gpu", "abacus"),
        ("--model", "x"),
        ("--fault", "x"),
        ("--model", "llama-3.1-405b", "--tp", "8"),
        ("--role", "x"),
    ],
)
async def test_the_command_refuses_invalid_options(options: tuple[str, ...]) -> None:
    process = await start("--port", "0", *options)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.startswith(b"error: ")
