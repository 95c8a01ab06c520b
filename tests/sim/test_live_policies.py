"""Policies over real HTTP: what the virtual clock shows must hold with sockets too. The trace is `make policies`."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from tests.chaos.house import House, house


async def ask_all(home: House, sizes: list[tuple[int, int]], users: int) -> Counter[str]:
    """(prompt words, output tokens) of every request, by so many users; requests per endpoint."""
    answered: Counter[str] = Counter()
    left = iter(enumerate(sizes))

    async def user() -> None:
        for number, (words, tokens) in left:
            answer = await home.ask(stream=False, tokens=tokens, prompt=f"{number} " + "word " * words)
            assert answer.fate == "ok"
            answered[answer.headers["x-penstock-endpoint"]] += 1

    await asyncio.gather(*(user() for _ in range(users)))
    return answered


async def test_round_robin_is_exact_over_a_thousand_requests() -> None:
    async with house(4) as home:
        answered = await ask_all(home, [(1, 1)] * 1000, users=40)
        assert sum(answered.values()) == 1000
        assert max(answered.values()) - min(answered.values()) <= 1
        await home.at_rest()


async def test_least_loaded_keeps_groups_even_with_sizes_that_vary_hundredfold() -> None:
    rng = Random(3)
    sizes = [(int(10 ** rng.uniform(1, 3)), int(10 ** rng.uniform(0, 2))) for _ in range(600)]
    async with house(4, speed=5.0, pool={"policy": "least_loaded"}) as home:
        await ask_all(home, sizes, users=32)
        totals = [member.group.scheduler.totals for member in home.groups]
        work = [total.prompt_tokens + total.output_tokens for total in totals]
        print("tokens served per group", work)
        assert max(work) / min(work) <= 1.3
        await home.at_rest()
