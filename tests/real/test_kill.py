"""An engine is killed between the legs: the client gets the right answer or a clean error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.real.asking import Answer, ask, body, differences, prompt
from tests.real.engines import Engine, count_transfers
from tests.real.fronts import config, gateway
from tests.real.tap import Tap

WAIT_S = 60.0


async def _kill_between_the_legs(
    front_url: str, victim: Engine, tap_d: Tap, request: dict[str, object]
) -> Answer:
    """Delay the decode request, kill the victim, and forward the request."""
    tap_d.watch(hold=True)
    client = asyncio.create_task(ask(front_url, request))
    await asyncio.wait_for(tap_d.asked.wait(), WAIT_S)
    victim.kill()
    tap_d.go_on()
    return await asyncio.wait_for(client, WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_dies_between_the_legs_and_decode_computes_the_prompt_itself(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap], again: None, tmp_path: Path, stream: bool
) -> None:
    """vLLM's stream begins with a chunk without a token before the error.

    The client has then received bytes, so it may get the engine's error instead of a retry, but no
    token.
    """
    p, d = engines
    request = body(prompt(400, seed=4001 + stream), stream=stream)
    aggregated = await ask(d.url, request | {"cache_salt": "aggregated"})
    with gateway(
        tmp_path, config({"P": (taps[0].url, "prefill"), "D": (taps[1].url, "decode")})
    ) as front:
        warm = await ask(front.url, body(prompt(400, seed=4101 + stream)))
        assert warm.status == 200, warm.error
        answer = await _kill_between_the_legs(front.url, p, taps[1], request)
    if stream and answer.error:
        assert '"code": 500' in answer.error
        assert answer.tokens == ()
    else:
        assert (answer.status, answer.error) == (200, "")
        assert differences(answer, aggregated) == []
    await d.await_idle(10.0)


async def test_decode_dies_between_the_legs_and_another_endpoint_serves_the_request(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap], again: None, tmp_path: Path
) -> None:
    p, d = engines
    request = body(prompt(400, seed=4003))
    aggregated = await ask(p.url, request | {"cache_salt": "aggregated"})
    with gateway(
        tmp_path, config({"P": (taps[0].url, "both"), "D": (taps[1].url, "decode")})
    ) as front:
        answer = await _kill_between_the_legs(front.url, d, taps[1], request)
    assert (answer.status, answer.error) == (200, "")
    assert differences(answer, aggregated) == []


async def test_decode_dies_between_the_legs_without_another_endpoint(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap], again: None, tmp_path: Path
) -> None:
    _, d = engines
    with gateway(
        tmp_path, config({"P": (taps[0].url, "prefill"), "D": (taps[1].url, "decode")})
    ) as front:
        request = body(prompt(400, seed=4004))
        answer = await _kill_between_the_legs(front.url, d, taps[1], request)
    assert answer.status in (502, 503)
    assert "error" in answer.error


async def test_requests_are_split_again_after_an_engine_returns(
    engines: tuple[Engine, Engine], taps: tuple[Tap, Tap], tmp_path: Path
) -> None:
    transfers_before = await count_transfers(engines)
    with gateway(
        tmp_path, config({"P": (taps[0].url, "prefill"), "D": (taps[1].url, "decode")})
    ) as front:
        answer = await ask(front.url, body(prompt(400, seed=4005)))
    assert (answer.status, answer.error) == (200, "")
    assert await count_transfers(engines) == transfers_before + 1
