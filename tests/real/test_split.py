"""A split answer of two real engines equals the aggregated answer in tokens and logprobs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.real.asking import Answer, ask, body, differences, prompt
from tests.real.engines import Engine, count_transfers, failure_counts
from tests.real.fronts import config, gateway

REQUESTS, AT_ONCE = 100, 4


async def _ask_all(url: str, **members: object) -> list[Answer]:
    """Send the same hundred requests, every other one streamed, a few at a time."""
    semaphore = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> Answer:
        async with semaphore:
            return await ask(url, body(prompt(150 + 7 * i, seed=i), stream=bool(i % 2), **members))

    return list(await asyncio.gather(*map(one, range(REQUESTS))))


async def test_a_hundred_split_answers_equal_the_aggregated_ones_and_no_lease_expires(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = engines
    # With a separate cache salt the aggregated answers neither hit cached blocks nor leave any.
    aggregated = await _ask_all(d.url, cache_salt="aggregated")
    transfers_before, failures_before = (
        await count_transfers(engines),
        await failure_counts(engines),
    )
    with gateway(tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")})) as front:
        split = await _ask_all(front.url)
    for whole, split_answer in zip(aggregated, split, strict=True):
        assert (split_answer.status, split_answer.error) == (200, "")
        assert differences(split_answer, whole) == []
        assert (split_answer.finish_reason, split_answer.prompt_tokens) == (
            whole.finish_reason,
            whole.prompt_tokens,
        )
    assert await count_transfers(engines) - transfers_before == REQUESTS
    assert await failure_counts(engines) == failures_before
    for engine in engines:
        await engine.await_idle(10.0)
    lines = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    assert len([line for line in lines if line["status"] == 200]) == REQUESTS


async def test_different_kv_gives_different_answers(
    engines: tuple[Engine, Engine],
) -> None:
    """Two prompts differ in one early word only; with equal KV their answers would be equal."""
    remainder = prompt(300, seed=1)
    one, other = [
        await ask(engines[0].url, body(f"{word} {remainder}")) for word in ("gate", "pipe")
    ]
    assert one.status == other.status == 200
    assert [token for token, _ in one.tokens] != [token for token, _ in other.tokens]


async def test_short_and_unsplittable_requests_are_served_whole(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = engines
    transfers_before = await count_transfers(engines)
    with gateway(tmp_path, config({"P": (p.url, "prefill"), "D": (d.url, "decode")})) as front:
        short = await ask(front.url, body("What is a penstock?"))
        two = await ask(front.url, body(prompt(300, seed=2001), n=2, temperature=0.7))
        one_token = await ask(front.url, body(prompt(300, seed=2002), max_tokens=1))
    assert [short.status, two.status, one_token.status] == [200, 200, 200]
    assert await count_transfers(engines) == transfers_before
