"""Sends requests with unique prompts to real engines, and returns tokens and log probabilities."""

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import aiohttp

from tests.real.engines import MODEL, ROOT, Engine

Token = tuple[str, float]
LOGPROB_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.1
"""Three steps of a bfloat16 logit between 4 and 8. Two ranks add in another order than one, and
then log probabilities differ by one or two steps.
"""
PATIENCE_S = 1800.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    error: str = ""
    text: str = ""
    tokens: tuple[Token, ...] = ()
    choices: tuple[dict[str, float], ...] = ()  # the likeliest tokens at each place
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def differences(one: Answer, other: Answer, tolerance: float = LOGPROB_TOLERANCE) -> list[str]:
    # Return the tokens that differ, or whose logprobs differ by more than the tolerance.
    #
    # Engines compute them in batches, which changes the last digits: the fourth in float32, with
    # which greedy answers stay equal. See also `differences_until_a_tie`.
    if len(one.tokens) != len(other.tokens):
        return [f"{len(one.tokens)} tokens and {len(other.tokens)}"]
    pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
    return [
        f"token {at}: {a} and {b}"
        for at, (a, b) in pairs
        if a[0] != b[0] or not is_close(a[1], b[1], tolerance)
    ]


def differences_until_a_tie(one: Answer, other: Answer, tolerance: float) -> list[str]:
    # Return the differences of two greedy answers that were computed with few digits.
    #
    # Where the likeliest tokens are tied within the tolerance, the answers may go different ways,
    # and nothing behind that place is compared. Both answers need their `choices`.
    places = zip(one.tokens, other.tokens, one.choices, other.choices, strict=False)
    for at, (a, b, of_one, of_other) in enumerate(places):
        if a[0] == b[0]:
            continue
        if _is_tie(a, of_other, tolerance) and _is_tie(b, of_one, tolerance):
            return differences(_first(one, at), _first(other, at), tolerance)
        break
    return differences(one, other, tolerance)


def _is_tie(token: Token, choices: dict[str, float], tolerance: float) -> bool:
    # Return whether the other answer's choices have this token with the same logprob, and nearly
    # as likely as their likeliest token.
    logprob = choices.get(token[0], -math.inf)
    return is_close(token[1], logprob, tolerance) and max(choices.values()) - logprob <= tolerance


def _first(answer: Answer, count: int) -> Answer:
    return replace(answer, tokens=answer.tokens[:count])


def is_close(one: float, other: float, tolerance: float = LOGPROB_TOLERANCE) -> bool:
    return math.isclose(one, other, rel_tol=LOGPROB_TOLERANCE, abs_tol=tolerance)


def prompt(words: int, seed: int) -> str:
    rng = random.Random(seed)
    return f"{seed} " + " ".join(rng.choice(_words()) for _ in range(words))


@cache
def _words() -> list[str]:
    # The file is read once, so that prompts stay equal if it changes while a test runs.
    return (ROOT / "docs" / "architecture.md").read_text().split()


def body(
    text: str, *, max_tokens: int = 16, stream: bool = False, **members: Any
) -> dict[str, Any]:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 1,
        "stream": stream,
    }
    return asked | ({"stream_options": {"include_usage": True}} if stream else {}) | members


Heard = Callable[[str], object]


async def ask(
    url: str, asked: dict[str, Any], timeout_s: float = PATIENCE_S, heard: Heard | None = None
) -> Answer:
    # Send a request to a gateway or an engine and return the whole answer.
    #
    # Its status is 0 if the connection broke or the stream contained an error. `heard` is called
    # with the name of the serving endpoint for every event of a stream.
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(f"{url}/v1/chat/completions", json=asked) as answer,
        ):
            headers = {name.lower(): value for name, value in answer.headers.items()}
            if answer.status != 200:
                return Answer(answer.status, headers, (await answer.text())[:500])
            if not asked["stream"]:
                return _read([await answer.json()], headers)
            events = []
            async for event in _events(answer):
                events.append(event)
                if heard is not None:
                    heard(headers.get("x-penstock-endpoint", ""))
    except aiohttp.ClientError as error:
        return Answer(0, {}, f"{type(error).__name__}: {error}")
    return _read(events, headers)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def _read(events: list[dict[str, Any]], headers: dict[str, str]) -> Answer:
    text, tokens, choices = "", list[Token](), list[dict[str, float]]()
    finish, usage = None, dict[str, Any]()
    for event in events:
        if "error" in event:
            return Answer(0, headers, json.dumps(event["error"]), text, tuple(tokens))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            text += choice.get("delta", choice.get("message")).get("content") or ""
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            tokens += [(each["token"], each["logprob"]) for each in logprobs]
            choices += [_likeliest(each["top_logprobs"]) for each in logprobs]
    return Answer(
        200,
        headers,
        text=text,
        tokens=tuple(tokens),
        choices=tuple(choices),
        finish_reason=finish,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens", 0),
    )


def _likeliest(top_logprobs: list[dict[str, Any]]) -> dict[str, float]:
    # Several tokens may have the same text; the first is the likeliest.
    return {each["token"]: each["logprob"] for each in reversed(top_logprobs)}


_OFFERS = {"do_remote_decode": True, "do_remote_prefill": False}


async def introduce(p: Engine, d: Engine) -> None:
    # Send one split request to `p` and `d` without a gateway, so that they know each other.
    asked, handoff = body(prompt(400, seed=1001), max_tokens=1), _OFFERS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as http:
        for engine in (p, d):
            request = asked | {"kv_transfer_params": handoff}
            async with http.post(f"{engine.url}/v1/chat/completions", json=request) as answer:
                handoff = (await answer.json()).get("kv_transfer_params")
