"""Compares three ways of serving on links of different speeds: whole, split, or chosen by cost.

    python -m bench.split_by_link_speed [--links 0.125,0.5,12.5] [--seeds 3,4] [--out FILE]

A split request computes its prompt (prefill) on one engine and its answer (decode) on another one;
the link between them carries the KV cache. Four engines of Llama 3.1 70B FP8 serve prompts with a
median of 4,000 tokens.

Capacity is the rate at which 90% of the requests get their first token within 3 s and each further
token within 50 ms, as a mean over random seeds. Each capacity is appended to the file as a line of
JSON. Those already in the file are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean

from msgspec.structs import replace

from bench.zoo.measure import STEP, find_capacity
from planner.replay import FleetSpec, GroupKind, ReplayOptions, ReplayRun, replay, traffic
from planner.traces.recorded_request import PRIVATE, TraceRequest
from policies import policy_registry
from policies.pricing.split_decision import SplitRule
from policies.routing_types import Role, Slo

ROOT = Path(__file__).parents[1]
KIND = GroupKind("llama-3.1-70b-fp8", "h100", 4, count=4)
REQUESTS, COLD, BLOCK_TOKENS = 400, 100, 512
SLO = Slo("tight", 3.0, 0.05)
TARGET = 0.9
UNIT_RATE_S = 8.0
"""Requests per second at load 1; loads are steps of the zoo's grid."""

WHOLE_RULES = ("priced", "prefix_aware", "lmetric")
SPLIT_RULES = ("prefix_aware",)


def requests(seed: int, rate_s: float) -> list[TraceRequest]:
    rng, names, now_s, made = Random(seed), count(PRIVATE), 0.0, []
    for _ in range(REQUESTS):
        now_s += rng.expovariate(1.0)
        prompt = int(min(32_000, rng.lognormvariate(8.3, 0.8)))
        output = int(min(800, max(8, rng.lognormvariate(5.2, 0.7))))
        blocks = tuple(next(names) for _ in range(-(-prompt // BLOCK_TOKENS)))
        made.append(TraceRequest(now_s / rate_s, prompt, output, blocks))
    return made


def whole() -> FleetSpec:
    return FleetSpec("whole", (KIND,))


def pairs(link_gb_s: float) -> FleetSpec:
    """Build a fleet in which any engine may prefill a request and any other one may decode it."""
    kind = replace(KIND, link_gb_s=link_gb_s)
    return FleetSpec("pairs", (kind,), pairs=True, split=SplitRule(1))


def pools(link_gb_s: float, prefills: int) -> FleetSpec:
    """Build a fleet of `prefills` engines that only prefill, and others that only decode."""
    kind = replace(KIND, link_gb_s=link_gb_s)
    kinds = (
        replace(kind, count=prefills, role=Role.PREFILL),
        replace(kind, count=KIND.count - prefills, role=Role.DECODE),
    )
    return FleetSpec("pools", kinds, split=SplitRule(1))


def run(fleet: FleetSpec, policy: str, seed: int, step: int) -> ReplayRun:
    options = ReplayOptions(seed=seed, learns_lengths=True, standard=SLO)
    arrivals = traffic(requests(seed, UNIT_RATE_S * STEP**step))
    return replay(fleet, arrivals, policy_registry.build(policy, {}), options=options)


def measure(fleet: FleetSpec, policy: str, seeds: Sequence[int]) -> dict[str, float]:
    """Find the highest request rate that a fleet can serve in time, as a mean over random seeds.

    fleet   the simulated engines
    policy  the routing policy
    seeds   random seeds of the workload

    Returns the rate, and the share of requests that are split at it.
    """
    runs: dict[int, list[ReplayRun]] = {}

    def at(step: int) -> float:
        runs[step] = [run(fleet, policy, seed, step) for seed in seeds]
        return mean(record.is_good for each in runs[step] for record in each.records[COLD:])

    load = find_capacity(at, TARGET, 0)
    nearest = min(runs, key=lambda step: abs(STEP**step - load))
    split = mean(
        bool(record.prefilled_by) for each in runs[nearest] for record in each.records[COLD:]
    )
    return {"capacity": UNIT_RATE_S * load, "split": split}


def cells(links: Sequence[float]) -> Iterator[tuple[str, str, Callable[[], FleetSpec]]]:
    """Yield (name, policy, function that builds the fleet) per link speed and way of serving."""
    for link in links:
        yield f"pairs {link:g}", "priced", partial(pairs, link)
    for policy in WHOLE_RULES:
        yield "whole", policy, whole
    for link in links:
        for prefills in range(1, KIND.count):
            for policy in SPLIT_RULES:
                yield f"pools {link:g} {prefills}", policy, partial(pools, link, prefills)


def table(results: dict[str, dict[str, float]], links: Sequence[float]) -> str:
    def best(prefix: str) -> tuple[float, str]:
        found = [
            (cell["capacity"], name) for name, cell in results.items() if name.startswith(prefix)
        ]
        return max(found, default=(0.0, "none"))

    lines = [
        "| link, GB/s | priced | split | best whole | best pools | priced / best |\n",
        "|--:|--:|--:|--:|--:|--:|\n",
    ]
    for link in links:
        own = results.get(f"pairs {link:g} priced")
        if own is not None:
            (one, one_name), (two, two_name) = best("whole"), best(f"pools {link:g} ")
            lines.append(
                f"| {link:g} | {own['capacity']:.2f} | {own['split']:.0%} "
                f"| {one:.2f} ({one_name.split()[-1]}) "
                f"| {two:.2f} ({' '.join(two_name.split()[-2:])}) "
                f"| {own['capacity'] / max(one, two):.2f} |\n"
            )
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default="0.125,0.5,1.25,3.125,12.5,50", help="speeds in GB/s")
    parser.add_argument("--seeds", default="3,4", help="random seeds of arrivals, comma-separated")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "links.jsonl")
    args = parser.parse_args()
    links = [float(link) for link in args.links.split(",")]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, float]] = {}
    if args.out.exists():
        results = {k: v for line in args.out.open() for k, v in json.loads(line).items()}
    for name, policy, build in cells(links):
        key = f"{name} {policy}"
        if key not in results:
            results[key] = measure(build(), policy, seeds)
            with args.out.open("a") as file:
                file.write(json.dumps({key: results[key]}) + "\n")
    print(table(results, links))


if __name__ == "__main__":
    main()
