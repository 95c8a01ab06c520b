"""Tests of hedging: a request whose first byte is late is also sent to a second endpoint.

The first answer wins and is counted once. Each test scripts two endpoints: first the one that gets
the request, then the second one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from gateway.forwarding.hedge import INITIAL_REQUESTS
from policies.admission.quota import TokenBucket
from policies.endpoint_load import NO_SOFT_CAP
from policies.health.endpoint_health import HealthEvent, HealthState
from policies.health.endpoint_speed import JOIN_S, SpeedVerdict
from policies.health.late_request_detection import DOUBT_S, SUSPECT_CEILING
from tests.duration_limits import PATIENCE_S
from tests.replacement import replace_method
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    TEXT,
    EngineRequest,
    Script,
    ScriptedEngine,
    SplitGateway,
    breaks_after_a_token,
    decodes,
    in_turn,
    never_answers,
    refuses,
    resets,
    split_gateway,
    streams_one_token,
    when_open,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

WHOLE = "".join(TEXT)


@asynccontextmanager
async def pool(
    first: Script, second: Script, saved: float | None = 5.0, **options: Any
) -> AsyncIterator[SplitGateway]:
    script = in_turn(first, second)
    usual = {
        "models": [{"name": MODEL, "pool": "main"}],
        # With slow_factor 0, no endpoint is suspected of being slow.
        "health": {"slow_factor": 0.0},
    }
    options = usual | {"decode_role": "both", "policy": "round_robin"} | options
    both = split_gateway("vllm_nixl", [], [script] * 2, **options)
    async with both as running:
        for live in running.app.gateway.endpoints.all():
            for track in live.speed.tracks:
                for work in (1, 8, 64, 512, 4096):
                    track.add(work, 0.005)
        if saved is not None:
            running.app.gateway.hedger.allowed = saved
        yield running


async def engines_asked(running: SplitGateway, times: int) -> tuple[ScriptedEngine, ScriptedEngine]:
    # Wait until `times` requests have arrived; return the engines in the order of arrival.
    async with asyncio.timeout(PATIENCE_S):
        while sum(len(half.requests) for half in running.decode) < times:
            await asyncio.sleep(0.005)
    return tuple(
        sorted(running.decode, key=lambda half: half.requests[0].arrival if half.requests else 1e18)
    )  # type: ignore[return-value]


def counted(running: SplitGateway) -> tuple[float, float, float]:
    return (
        running.metric("penstock_hedges_total"),
        running.metric("penstock_requests_total"),
        running.metric("penstock_completion_tokens_total"),
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_the_second_endpoint_serves_a_request_whose_first_byte_is_late(stream: bool) -> None:
    async with pool(never_answers, decodes) as running:
        reply = await running.ask(
            stream=stream, stream_options={"include_usage": True} if stream else None
        )
        first, second = await engines_asked(running, 2)
        assert (reply.status, reply.text) == (200, WHOLE)
        assert reply.headers["x-penstock-endpoint"] == second.name
        async with asyncio.timeout(PATIENCE_S):
            await first.requests[0].closed.wait()
        await running.at_rest()
        assert counted(running) == (1, 1, 3)
        assert (running.error_count(first), running.error_count(second)) == (0, 0)
        assert running.metric("penstock_retries_total") == 0


async def test_a_hedged_request_is_charged_to_its_tenant_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: dict[TokenBucket, float] = {}
    take = TokenBucket.take

    def recorded(bucket: TokenBucket, amount: float) -> None:
        taken[bucket] = taken.get(bucket, 0.0) + amount
        take(bucket, amount)

    replace_method(monkeypatch, TokenBucket, "take", recorded)
    limits = {"requests_per_minute": 10, "tokens_per_minute": 100_000}
    tenants = [{"name": "acme", "key": "sk-acme", "limits": limits}]
    async with pool(never_answers, decodes, tenants=tenants) as running:
        running.http.headers["authorization"] = "Bearer sk-acme"
        reply = await running.ask()
        await running.at_rest()
        assert counted(running)[0] == 1
        requests, tokens = (taken[bucket] for bucket in sorted(taken, key=lambda each: each.limit))
        assert (requests, tokens) == (1, reply.json["usage"]["total_tokens"])


async def test_a_late_request_stays_where_no_other_endpoint_is_expected_to_be_much_sooner() -> None:
    async with pool(never_answers, decodes) as running:

        async def later() -> None:
            first, _ = await engines_asked(running, 1)
            live = running.app.gateway.endpoints.all()[1 - running.decode.index(first)]
            # Add prompts of other requests, behind which a hedge would wait.
            live.load.prefill_tokens += 10_000_000
            await asyncio.sleep(1.5)

        await running.ask_and_leave(later, stream=True)
        assert sum(len(half.requests) for half in running.decode) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_endpoint_serves_it_if_it_answers_first(stream: bool) -> None:
    gate = asyncio.Event()
    async with pool(when_open(gate, decodes), never_answers) as running:
        asking = asyncio.ensure_future(running.ask(stream=stream))
        first, second = await engines_asked(running, 2)
        gate.set()
        reply = await asking
        assert (reply.status, reply.text) == (200, WHOLE)
        assert reply.headers["x-penstock-endpoint"] == first.name
        async with asyncio.timeout(PATIENCE_S):
            await second.requests[0].closed.wait()
        await running.at_rest()
        assert counted(running)[:2] == (1, 1)
        assert (running.error_count(first), running.error_count(second)) == (0, 0)


async def test_an_answer_that_breaks_at_the_first_endpoint_leaves_the_second_one() -> None:
    first_gate, second_gate = asyncio.Event(), asyncio.Event()
    async with pool(when_open(first_gate, resets), when_open(second_gate, decodes)) as running:
        asking = asyncio.ensure_future(running.ask(stream=True))
        first, _ = await engines_asked(running, 2)
        first_gate.set()
        async with asyncio.timeout(PATIENCE_S):
            while not running.error_count(first):
                await asyncio.sleep(0.005)
        second_gate.set()
        reply = await asking
        assert (reply.status, reply.text) == (200, WHOLE)
        await running.at_rest()
        assert counted(running)[:2] == (1, 1)


@pytest.mark.parametrize("script", [resets, refuses(500), refuses(400)])
async def test_a_second_endpoint_that_fails_leaves_the_first_one(script: Script) -> None:
    gate = asyncio.Event()
    async with pool(when_open(gate, decodes), script) as running:
        asking = asyncio.ensure_future(running.ask(stream=True))
        _, second = await engines_asked(running, 2)
        async with asyncio.timeout(PATIENCE_S):
            while running.app.gateway.endpoints.all()[running.decode.index(second)].load.in_flight:
                await asyncio.sleep(0.005)
        gate.set()
        reply = await asking
        assert (reply.status, reply.text) == (200, WHOLE)
        await running.at_rest()
        assert counted(running)[:2] == (1, 1)


async def test_a_request_that_fails_at_both_is_refused_once() -> None:
    first_gate, second_gate = asyncio.Event(), asyncio.Event()
    async with pool(
        when_open(first_gate, refuses(500)), when_open(second_gate, refuses(500))
    ) as running:
        asking = asyncio.ensure_future(running.ask(stream=True))
        await engines_asked(running, 2)
        first_gate.set()
        await asyncio.sleep(0.05)
        second_gate.set()
        assert (await asking).status == 502
        await running.at_rest()
        assert running.metric("penstock_requests_total") == 1


async def test_an_answer_that_has_begun_is_not_continued_by_the_second_endpoint() -> None:
    has_begun, may_break, may_answer = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def breaks_after_the_role(request: EngineRequest) -> None:
        await has_begun.wait()
        request.open_stream()
        request.event({"model": MODEL, "choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        await may_break.wait()
        request.writer.transport.abort()

    async def answers_in_parts(request: EngineRequest) -> None:
        await may_answer.wait()
        request.open_stream()
        for word in TEXT:
            delta = {"content": word}
            request.event({"model": MODEL, "choices": [{"index": 0, "delta": delta}]})
            await asyncio.sleep(0.2)
        request.end_stream()

    async with pool(breaks_after_the_role, answers_in_parts) as running:
        asking = asyncio.ensure_future(running.ask(stream=True))
        await engines_asked(running, 2)
        has_begun.set()
        await asyncio.sleep(0.1)
        may_answer.set()  # the client cannot get this part: the other answer has begun
        await asyncio.sleep(0.1)
        may_break.set()
        reply = await asking
        assert reply.body is None or b'"error"' in reply.body
        await running.at_rest()
        assert running.metric("penstock_requests_total") == 1


async def test_a_second_endpoint_that_breaks_its_answer_off_ends_the_stream_with_an_error() -> None:
    async with pool(never_answers, breaks_after_a_token) as running:
        reply = await running.ask(stream=True)
        assert reply.body is None or b'"error"' in reply.body
        await running.at_rest()
        assert running.metric("penstock_requests_total") == 1


async def test_no_request_is_late_after_a_pause_of_the_gateway_itself() -> None:
    async def answers_before_a_pause(request: EngineRequest) -> None:
        await decodes(request)
        asyncio.get_running_loop().pause(1.0)  # the answer has arrived, but is not read

    async with pool(answers_before_a_pause, decodes) as running:
        for _ in range(4):
            await asyncio.sleep(0.07)  # each request arrives at another moment between two sweeps
            assert (await running.ask(stream=True)).text == WHOLE
            assert counted(running)[0] == 0
        assert {len(half.requests) for half in running.decode} == {2}


async def test_a_client_that_leaves_ends_both_attempts() -> None:
    async with pool(never_answers, never_answers) as running:

        async def both() -> None:
            await engines_asked(running, 2)

        await running.ask_and_leave(both, stream=True)
        for half in running.decode:
            async with asyncio.timeout(PATIENCE_S):
                await half.requests[0].closed.wait()
        await running.at_rest()
        assert running.metric("penstock_requests_total") == 1


async def test_a_stream_that_has_begun_is_not_hedged() -> None:
    async with pool(streams_one_token, decodes) as running:

        async def later() -> None:
            await engines_asked(running, 1)
            await asyncio.sleep(1.5)

        await running.ask_and_leave(later, stream=True)
        assert sum(len(half.requests) for half in running.decode) == 1


@pytest.mark.parametrize(
    ("saved", "retries"), [(0.0, {}), (5.0, {"hedge": 0.0}), (5.0, {"budget": 0.0, "floor": 0})]
)
async def test_no_request_is_hedged_beyond_its_share_or_the_retry_budget(
    saved: float, retries: dict[str, Any]
) -> None:
    async with pool(never_answers, decodes, saved=saved, retries=retries) as running:

        async def later() -> None:
            await engines_asked(running, 1)
            await asyncio.sleep(1.5)

        await running.ask_and_leave(later, stream=True)
        assert sum(len(half.requests) for half in running.decode) == 1


async def test_a_client_may_ask_for_no_second_attempt() -> None:
    async with pool(never_answers, decodes) as running:
        running.http.headers["x-penstock-hedge"] = "off"

        async def later() -> None:
            await engines_asked(running, 1)
            await asyncio.sleep(1.5)

        await running.ask_and_leave(later, stream=True)
        assert sum(len(half.requests) for half in running.decode) == 1


async def test_late_requests_at_a_suspect_endpoint_are_moved_and_no_hedge_is_spent() -> None:
    async with pool(never_answers, decodes, saved=0.0, health={}) as running:
        asking = asyncio.ensure_future(running.ask(stream=True))
        first, _ = await engines_asked(running, 1)
        reply = await asking
        assert (reply.status, reply.text) == (200, WHOLE)
        live = running.app.gateway.endpoints.all()[running.decode.index(first)]
        assert (live.speed.verdict, live.health.state) == (SpeedVerdict.SUSPECT, HealthState.UP)
        await running.at_rest()
        assert running.metric("penstock_retries_total", kind="slow") == 1
        assert counted(running)[:2] == (0, 1)


async def test_an_endpoint_that_was_overtaken_gets_few_requests_until_it_is_judged() -> None:
    async with pool(never_answers, decodes, health={"slow_factor": 100.0}) as running:
        assert (await running.ask(stream=True)).text == WHOLE
        first, _ = await engines_asked(running, 2)
        endpoints = running.app.gateway.endpoints
        load = endpoints.all()[running.decode.index(first)].load
        assert load.soft_cap == 0
        ceilings = []
        for seconds in range(8):
            endpoints.sweep(monotonic() + DOUBT_S + seconds)
            ceilings.append(load.soft_cap)
        assert ceilings == [2 * SUSPECT_CEILING, 4, 8, 16, 32, 64, NO_SOFT_CAP, NO_SOFT_CAP]


async def test_requests_behind_others_at_an_endpoint_in_doubt_are_moved() -> None:
    script = in_turn(never_answers, decodes, never_answers, decodes)
    async with pool(script, script, saved=0.0, health={"slow_factor": 100.0}) as running:
        waiting = asyncio.ensure_future(running.ask(stream=True))
        first, _ = await engines_asked(running, 1)
        assert (await running.ask(stream=True)).text == WHOLE
        await asyncio.sleep(2 * JOIN_S)
        behind = asyncio.ensure_future(running.ask(stream=True))
        await engines_asked(running, 3)
        live = running.app.gateway.endpoints.all()[running.decode.index(first)]
        live.load.soft_cap, live.throttled_until = SUSPECT_CEILING, monotonic() + PATIENCE_S
        assert (await behind).text == WHOLE
        assert counted(running)[0] == 0
        running.app.gateway.hedger.allowed = 1.0
        assert (await waiting).text == WHOLE
        await running.at_rest()
        assert running.metric("penstock_retries_total", kind="slow") == 1
        assert counted(running)[:2] == (1, 3)


async def test_the_first_requests_of_a_gateway_may_be_hedged_and_later_ones_pay_for_it() -> None:
    async with pool(decodes, decodes, saved=None) as running:
        hedger = running.app.gateway.hedger
        assert hedger.allowed == 0.05 * INITIAL_REQUESTS
        for _ in range(4):
            await running.ask(words=3)
        hedger.sweep(0.05, monotonic())
        assert hedger.allowed == 0.05 * INITIAL_REQUESTS


async def test_an_ended_request_leaves_the_hedger_before_the_next_sweep() -> None:
    # Otherwise hundreds of ended requests would stay in memory under load.
    async with pool(decodes, never_answers, saved=None) as running:
        hedger = running.app.gateway.hedger
        waiting = asyncio.ensure_future(running.ask())
        await running.ask()
        assert len(hedger.waiting) == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        await running.at_rest()
        assert not hedger.waiting


async def test_requests_that_wait_at_an_endpoint_ejected_as_slow_are_moved() -> None:
    async with pool(never_answers, decodes, saved=0.0) as running:
        asking = asyncio.ensure_future(running.ask(stream=True))
        first, _ = await engines_asked(running, 1)
        endpoints = running.app.gateway.endpoints
        endpoints.on_event(endpoints.all()[running.decode.index(first)], HealthEvent.SLOW)
        reply = await asking
        assert (reply.status, reply.text) == (200, WHOLE)
        await running.at_rest()
        assert running.metric("penstock_retries_total", kind="slow") == 1
        assert counted(running)[:2] == (0, 1)
