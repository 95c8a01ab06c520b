"""Tests that kill an engine with open streams: the other engine continues them with the same
tokens.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.processes import GatewayProcess
from tests.metrics_page import total
from tests.real.api_answers import MESSAGES, PATHS, RESPONSES, ask_api, request_of
from tests.real.engine_requests import Answer, ask, body, prompt
from tests.real.engines import Engine
from tests.real.gateway_process import config, gateway

STREAMS, TOKENS = 4, 400
KILLED_AT = 10 * STREAMS  # number of events read by all clients at which the engine is killed


def _greedy(seed: int) -> dict[str, Any]:
    # Return a greedy request without log probabilities, with which none can be resumed.
    asked = body(prompt(150, seed), max_tokens=TOKENS, stream=True)
    return {name: value for name, value in asked.items() if "logprobs" not in name}


async def _killed_under_them(
    front: GatewayProcess, engines: tuple[Engine, Engine], asked: list[dict[str, Any]]
) -> list[Answer]:
    events = 0

    def heard(endpoint: str) -> None:
        nonlocal events
        events += 1
        if events == KILLED_AT:
            next(engine for engine in engines if engine.name == endpoint).kill()

    return await asyncio.gather(*(ask(front.url, each, heard=heard) for each in asked))


async def test_streams_outlive_the_engine_that_began_them_token_for_token(
    engines: tuple[Engine, Engine], again: None, tmp_path: Path
) -> None:
    # If the last piece of text before the failure had several tokens, that text is generated again.
    #
    # If it is then different, the stream ends with an error event, and its text so far is right.
    asked = [_greedy(6000 + number) for number in range(STREAMS)]
    undisturbed = [
        await ask(engines[1].url, each | {"cache_salt": "undisturbed"}) for each in asked
    ]
    whole = {engine.name: (engine.url, "both") for engine in engines}
    with gateway(tmp_path, config(whole, serving="resume: {attempts: 2}")) as front:
        answers = await _killed_under_them(front, engines, asked)
        resumed, seam = await _resumes(front)
    print(f"{resumed:g} of {STREAMS} streams were resumed, {seam:g} broke at a seam")
    assert resumed >= 1
    assert sum(bool(answer.error) for answer in answers) == seam
    for answer, told in zip(answers, undisturbed, strict=True):
        assert told.completion_tokens == TOKENS
        if answer.error:
            assert told.text.startswith(answer.text)
        else:
            assert (answer.text, answer.completion_tokens) == (told.text, TOKENS)
            assert (answer.finish_reason, answer.prompt_tokens) == (
                told.finish_reason,
                told.prompt_tokens,
            )


async def test_streams_of_every_api_outlive_the_engine_that_began_them(
    engines: tuple[Engine, Engine], again: None, tmp_path: Path
) -> None:
    # Through the gateway, Messages and Responses are answered as chat completions. The undisturbed
    # answers for comparison come from the engine's own APIs.
    requests = [
        (path, request_of(path, prompt(150, 6100 + n), TOKENS, stream=True))
        for n, path in enumerate((*PATHS, RESPONSES, MESSAGES))
    ]
    undisturbed = [await ask_api(engines[1].url, *each) for each in requests]
    whole = {engine.name: (engine.url, "both") for engine in engines}
    events = 0

    def heard(endpoint: str) -> None:
        nonlocal events
        events += 1
        if events == KILLED_AT:
            next(engine for engine in engines if engine.name == endpoint).kill()

    with gateway(tmp_path, config(whole, serving="resume: {attempts: 2}")) as front:
        answers = await asyncio.gather(*(ask_api(front.url, *each, heard) for each in requests))
        resumed, seam = await _resumes(front)
    print(f"{resumed:g} of {len(requests)} streams were resumed, {seam:g} broke at a seam")
    assert resumed >= 1
    assert sum(bool(answer.error) for answer in answers) == seam
    for answer, told in zip(answers, undisturbed, strict=True):
        if answer.error:
            assert told.text.startswith(answer.text)
        else:
            assert answer.comparable == told.comparable


async def _resumes(front: GatewayProcess) -> tuple[float, float]:
    # Return how many streams were resumed, and how many ended at an ambiguous place of their text.
    async with aiohttp.ClientSession() as http, http.get(f"{front.admin_url}/metrics") as metrics:
        page = await metrics.text()
    resumed, seam = (
        total(page, "penstock_resumes_total", result=result)
        for result in ("resumed", "ambiguous_ids")
    )
    assert total(page, "penstock_resumes_total") == resumed + seam
    return resumed, seam
