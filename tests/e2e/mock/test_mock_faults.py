"""A mock TP group that is told to break, over real sockets; and the command that serves such groups."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import aiohttp
import pytest

from mockgpu.group import GroupSpec
from mockgpu.text import expected_text
from tests.e2e.mock_group import CHAT, SPEC, Mock, mock, slow_group
from tests.fair_time import PATIENCE_S, pace

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture is deprecated")


# --- faults


async def test_one_lost_rank_fails_the_whole_group_at_once() -> None:
    spec = GroupSpec("demo-8b", SPEC.model, SPEC.gpu, tp=4, speed=5)
    async with mock(spec) as group:
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
            assert (await group.answer("/v1/chat/completions", CHAT | {"stream": streamed}))[0] == 500
        assert await group.metric("vllm:kv_cache_usage_perc") == 0
        async with group.http.delete(group.member.url + "/mock/fault"):
            assert await group.status("/health") == 200
        await group.sdk.chat.completions.create(**CHAT, max_tokens=3)


async def test_a_rank_that_hangs_is_noticed_by_nobody_and_may_come_back() -> None:
    async with mock(slow_group()) as group:
        request = asyncio.ensure_future(group.answer("/v1/chat/completions", CHAT | {"max_tokens": 40}))
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
async def test_resets_before_headers_look_like_a_dead_connection(group: Mock, stream: bool) -> None:
    await group.fault("reset-before-headers")
    with pytest.raises(aiohttp.ClientConnectionError):
        await group.answer("/v1/chat/completions", CHAT | {"stream": stream})
    assert await group.metric("vllm:num_requests_running") == 0


async def test_a_reset_after_headers_leaves_a_status_and_no_event(group: Mock) -> None:
    await group.fault("reset-after-headers")
    async with group.post("/v1/chat/completions", CHAT | {"stream": True}) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_a_reset_mid_stream_comes_after_the_tokens_asked_for(group: Mock) -> None:
    await group.fault("reset-mid-stream:after=5")
    seen = b""
    async with group.post("/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 50}) as response:
        with pytest.raises(aiohttp.ClientError):  # noqa: PT012 - it is the reading that fails, at some point
            async for data in response.content.iter_any():
                seen += data
    # A reset discards what the peer has not read yet: at most five tokens, never [DONE].
    assert seen.count(b'"content":" ') <= 5
    assert b"[DONE]" not in seen
    await group.until("vllm:num_requests_running", 0)


async def test_a_stalled_stream_goes_silent_and_its_abort_frees_the_rest() -> None:
    async with mock(slow_group()) as group:
        await group.fault("stall:after=3")
        async with group.post("/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 5000}) as response:
            seen = b""
            while seen.count(b"data: ") < 4:
                seen += await response.content.readany()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await response.content.readany()
        await group.until("vllm:num_requests_running", 0)


@pytest.mark.parametrize("spec", ["reset-after-headers", "reset-mid-stream:after=2", "reset-before-headers"])
async def test_a_group_outlives_any_number_of_clients_that_vanish(spec: str) -> None:
    async with mock(slow_group()) as group:
        await group.fault(f"{spec}@0.7")
        body = CHAT | {"stream": True, "max_tokens": 20}
        await asyncio.gather(*(group.answer("/v1/chat/completions", body) for _ in range(60)), return_exceptions=True)
        await group.fault("")
        await group.until("vllm:num_requests_running", 0)
        assert (await group.stream(body))[-1] == "[DONE]"


@pytest.mark.parametrize("spec", ["reset-after-headers", "reset-mid-stream", "cut"])
async def test_a_whole_answer_can_break_off_too(group: Mock, spec: str) -> None:
    await group.fault(spec)
    async with group.post("/v1/chat/completions", CHAT) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_a_cut_stream_ends_cleanly_and_without_done(group: Mock) -> None:
    await group.fault("cut:after=3")
    events = await group.stream(CHAT | {"max_tokens": 50})
    assert len(events) == 1 + 3
    assert "[DONE]" not in events
    await group.until("vllm:num_requests_running", 0)


async def test_comments_come_between_events_and_the_sdk_reads_past_them(group: Mock) -> None:
    await group.fault("comments")
    stream = await group.sdk.chat.completions.create(**CHAT, max_tokens=5, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == expected_text(CHAT, 5)
    assert (await group.stream(CHAT | {"max_tokens": 5})).count(": keep-alive") == 5


async def test_a_pinned_rank_other_than_the_only_one_is_refused(group: Mock) -> None:
    served, refused = ("0", "-0", "--5", "none"), ("1", "-1", "1" * 5000)
    for rank, status in [*((rank, 200) for rank in served), *((rank, 400) for rank in refused)]:
        headers = {"X-data-parallel-rank": rank}
        assert (await group.answer("/v1/completions", {"prompt": "x"}, headers=headers))[0] == status


async def test_torn_events_are_the_same_stream(group: Mock) -> None:
    body = CHAT | {"max_tokens": 6}
    whole = [json.loads(e)["choices"][0] for e in (await group.stream(body))[:-1]]
    await group.fault("split")
    assert [json.loads(e)["choices"][0] for e in (await group.stream(body))[:-1]] == whole


async def test_errors_come_with_their_chance_and_status() -> None:
    async with mock(seed=7) as group:
        await group.fault("5xx:status=502@0.3")
        seen = [(await group.answer("/v1/chat/completions", CHAT | {"max_tokens": 1}))[0] for _ in range(100)]
        assert set(seen) == {200, 502}
        assert 15 <= seen.count(502) <= 45


async def test_slow_makes_every_step_so_many_times_longer() -> None:
    async with mock(GroupSpec("demo-8b", SPEC.model, SPEC.gpu, speed=2)) as group:
        loop, took = asyncio.get_running_loop(), []
        for spec in ("", "", "slow:x=10"):
            await group.fault(spec)
            started = loop.time()
            await group.answer("/v1/chat/completions", CHAT | {"max_tokens": 12})
            took.append(loop.time() - started)
        assert took[2] > 4 * min(took[:2])


async def test_a_refusing_group_is_gone_until_its_window_ends() -> None:
    async with mock() as group:
        await group.fault(f"refuse@0-{0.3 * pace():.2f}")
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as fresh, fresh.get(group.member.url + "/health"):
                pass
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with aiohttp.ClientSession() as fresh, fresh.get(group.member.url + "/health") as response:
                        assert response.status == 200
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)


async def test_a_group_told_twice_to_refuse_refuses_until_it_is_healed() -> None:
    async with mock() as group:
        for spec, answered in (("refuse", False), ("refuse", False), ("", True)):
            group.member.faults.apply(spec)
            await group.member.listener.wait_rebound()
            try:
                async with aiohttp.ClientSession() as fresh, fresh.get(group.member.url + "/health") as response:
                    assert (response.status, answered) == (200, True)
            except aiohttp.ClientConnectionError:
                assert not answered


async def test_a_bad_spec_is_refused_and_changes_nothing(group: Mock) -> None:
    await group.fault("slow:x=2")
    status, answer = await group.answer("/mock/fault", {"spec": "explode"})
    assert (status, "unknown fault" in answer["error"]["message"]) == (400, True)
    async with group.http.get(group.member.url + "/mock/fault") as response:
        assert await response.json() == {"spec": "slow:x=2"}


# --- the process


async def start(*options: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "mockgpu", *options, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_command_serves_its_groups_and_ends_cleanly_in_mid_stream(number: signal.Signals) -> None:
    process = await start("--port", "0", "--groups", "2", "--json", "--model", "llama-3.1-70b", "--gpu", "h200")
    assert process.stdout is not None
    async with asyncio.timeout(3 * PATIENCE_S):
        ready = [json.loads(await process.stdout.readline()) for _ in range(2)]
        assert [(r["model"], r["gpu"], r["tp"]) for r in ready] == [("llama-3.1-70b", "h200", 4)] * 2
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
async def test_the_command_refuses_what_it_cannot_be(options: tuple[str, ...]) -> None:
    process = await start("--port", "0", *options)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.startswith(b"error: ")
