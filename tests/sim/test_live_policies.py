"""Tests that routing policies have the results over real HTTP that the simulator predicts.

`make policies` sends the full recorded trace.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from policies import policy_registry
from tests.chaos.gateway_fleet import GatewayFleet, gateway_fleet
from tests.virtual_time import VIRTUAL_TIME


async def ask_all(fleet: GatewayFleet, sizes: list[tuple[int, int]], users: int) -> Counter[str]:
    # Send requests of (prompt words, output tokens) from `users` users.
    #
    # Returns the number of requests per endpoint.
    answered: Counter[str] = Counter()
    left = iter(enumerate(sizes))

    async def user() -> None:
        for number, (words, tokens) in left:
            answer = await fleet.ask(
                stream=False, tokens=tokens, prompt=f"{number} " + "word " * words
            )
            assert answer.fate == "ok"
            answered[answer.headers["x-penstock-endpoint"]] += 1

    await asyncio.gather(*(user() for _ in range(users)))
    return answered


async def test_round_robin_is_exact_over_a_thousand_requests() -> None:
    # On a busy machine, an engine may take milliseconds longer than the others: that is not slow.
    async with gateway_fleet(4, health={"slow_factor": 0}) as fleet:
        answered = await ask_all(fleet, [(1, 1)] * 1000, users=40)
        assert sum(answered.values()) == 1000
        assert max(answered.values()) - min(answered.values()) <= 1
        await fleet.at_rest()


@VIRTUAL_TIME
async def test_least_loaded_balances_requests_whose_sizes_vary_a_hundredfold() -> None:
    rng = Random(3)
    sizes = [(int(10 ** rng.uniform(1, 3)), int(10 ** rng.uniform(0, 2))) for _ in range(900)]
    async with gateway_fleet(4, speed=15.0, pool={"policy": "least_loaded"}) as fleet:
        await ask_all(fleet, sizes, users=32)
        totals = [member.group.scheduler.totals for member in fleet.groups]
        work = [total.prompt_tokens + total.output_tokens for total in totals]
        print("tokens served per group", work)
        assert max(work) / min(work) <= 1.3
        await fleet.at_rest()


@pytest.mark.parametrize(
    "policy",
    [name for name in policy_registry.names() if name not in ("round_robin", "least_loaded")],
)
async def test_every_other_policy_serves_over_http_and_cache_aware_ones_keep_conversations_in_place(
    policy: str,
) -> None:
    # Eight conversations of six growing turns.
    #
    # Policies that read prefixes keep most conversations at one endpoint.
    conversations = [
        "".join(Random(f"{talk}").choices("abcdefghij klmnop", k=6000)) for talk in range(8)
    ]
    moved = 0
    async with gateway_fleet(3, speed=50.0, pool={"policy": policy}) as fleet:
        for talk in conversations:
            places = [
                (await fleet.ask(stream=False, tokens=2, prompt=talk + "more " * turn))
                for turn in range(6)
            ]
            assert all(answer.fate == "ok" for answer in places)
            names = [answer.headers["x-penstock-endpoint"] for answer in places]
            moved += sum(now != then for now, then in pairwise(names))
        await fleet.at_rest()
    assert moved <= 12 if policy_registry.build(policy, {}).reads_prefix else moved > 12
