"""Tests that pauses of the gateway itself, in which it has no CPU, make no engine look failed.

After a pause, answers have arrived, but the loop runs its due timers before it reads them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.fleet.live_endpoint import LiveEndpoint
from policies.health.endpoint_health import HealthState
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.disagg.scripted_engines import (
    MODEL,
    EngineRequest,
    ScriptedEngine,
    SplitGateway,
    decodes,
    never_answers,
    split_gateway,
)
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

HEALTH = {"interval": "1s", "timeout": "1s", "failures": 1, "progress": "5s"}
TEST_TOKEN = "1"


def pause(seconds: float) -> None:
    loop: Any = asyncio.get_running_loop()
    loop.pause(seconds)


def only(running: SplitGateway) -> tuple[ScriptedEngine, LiveEndpoint]:
    (engine,), (live,) = running.decode, running.app.gateway.endpoints.all()
    return engine, live


def plain(*scripts: Any) -> Any:
    return split_gateway("vllm_nixl", [], [*scripts], decode_role="both", health=HEALTH)


async def test_a_health_check_that_a_pause_delayed_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with plain(decodes) as running:
        engine, live = only(running)
        asked = list[bytes]()
        answer_get = engine._answer_get

        def answer_and_pause(head: bytes, writer: asyncio.StreamWriter) -> None:
            answer_get(head, writer)
            if b"/health" in head:
                asked.append(head)
                if len(asked) % 2:
                    pause(1.5)

        monkeypatch.setattr(engine, "_answer_get", answer_and_pause)
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < 8:
                await asyncio.sleep(0.1)
                assert live.health.state is HealthState.UP


async def test_a_silent_engine_is_ejected_even_if_the_gateway_pauses_all_the_time() -> None:
    async with plain(decodes) as running:
        engine, live = only(running)
        engine.is_silent = True
        async with asyncio.timeout(PATIENCE_S):
            while live.health.state is HealthState.UP:
                pause(0.3)
                await asyncio.sleep(0.01)


async def test_a_test_token_that_a_pause_delayed_is_requested_again() -> None:
    tokens = list[float]()

    async def stalls_but_generates(request: EngineRequest) -> None:
        if request.json.get("prompt") != TEST_TOKEN:
            await never_answers(request)
        message = {"index": 0, "text": "1", "finish_reason": "length"}
        request.respond({"model": MODEL, "choices": [message]})
        tokens.append(asyncio.get_running_loop().time())
        if len(tokens) % 2:
            pause(10.0)

    async with plain(stalls_but_generates) as running:
        _, live = only(running)
        live.progress = (0, 0.0)

        async def later() -> None:
            async with asyncio.timeout(20 * PATIENCE_S):
                while len(tokens) < 8:
                    await asyncio.sleep(0.1)
                    assert live.health.state is HealthState.UP

        await running.ask_and_leave(later, stream=True)
