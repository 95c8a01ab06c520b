"""Compares a fleet that fetches stored and cached prefixes with one that computes them again.

    python -m bench.shared_prefixes [--fleets without,store,12.5,50,bound] [--seeds 3,4]
        [--shared 0,1] [--out FILE]

Eight engines of Llama 3.1 70B FP8 serve prompts that begin with a document of 8,000 to 32,000
tokens. The seed of a workload draws the number of documents: from as many as the KV cache of one
engine can hold to as many as all caches and the stores in host memory can. The draw is stratified:
six consecutive seeds have one number in each sixth of this range, on a logarithmic scale. The seed
also draws the exponent of Zipf's law, by which documents are chosen (0.7 to 1.2), and the median
length of the answers (60 to 240 tokens).

The first requests fill caches and stores, at a third of the rate, and are not counted: one for each
document, in random order, and COLD more by Zipf's law. With `--shared 0` each prompt is a document
of its own.

without   an engine computes what it does not have cached
store     each engine's host stores KV in memory and on disk, and the engine fetches it from there
12.5, 50  also, engines pull KV from each other over links of that many GB/s, as the price says
bound     all engines have cached at once what any of them has computed. Fetching KV cannot save
          more prefill. It can still serve more requests: engines whose requests share documents
          need less memory for them

Capacity is the rate at which 90% of the requests get their first token within 3 s and each further
token within 50 ms, as a mean over random seeds. Each capacity is appended to the file as a line of
JSON. Those already in the file are not measured again.
"""

from __future__ import annotations

import argparse
import json
from itertools import count
from math import log
from pathlib import Path
from random import Random
from statistics import geometric_mean, mean
from typing import NamedTuple

from msgspec.structs import replace

from bench.zoo.measure import STEP, find_capacity
from planner.replay import FleetSpec, GroupKind, ReplayOptions, ReplayRun, replay, traffic
from planner.traces.recorded_request import PRIVATE, TraceRequest
from policies import policy_registry
from policies.routing_types import Slo

ROOT = Path(__file__).parents[1]
KIND = GroupKind("llama-3.1-70b-fp8", "h100", 4, count=8, kv_tokens=600_000)
COLD, COUNTED, BLOCK_TOKENS = 200, 600, 512
STORE = {"store_gb": 512.0, "store_gb_s": 50.0, "store_disk_gb": 4000.0, "store_disk_gb_s": 10.0}
"""The assumed store of an engine: half of its part of a host with 2 TB of memory for eight GPUs,
one of four PCIe 5 links, and two NVMe disks.
"""

FEWEST, MOST, STRATA = 35, 1000, 6
"""Documents of 17,300 tokens (the mean) in one cache, and in all caches and stores in memory."""
WARM_UP = 1 / 3
"""Rate of the first requests, which fill the caches, as a share of the rate after them."""

SHORTEST, LONGEST = 8_000, 32_000
SLO = Slo("tight", 3.0, 0.05)
TARGET = 0.9
UNIT_RATE_S = 8.0
"""Requests per second at load 1; loads are steps of the zoo's grid."""

FIRST_SHARED_S, FIRST_OWN_S, WIDTH = 64.0, 5.0, 3
"""The rates with which the search for a seed's first capacity begins, with FEWEST documents and
with none that is shared; and the number of steps within which capacities are interpolated.
"""

BASE = "without"


class Requests(NamedTuple):
    """Arrivals in order, and how many of the first ones only fill caches and stores."""

    arrivals: list[TraceRequest]
    cold: int


def requests(seed: int, rate_s: float, are_shared: bool) -> Requests:
    """Return arrivals of a Poisson process whose prompts are a document and a question of 100 to
    1,000 tokens.
    """
    rng, names, now_s = Random(seed), count(PRIVATE), 0.0
    documents = [_document(rng, names) for _ in range(_document_count(seed, rng))]
    exponent = rng.uniform(0.7, 1.2)
    weights = [1 / rank**exponent for rank in range(1, len(documents) + 1)]
    answer = log(_drawn(rng, 60, 240))
    chosen = rng.sample(documents, len(documents)) if are_shared else []
    cold = len(chosen) + COLD
    chosen += rng.choices(documents, weights, k=COLD + COUNTED)
    made: list[TraceRequest] = []
    for index, document in enumerate(chosen):
        now_s += rng.expovariate(1.0 if index >= cold else WARM_UP)
        own = document if are_shared else tuple(next(names) for _ in document)
        question = rng.randint(100, 1000)
        output = int(min(800, max(8, rng.lognormvariate(answer, 0.7))))
        blocks = (*own, *(next(names) for _ in range(-(-question // BLOCK_TOKENS))))
        prompt = len(own) * BLOCK_TOKENS + question
        made.append(TraceRequest(now_s / rate_s, prompt, output, blocks))
    return Requests(made, cold)


def _document_count(seed: int, rng: Random) -> int:
    return int(FEWEST * (MOST / FEWEST) ** ((seed % STRATA + rng.random()) / STRATA))


def _document(rng: Random, names: count[int]) -> tuple[int, ...]:
    tokens = int(_drawn(rng, SHORTEST, LONGEST))
    return tuple(next(names) for _ in range(tokens // BLOCK_TOKENS))


def _drawn(rng: Random, least: float, most: float) -> float:
    # Return a number between two others whose logarithm is uniformly distributed.
    return least * (most / least) ** rng.random()


def fleet(name: str) -> FleetSpec:
    """Return a fleet by its name, as the first lines of this module explain it."""
    if name in ("without", "bound"):
        return FleetSpec(name, (KIND,), ideal_cache=name == "bound")
    if name == "store":
        return FleetSpec(name, (replace(KIND, **STORE),))
    return FleetSpec(name, (replace(KIND, link_gb_s=float(name), **STORE),), pulls=True)


def measure(name: str, are_shared: bool, seed: int, first_s: float) -> dict[str, float]:
    """Find the highest request rate that a fleet can serve in time, by simulations.

    name        name of the fleet
    are_shared  whether prompts share documents
    seed        random seed of the workload
    first_s     the request rate with which the search begins

    Returns the rate, the shares of pulled prompts and of cached tokens at it, and the documents.
    """
    runs: dict[int, ReplayRun] = {}
    documents = _document_count(seed, Random(seed))
    cold = requests(seed, UNIT_RATE_S, are_shared).cold

    def at(index: int) -> float:
        options = ReplayOptions(seed=seed, learns_lengths=True, standard=SLO)
        arrivals = traffic(requests(seed, UNIT_RATE_S * STEP**index, are_shared).arrivals)
        policy = policy_registry.build("priced", {})
        runs[index] = replay(fleet(name), arrivals, policy, options=options)
        return mean(record.is_good for record in runs[index].records[cold:])

    load = find_capacity(at, TARGET, _step(first_s), WIDTH)
    nearest = runs[min(runs, key=lambda index: abs(STEP**index - load))]
    records = nearest.records[cold:]
    cached = sum(r.cached_tokens or 0 for r in records) / sum(r.prompt_tokens for r in records)
    pulled = mean(bool(record.pulled_from) for record in records)
    return {
        "capacity": UNIT_RATE_S * load,
        "pulled": pulled,
        "cached": cached,
        "documents": documents,
    }


def _first_rate(seed: int, are_shared: bool) -> float:
    documents = _document_count(seed, Random(seed))
    return FIRST_SHARED_S * (FEWEST / documents) ** 0.5 if are_shared else FIRST_OWN_S


def _step(rate_s: float) -> int:
    return round(log(rate_s / UNIT_RATE_S) / log(STEP))


def table(results: dict[str, dict[str, float]]) -> str:
    lines = ["| shared | fleet | pulled | cached | capacity / without, geometric mean |\n"]
    lines.append("|--:|--:|--:|--:|--:|\n")
    for shared in ("1", "0"):
        cells = {
            tuple(key.split()[1:]): cell
            for key, cell in results.items()
            if key.startswith(f"{shared} ")
        }
        without = {seed: cell["capacity"] for (name, seed), cell in cells.items() if name == BASE}
        for name in dict.fromkeys(name for name, _ in cells if name != BASE):
            seeds = [seed for fleet_name, seed in cells if fleet_name == name and seed in without]
            if not seeds:
                continue
            ratios = [cells[name, seed]["capacity"] / without[seed] for seed in seeds]
            pulled, cached = (
                mean(cells[name, seed][field] for seed in seeds) for field in ("pulled", "cached")
            )
            ratio = geometric_mean(ratios)
            lines.append(f"| {shared} | {name} | {pulled:.0%} | {cached:.0%} | {ratio:.3f} |\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fleets",
        default="without,store,12.5,50,bound",
        help="fleets to measure, comma-separated: without, store, bound, or the speed of links in "
        "GB/s",
    )
    parser.add_argument("--seeds", default="3,4", help="random seeds, comma-separated")
    parser.add_argument("--shared", default="1,0", help="1: documents are shared; 0: each its own")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "shared_prefixes.jsonl")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, float]] = {}
    if args.out.exists():
        results = {k: v for line in args.out.open() for k, v in json.loads(line).items()}
    for shared in args.shared.split(","):
        for seed in args.seeds.split(","):
            known = 0.0  # the fleets of a seed differ less than seeds do
            for name in args.fleets.split(","):
                key = f"{shared} {name} {seed}"
                if key not in results:
                    first_s = known or _first_rate(int(seed), shared == "1")
                    results[key] = measure(name, shared == "1", int(seed), first_s)
                    with args.out.open("a") as file:
                        file.write(json.dumps({key: results[key]}) + "\n")
                    print(key, results[key], flush=True)
                known = results[key]["capacity"]
    print(table(results))


if __name__ == "__main__":
    main()
