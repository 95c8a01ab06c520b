"""The clients of a soak test: they send all kinds of requests and check every answer.

A stream may fail only if its engine fails. The faults are in bench/load/soak_churn.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import aiohttp
import msgspec

from bench.load.soak_processes import SPLIT, WHOLE
from mockgpu.mock_tokenizer import expected_text
from planner.bench.answer_timeline import AnswerTimeline

THINK_S = 0.8
SESSIONS = 40
"""Number of sessions of the clients: so few that all contexts fit into the engines' KV caches."""

SERVED_BY = ("x-penstock-endpoint", "x-penstock-prefill")


class Kind(msgspec.Struct, frozen=True):
    """One kind of request that clients of a soak test send, such as a streamed chat.

    weight   relative frequency
    stream   whether the answer is streamed
    words    minimum and maximum number of words in the prompt
    tokens   minimum and maximum of max_tokens
    leaves   fraction (0 to 1) of the answer after which the client disconnects; None: it does not
    status   expected HTTP status
    changed  members of the body that make it invalid
    """

    weight: int
    model: str = WHOLE
    stream: bool = True
    words: tuple[int, int] = (20, 400)
    tokens: tuple[int, int] = (8, 48)
    leaves: float | None = None
    status: int = 200
    changed: Mapping[str, Any] = {}


KINDS: Mapping[str, Kind] = {
    "stream": Kind(24, tokens=(20, 200)),
    "answered whole": Kind(12, stream=False),
    "split stream": Kind(20, SPLIT, words=(150, 600), tokens=(20, 200)),
    "split, answered whole": Kind(8, SPLIT, stream=False, words=(150, 600)),
    "long prompt": Kind(6, words=(3000, 8000), tokens=(4, 16)),
    "long split prompt": Kind(4, SPLIT, words=(2000, 6000), tokens=(4, 16)),
    "leaves before the answer": Kind(4, leaves=0.0, words=(1000, 3000)),
    "leaves a split one before": Kind(4, SPLIT, leaves=0.0, words=(1000, 3000)),
    "leaves within the answer": Kind(5, leaves=0.5, tokens=(40, 80)),
    "leaves within a split one": Kind(5, SPLIT, leaves=0.5, tokens=(40, 80), words=(150, 600)),
    "no such model": Kind(2, "whale", status=404),
    "no such length": Kind(2, status=400, changed={"max_tokens": 0}),
    "longer than the context": Kind(2, status=400, changed={"max_tokens": 10_000_000}),
    "no messages": Kind(2, status=400, changed={"messages": "hello"}),
}


class Clients:
    """The simulated users of a soak test. Each sends one request at a time and checks its answer.

    fates       number of requests by kind and outcome: ok, left (the client disconnected), refused
                (as expected), lost (with its engine), unexpected
    unexpected  descriptions of wrong answers
    excuses     function that returns whether an engine failed in a period
    """

    def __init__(
        self, url: str, http: aiohttp.ClientSession, excuses: Callable[[str, float, float], bool]
    ) -> None:
        self.fates: Counter[tuple[str, str]] = Counter()
        self.unexpected: list[str] = []
        self._url = f"{url}/v1/chat/completions"
        self._http = http
        self._excuses = excuses
        self._number = 0

    async def work(self, users: int, stop: asyncio.Event, rng: Random) -> None:
        await asyncio.gather(*(self._user(stop, Random(rng.random())) for _ in range(users)))

    async def _user(self, stop: asyncio.Event, rng: Random) -> None:
        weights = [kind.weight for kind in KINDS.values()]
        while not stop.is_set():
            (name,) = rng.choices(list(KINDS), weights)
            fate = await self._send(name, KINDS[name], rng)
            self.fates[name, fate] += 1
            await asyncio.sleep(rng.expovariate(1 / THINK_S))

    def _body(self, kind: Kind, rng: Random) -> dict[str, Any]:
        self._number += 1
        prompt = f"question {self._number} " + "and more " * rng.randint(
            kind.words[0] // 2, kind.words[1] // 2
        )
        body = {
            "model": kind.model,
            "stream": kind.stream,
            "ignore_eos": True,
            "max_tokens": rng.randint(*kind.tokens),
        }
        return body | {"messages": [{"role": "user", "content": prompt}]} | dict(kind.changed)

    async def _send(self, name: str, kind: Kind, rng: Random) -> str:
        body, started, timeline, heads = (
            self._body(kind, rng),
            time.monotonic(),
            AnswerTimeline(),
            dict[str, str](),
        )
        headers = {
            "x-session-id": f"s{rng.randrange(SESSIONS)}",
            "x-slo-class": rng.choice(("standard", "batch")),
        }
        try:
            async with asyncio.timeout(rng.uniform(0.0, 0.05) if kind.leaves == 0.0 else None):
                problem = await self._read(body, headers, kind, timeline, heads)
        except (aiohttp.ClientError, OSError) as error:
            if kind.leaves == 0.0 and isinstance(error, TimeoutError):
                return "left"
            problem = repr(error)
        if problem in ("ok", "left", "refused"):
            return problem
        has_started = timeline.first_s is not None
        if has_started and any(
            self._excuses(heads.get(header, ""), started, time.monotonic()) for header in SERVED_BY
        ):
            return "lost with its group"
        self.unexpected.append(
            f"{name}: {problem} {heads} after {time.monotonic() - started:.2f} s"
        )
        return "unexpected"

    async def _read(
        self,
        body: dict[str, Any],
        headers: dict[str, str],
        kind: Kind,
        timeline: AnswerTimeline,
        heads: dict[str, str],
    ) -> str:
        async with self._http.post(self._url, json=body, headers=headers) as answer:
            heads.update(answer.headers)
            if answer.status != 200 or kind.status != 200:
                text = await answer.text()
                return "refused" if answer.status == kind.status else f"{answer.status} {text:.300}"
            if not kind.stream:
                return _verdict(body, (await answer.json())["choices"][0]["message"]["content"])
            async for piece in answer.content.iter_any():
                timeline.feed(piece, time.monotonic())
                if kind.leaves is not None and timeline.tokens > kind.leaves * body["max_tokens"]:
                    answer.close()
                    return "left"
        if timeline.error is not None or not timeline.done:
            return f"ended with {timeline.error or 'no [DONE]'}"
        return _verdict(body, timeline.text)


def _verdict(body: Mapping[str, Any], text: str) -> str:
    # Compare an answer with the expected text; return "ok" or a description of the error.
    #
    # Mock engines generate deterministic text.
    wanted = expected_text(body, body["max_tokens"])
    return "ok" if text == wanted else f"answered {text[-60:]!r} in place of {wanted[-60:]!r}"
