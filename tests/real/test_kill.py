"""Tests that kill an engine between prefill and decode: the client gets the answer or a clean
error.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import Engine, transfers
from tests.real.gateway_process import config, gateway
from tests.real.holding_relay import Tap

WAIT_S = 60.0


async def _killed_between_the_legs(
    front_url: str, victim: Engine, before_d: Tap, asked: dict[str, object]
) -> Answer:
    # Kill an engine while the decode request is held back, then release it; return the answer.
    before_d.watch(hold=True)
    client = asyncio.create_task(ask(front_url, asked))
    await asyncio.wait_for(before_d.asked.wait(), WAIT_S)
    victim.kill()
    before_d.go_on()
    return await asyncio.wait_for(client, WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_dies_between_the_legs_and_decode_computes_the_prompt_itself(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap], again: None, tmp_path: Path, stream: bool
) -> None:
    # In a stream, vLLM sends a chunk with a role and no token before it reports the failure.
    #
    # The client has received bytes by then, so the gateway may forward the engine's error instead
    # of a retry. The client must not receive a token.
    p, d = engines
    asked = body(prompt(400, seed=4001 + stream), stream=stream)
    whole = await ask(d.url, asked | {"cache_salt": "aggregated"})
    with gateway(
        tmp_path, config({"P": (taps[0].url, "prefill"), "D": (taps[1].url, "decode")})
    ) as front:
        warm = await ask(front.url, body(prompt(400, seed=4101 + stream)))
        assert warm.status == 200, warm.error
        answer = await _killed_between_the_legs(front.url, p, taps[1], asked)
    if stream and answer.error:
        assert '"code": 500' in answer.error
        assert answer.tokens == ()
    else:
        assert (answer.status, answer.error) == (200, "")
        assert differences(answer, whole) == []
    await d.idle_within(10.0)


async def test_a_request_whose_decode_engine_dies_between_the_legs_is_served_by_the_other(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap], again: None, tmp_path: Path
) -> None:
    p, d = engines
    asked = body(prompt(400, seed=4003))
    whole = await ask(p.url, asked | {"cache_salt": "aggregated"})
    with gateway(
        tmp_path, config({"P": (taps[0].url, "both"), "D": (taps[1].url, "decode")})
    ) as front:
        answer = await _killed_between_the_legs(front.url, d, taps[1], asked)
    assert (answer.status, answer.error) == (200, "")
    assert differences(answer, whole) == []


async def test_decode_dies_between_the_legs_and_nobody_else_can_serve(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap], again: None, tmp_path: Path
) -> None:
    _, d = engines
    with gateway(
        tmp_path, config({"P": (taps[0].url, "prefill"), "D": (taps[1].url, "decode")})
    ) as front:
        asked = body(prompt(400, seed=4004))
        answer = await _killed_between_the_legs(front.url, d, taps[1], asked)
    assert answer.status in (502, 503)
    assert "error" in answer.error


async def test_an_engine_that_came_back_is_split_with_again(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap], tmp_path: Path
) -> None:
    moved = await transfers(engines)
    with gateway(
        tmp_path, config({"P": (taps[0].url, "prefill"), "D": (taps[1].url, "decode")})
    ) as front:
        answer = await ask(front.url, body(prompt(400, seed=4005)))
    assert (answer.status, answer.error) == (200, "")
    assert await transfers(engines) == moved + 1
