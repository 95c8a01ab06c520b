"""Sends golden prompts to the engines to compare, a limited number of prompts at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from policies.golden.answers import GoldenAnswer, GoldenError, answer_of, path_of, request_of

TIMEOUT_S = 600.0
TOP = 5


class ComparedEngine(msgspec.Struct, frozen=True):
    """An engine or gateway whose answers are compared. `key` is a bearer token; "": none."""

    url: str
    model: str
    key: str = ""


async def send_to_all(
    engines: Sequence[ComparedEngine],
    prompts: Sequence[Mapping[str, Any]],
    max_tokens: int,
    concurrency: int,
    on_progress: Callable[[float], None],
) -> list[list[GoldenAnswer]]:
    """Return the answers of each engine to all prompts.

    max_tokens   maximum tokens of an answer
    concurrency  number of prompts that are sent at once
    on_progress  called with the share that is done, 0 to 1

    The engines get each prompt one after another, so that all of them have a similar load. Raises
    GoldenError if an engine answers none of the prompts.
    """
    slots = asyncio.Semaphore(concurrency)
    answers = [[GoldenAnswer()] * len(prompts) for _ in engines]
    done = 0
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def send_prompt(index: int) -> None:
            nonlocal done
            async with slots:
                for number, engine in enumerate(engines):
                    answers[number][index] = await _request_answer(
                        session, engine, prompts[index], max_tokens
                    )
            done += 1
            on_progress(done / len(prompts))

        await asyncio.gather(*(send_prompt(index) for index in range(len(prompts))))
    for engine, found in zip(engines, answers, strict=True):
        if all(answer.error for answer in found):
            raise GoldenError(
                f"the engine at {engine.url} answered none of the prompts: {found[0].error}"
            )
    return answers


async def _request_answer(
    session: aiohttp.ClientSession,
    engine: ComparedEngine,
    prompt: Mapping[str, Any],
    max_tokens: int,
) -> GoldenAnswer:
    headers = {"Authorization": f"Bearer {engine.key}"} if engine.key else {}
    url, began = engine.url.rstrip("/") + path_of(prompt), time.monotonic()
    for top in (TOP, 0):
        body = request_of(prompt, engine.model, max_tokens, top)
        try:
            async with session.post(url, json=body, headers=headers) as response:
                if response.status == 200:
                    return answer_of(await response.json(), time.monotonic() - began)
                text = (await response.text())[:200]
                if response.status != 400 or not top:
                    return GoldenAnswer(error=f"status {response.status}: {text}")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return GoldenAnswer(error=f"{type(error).__name__}: {error}")
    raise AssertionError(
        "unreachable: the second attempt, without log probabilities, always returns an answer"
    )


async def first_model(url: str, key: str) -> str:
    """Return the name of the first model that an engine lists.

    Raises GoldenError if it lists none or does not answer.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url.rstrip("/") + "/v1/models", headers=headers) as response,
        ):
            body = await response.json()
            return str(body["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise GoldenError(
            f"the engine at {url} lists no model ({type(error).__name__}); give --model, or "
            "check the address"
        ) from None
