"""Compares a fleet that can pull cached prefixes over links with one that computes them again.

    python -m bench.shared_prefixes [--links 12.5,50] [--seeds 3,4] [--shared 0,1] [--out FILE]

Eight engines of Llama 3.1 70B FP8 serve prompts that begin with one of 48 to 192 documents of 8,000
to 32,000 tokens. The popularity of documents follows Zipf's law, with an exponent of 0.7 to 1.2.
The seed of a workload draws these numbers, and the median length of its answers: 60 to 240 tokens.
The first third of the requests come at a third of the rate, and only fill the caches.

Where requests may be split, an engine that has the document cached can compute the rest of a prompt
and send the KV cache to another engine, which also keeps it. The policy `priced` compares that with
queueing at the first engine and with computing the prompt again. With `--shared 0` each prompt is a
document of its own.

Capacity is the rate at which 90% of the requests get their first token within 3 s and each further
token within 50 ms, as a mean over random seeds. Each capacity is appended to the file as a line of
JSON. Those already in the file are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import count
from math import log
from pathlib import Path
from random import Random
from statistics import geometric_mean, mean

from msgspec.structs import replace

from bench.zoo.measure import STEP, find_capacity
from planner.replay import FleetSpec, GroupKind, ReplayOptions, ReplayRun, replay, traffic
from planner.traces.recorded_request import PRIVATE, TraceRequest
from policies import policy_registry
from policies.pricing.split_decision import SplitRule
from policies.routing_types import Slo

ROOT = Path(__file__).parents[1]
KIND = GroupKind("llama-3.1-70b-fp8", "h100", 4, count=8, kv_tokens=600_000)
REQUESTS, COLD, BLOCK_TOKENS = 1200, 400, 512
WARM_UP = 1 / 3
"""Rate of the first COLD requests, which fill the caches, as a share of the rate after them."""

SHORTEST, LONGEST = 8_000, 32_000
SLO = Slo("tight", 3.0, 0.05)
TARGET = 0.9
UNIT_RATE_S = 8.0
"""Requests per second at load 1; loads are steps of the zoo's grid."""


def requests(seed: int, rate_s: float, are_shared: bool) -> list[TraceRequest]:
    """Return arrivals of a Poisson process whose prompts are a document and a question of 100 to
    1,000 tokens.
    """
    rng, names, now_s, made = Random(seed), count(PRIVATE), 0.0, []
    documents = [_document(rng, names) for _ in range(int(_drawn(rng, 48, 192)))]
    exponent = rng.uniform(0.7, 1.2)
    weights = [1 / rank**exponent for rank in range(1, len(documents) + 1)]
    answer = log(_drawn(rng, 60, 240))
    for index in range(REQUESTS):
        now_s += rng.expovariate(1.0 if index >= COLD else WARM_UP)
        document = rng.choices(documents, weights)[0]
        if not are_shared:
            document = tuple(next(names) for _ in document)
        question = rng.randint(100, 1000)
        output = int(min(800, max(8, rng.lognormvariate(answer, 0.7))))
        blocks = (*document, *(next(names) for _ in range(-(-question // BLOCK_TOKENS))))
        prompt = len(document) * BLOCK_TOKENS + question
        made.append(TraceRequest(now_s / rate_s, prompt, output, blocks))
    return made


def _document(rng: Random, names: count[int]) -> tuple[int, ...]:
    tokens = int(_drawn(rng, SHORTEST, LONGEST))
    return tuple(next(names) for _ in range(tokens // BLOCK_TOKENS))


def _drawn(rng: Random, least: float, most: float) -> float:
    # Return a number between two others whose logarithm is uniformly distributed.
    return least * (most / least) ** rng.random()


def fleet(link_gb_s: float) -> FleetSpec:
    """Return the fleet; with a speed of 0, its engines send each other nothing."""
    if not link_gb_s:
        return FleetSpec("whole", (KIND,))
    kind = replace(KIND, link_gb_s=link_gb_s)
    return FleetSpec("pairs", (kind,), pairs=True, split=SplitRule(1))


def run(link_gb_s: float, are_shared: bool, seed: int, step: int) -> ReplayRun:
    options = ReplayOptions(seed=seed, learns_lengths=True, standard=SLO)
    arrivals = traffic(requests(seed, UNIT_RATE_S * STEP**step, are_shared))
    policy = policy_registry.build("priced", {})
    return replay(fleet(link_gb_s), arrivals, policy, options=options)


def measure(link_gb_s: float, are_shared: bool, seed: int) -> dict[str, float]:
    """Find the highest request rate that a fleet can serve in time, by simulations.

    link_gb_s   speed of the links between engines; 0: they send each other nothing
    are_shared  whether prompts share documents
    seed        random seed of the workload

    Returns the rate, and the shares of split requests and of cached tokens at it.
    """
    runs: dict[int, ReplayRun] = {}

    def at(step: int) -> float:
        runs[step] = run(link_gb_s, are_shared, seed, step)
        return mean(record.is_good for record in runs[step].records[COLD:])

    load = find_capacity(at, TARGET, 0)
    nearest = runs[min(runs, key=lambda step: abs(STEP**step - load))]
    records = nearest.records[COLD:]
    cached = sum(r.cached_tokens or 0 for r in records) / sum(r.prompt_tokens for r in records)
    split = mean(bool(record.prefilled_by) for record in records)
    return {"capacity": UNIT_RATE_S * load, "split": split, "cached": cached}


def table(results: dict[str, dict[str, float]], links: Sequence[float]) -> str:
    lines = ["| shared | link, GB/s | split | cached | capacity / without, geometric mean |\n"]
    lines.append("|--:|--:|--:|--:|--:|\n")
    for shared in (1, 0):
        without = {k.split()[-1]: c for k, c in results.items() if k.startswith(f"{shared} 0 ")}
        for link in links:
            name = f"{shared} {link:g} "
            cells = {k.split()[-1]: c for k, c in results.items() if k.startswith(name)}
            if seeds := without.keys() & cells.keys():
                ratio = geometric_mean(
                    cells[seed]["capacity"] / without[seed]["capacity"] for seed in seeds
                )
                split = mean(cells[seed]["split"] for seed in seeds)
                cached = mean(cells[seed]["cached"] for seed in seeds)
                lines.append(
                    f"| {shared} | {link:g} | {split:.0%} | {cached:.0%} | {ratio:.3f} |\n"
                )
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default="12.5,50", help="link speeds in GB/s, comma-separated")
    parser.add_argument("--seeds", default="3,4", help="random seeds, comma-separated")
    parser.add_argument("--shared", default="1,0", help="1: documents are shared; 0: each its own")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "shared_prefixes.jsonl")
    args = parser.parse_args()
    links = [float(link) for link in args.links.split(",")]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, float]] = {}
    if args.out.exists():
        results = {k: v for line in args.out.open() for k, v in json.loads(line).items()}
    for shared in args.shared.split(","):
        for seed in args.seeds.split(","):
            for link in (0.0, *links):
                key = f"{shared} {link:g} {seed}"
                if key not in results:
                    results[key] = measure(link, shared == "1", int(seed))
                    with args.out.open("a") as file:
                        file.write(json.dumps({key: results[key]}) + "\n")
                    print(key, results[key], flush=True)
    print(table(results, links))


if __name__ == "__main__":
    main()
