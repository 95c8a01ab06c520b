"""Creates an access log of simulated traffic that one routing policy serves much worse than others.

Clients ask repeatedly about documents of 6,000 tokens. The documents' KV cache fits into two
engines together, but not into one. A policy that ignores shared prompt prefixes makes the engines
compute the documents again and again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec

from bench.zoo.auto import LoggedFleet
from planner.plan.config_to_replay import cases
from planner.replay.fleet_spec import GroupKind
from planner.replay.traffic import Traffic
from planner.traces.recorded_request import PRIVATE, TraceRequest
from policies import policy_registry
from policies.admission.wait_queue import WaitQueue

ENDPOINTS = ("e0", "e1")
DOCUMENTS, BLOCKS, BLOCK_TOKENS = 14, 12, 512
SLO = {"default": "standard", "classes": {"standard": {"ttft": 1.0, "tpot": 0.05}}}


def pool(policy: str, endpoints: int = len(ENDPOINTS)) -> dict[str, Any]:
    return {
        "policy": {"name": policy, "parameters": {}},
        "admission": {"name": "none", "parameters": {}},
        "waiting_room": {"size": 256, "timeout": 30.0},
        "endpoints": [
            {"labels": {"gpu": "h100"}, "kv_tokens": 60_000, "max_concurrency": 24}
            for _ in range(endpoints)
        ],
    }


def config(policy: str) -> dict[str, Any]:
    return {
        "pools": {"main": pool(policy)},
        "slo": SLO,
        "models": [{"name": "demo-8b", "pool": "main", "parameters": 8.0}],
    }


def requests(count: int, rate_s: float, seed: int) -> list[TraceRequest]:
    rng, at, listed = Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate_s)
        first = rng.randrange(DOCUMENTS) * BLOCKS
        shared = tuple(range(first, first + BLOCKS))
        blocks = (*shared, PRIVATE + number)
        tokens = len(blocks) * BLOCK_TOKENS - 100
        listed.append(TraceRequest(at, tokens, rng.randrange(40, 160), blocks))
    return listed


def serve(
    policy: str,
    count: int = 600,
    rate_s: float = 13.0,
    seed: int = 0,
    kinds: tuple[GroupKind, ...] = (),
) -> list[dict[str, Any]]:
    # Return the lines that these requests leave in the log; their times begin at 0. `kinds`
    # replaces the engines that the configuration describes.
    case = cases(config(policy))["main"]
    spec = msgspec.structs.replace(case.fleet, kinds=kinds or case.fleet.kinds)
    options = case.options(seed)
    traffic = Traffic(requests(count, rate_s, seed))
    room = WaitQueue[int](case.admission(), case.limits, case.shares)
    fleet = LoggedFleet(spec, traffic, policy_registry.build(policy, {}), room, options)
    fleet.lines = []
    names = {group.name: ENDPOINTS[group.load.slot] for group in fleet.groups}
    fleet.run()
    return [
        msgspec.to_builtins(line) | {"model": "demo-8b", "endpoint": names.get(line.endpoint, "")}
        for line in fleet.lines
    ]


def write(path: Path, lines: list[dict[str, Any]], begin_s: float) -> None:
    # Append the lines to a log, with times that begin at the Unix time `begin_s`.
    with path.open("ab") as file:
        for line in lines:
            file.write(msgspec.json.encode(line | {"time": begin_s + line["time"]}) + b"\n")
