"""An engine is killed with open streams: the other continues them with the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.processes import GatewayProcess
from tests.real.asking import Answer, ask, body, prompt
from tests.real.engines import Engine
from tests.real.fronts import config, gateway
from tests.scraped import total

STREAMS, TOKENS = 4, 400
KILLED_AT = 10 * STREAMS  # number of events that clients have read


def _greedy(seed: int) -> dict[str, Any]:
    """Build a request without logprobs, because streams with logprobs cannot be resumed."""
    request = body(prompt(150, seed), max_tokens=TOKENS, stream=True)
    return {name: value for name, value in request.items() if "logprobs" not in name}


async def _kill_during_streams(
    front: Gateway, engines: tuple[Engine, Engine], requests: list[dict[str, Any]]
) -> list[Answer]:
    events = 0

    def on_event(endpoint: str) -> None:
        nonlocal events
        events += 1
        if events == KILLED_AT:
            next(engine for engine in engines if engine.name == endpoint).kill()

    tasks = (ask(front.url, request, on_event=on_event) for request in requests)
    return await asyncio.gather(*tasks)


async def test_streams_continue_on_another_engine_token_for_token(
    engines: tuple[Engine, Engine], again: None, tmp_path: Path
) -> None:
    """A stream whose last chunk had several tokens cannot be resumed exactly.

    It then ends with an error event, and its text up to there is correct.
    """
    requests = [_greedy(6000 + number) for number in range(STREAMS)]
    undisturbed = [
        await ask(engines[1].url, request | {"cache_salt": "undisturbed"}) for request in requests
    ]
    whole = {engine.name: (engine.url, "both") for engine in engines}
    with gateway(tmp_path, config(whole, serving="resume: {attempts: 2}")) as front:
        answers = await _kill_during_streams(front, engines, requests)
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{front.admin_url}/metrics") as metrics,
        ):
            page = await metrics.text()
    resumed, seam = (
        total(page, "penstock_resumes_total", result=result) for result in ("resumed", "seam")
    )
    print(f"{resumed:g} of {STREAMS} streams were resumed, {seam:g} broke at a seam")
    assert resumed >= 1
    assert total(page, "penstock_resumes_total") == resumed + seam
    assert sum(bool(answer.error) for answer in answers) == seam
    for answer, wanted in zip(answers, undisturbed, strict=True):
        assert wanted.completion_tokens == TOKENS
        if answer.error:
            assert wanted.text.startswith(answer.text)
        else:
            assert (answer.text, answer.completion_tokens) == (wanted.text, TOKENS)
            assert (answer.finish_reason, answer.prompt_tokens) == (
                wanted.finish_reason,
                wanted.prompt_tokens,
            )
