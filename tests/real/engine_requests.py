"""Sends requests with unique prompts to real engines, and returns tokens and log probabilities."""

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.real.engines import MODEL, ROOT, Engine

Token = tuple[str, float]
LOGPROB_TOLERANCE = 1e-4
PATIENCE_S = 1800.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    error: str = ""
    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def differences(one: Answer, other: Answer) -> list[str]:
    # Return the tokens that differ, or whose logprobs differ in more than 4 digits.
    #
    # Engines compute them in float32 and in batches, which changes the last digits.
    if len(one.tokens) != len(other.tokens):
        return [f"{len(one.tokens)} tokens and {len(other.tokens)}"]
    pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
    return [
        f"token {at}: {a} and {b}"
        for at, (a, b) in pairs
        if a[0] != b[0] or not is_close(a[1], b[1])
    ]


def is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=LOGPROB_TOLERANCE, abs_tol=LOGPROB_TOLERANCE)


def prompt(words: int, seed: int) -> str:
    rng = random.Random(seed)
    text = (ROOT / "docs" / "architecture.md").read_text().split()
    return f"{seed} " + " ".join(rng.choice(text) for _ in range(words))


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
    text, tokens = "", list[Token]()
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
    return Answer(
        200,
        headers,
        text=text,
        tokens=tuple(tokens),
        finish_reason=finish,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens", 0),
    )


_OFFERS = {"do_remote_decode": True, "do_remote_prefill": False}


async def introduce(p: Engine, d: Engine) -> None:
    # Send one split request to `p` and `d` without a gateway, so that they know each other.
    asked, handoff = body(prompt(400, seed=1001), max_tokens=1), _OFFERS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as http:
        for engine in (p, d):
            request = asked | {"kv_transfer_params": handoff}
            async with http.post(f"{engine.url}/v1/chat/completions", json=request) as answer:
                handoff = (await answer.json()).get("kv_transfer_params")
