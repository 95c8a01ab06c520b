"""Tests that split requests on two real engines return the tokens and logprobs of unsplit
requests.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.real.engine_requests import Answer, ask, body, differences, prompt
from tests.real.engines import Engine, transfers, troubles
from tests.real.gateway_process import config, gateway

REQUESTS, AT_ONCE = 100, 4


async def _all(url: str, **members: object) -> list[Answer]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> Answer:
        async with gate:
            return await ask(url, body(prompt(150 + 7 * i, seed=i), stream=bool(i % 2), **members))

    return list(await asyncio.gather(*map(one, range(REQUESTS))))


async def test_a_hundred_split_answers_equal_the_aggregated_ones_and_no_lease_expires(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = engines
    # With this cache salt, the aggregated requests use no cached prompt, and later requests do not
    # use theirs.
    aggregated = await _all(d.url, cache_salt="aggregated")
    moved, trouble = await transfers(engines), await troubles(engines)
    with gateway(tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")})) as front:
        split = await _all(front.url)
    for whole, halved in zip(aggregated, split, strict=True):
        assert (halved.status, halved.error) == (200, "")
        assert differences(halved, whole) == []
        assert (halved.finish_reason, halved.prompt_tokens) == (
            whole.finish_reason,
            whole.prompt_tokens,
        )
    assert await transfers(engines) - moved == REQUESTS
    assert await troubles(engines) == trouble
    for engine in engines:
        await engine.idle_within(10.0)
    lines = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    assert len([line for line in lines if line["status"] == 200]) == REQUESTS


async def test_answers_depend_on_the_kv_cache_enough_to_tell_when_it_is_wrong(
    engines: tuple[Engine, Engine],
) -> None:
    # Two prompts differ only in one early word. With equal KV, their answers would be equal.
    rest = prompt(300, seed=1)
    one, other = [await ask(engines[0].url, body(f"{word} {rest}")) for word in ("gate", "pipe")]
    assert one.status == other.status == 200
    assert [token for token, _ in one.tokens] != [token for token, _ in other.tokens]


async def test_short_and_unsplittable_requests_are_served_whole(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = engines
    moved = await transfers(engines)
    with gateway(tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")})) as front:
        short = await ask(front.url, body("What is a penstock?"))
        two = await ask(front.url, body(prompt(300, seed=2001), n=2, temperature=0.7))
        one_token = await ask(front.url, body(prompt(300, seed=2002), max_tokens=1))
    assert [short.status, two.status, one_token.status] == [200, 200, 200]
    assert await transfers(engines) == moved
