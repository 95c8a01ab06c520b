"""Tests that the cached prompts of an engine that is drained move to only one other engine.

Otherwise several engines would compute them again.
"""

from __future__ import annotations

from random import Random

import pytest

from planner.replay import (
    FleetSpec,
    GroupFault,
    GroupFaultKind,
    GroupKind,
    ReplayOptions,
    ReplayRun,
    replay,
    traffic,
)
from planner.replay.block_chain import keys_of
from planner.traces import TraceRequest
from policies import policy_registry

FOUR = FleetSpec("four", (GroupKind("llama-3.1-70b-fp8", "h200", 4, count=4),))
DRAINED_S, BLOCK = 150.0, FOUR.block_tokens


def families(roots: int, root_blocks: int, talks: int, turns: int) -> list[TraceRequest]:
    # Return conversations with `roots` different system prompts, each shared by `talks` of them.
    #
    # A conversation has `turns` requests, about 17 s apart.
    rng, requests_, fresh = Random(1), [], 10**6
    for root in range(roots):
        for _ in range(talks):
            now, blocks = (
                rng.uniform(0.0, 2 * DRAINED_S),
                tuple(range(root * 1000, root * 1000 + root_blocks)),
            )
            for _ in range(turns):
                fresh += 3
                blocks = (*blocks, *range(fresh - 3, fresh))
                requests_.append(TraceRequest(now, len(blocks) * BLOCK + 100, 150, blocks))
                now += 5.0 + rng.expovariate(1 / 12)
    return sorted(requests_, key=lambda request: request.arrival_s)


def hit_share(requests: list[TraceRequest], run: ReplayRun) -> float:
    # Return the share of reusable prompt tokens after the drain that were cache hits.
    #
    # Reusable tokens are those that the other engines have cached, or would have if everything that
    # the drained engine had were computed again once.
    cached: set[int] = set()
    hits = could_be = 0
    for request, record in zip(requests, run.records, strict=True):
        keys = keys_of(request, BLOCK)
        if request.arrival_s >= DRAINED_S:
            whole = keys[: (request.input_tokens - 1) // BLOCK]
            could_be += BLOCK * next(
                (index for index, key in enumerate(whole) if key not in cached), len(whole)
            )
            hits += record.cached_tokens
            cached.update(keys)
        elif record.group != "tp0":
            cached.update(keys)
    return hits / could_be


@pytest.mark.parametrize(
    ("policy", "least"), [("prefix_aware", 0.99), ("priced", 0.99), ("least_loaded", 0.0)]
)
@pytest.mark.parametrize(
    "shape", [(24, 16, 10, 4), (60, 4, 8, 5)], ids=["long roots", "short roots"]
)
def test_the_first_pick_after_a_drain_inherits_the_prefix(
    policy: str, least: float, shape: tuple[int, int, int, int]
) -> None:
    # The first request with a prefix updates the index, so that the next one follows it.
    #
    # Otherwise another engine would compute the prefix again.
    requests = families(*shape)
    faults = (GroupFault(DRAINED_S, 0, GroupFaultKind.DRAIN),)
    run = replay(
        FOUR,
        traffic(requests),
        policy_registry.build(policy, {}),
        options=ReplayOptions(faults=faults),
    )
    share = hit_share(requests, run)
    print(f"{policy}, {shape}: {share:.4f}")
    assert share >= least
    assert least or share < 0.9
