"""Compares several gateways whose views are stale with one gateway that sees everything at once.

    python -m bench.stale_views [--groups 512] [--gateways 3] [--policy prefix_aware] [--seeds 1,2]

Requests arrive at random gateways. A gateway knows its own reservations and prompts at once. It
receives those of the other gateways after `--flush` plus `--transit` seconds. It reads the metrics
of an engine every `--scrape` seconds; they are then `--scrape-age` seconds old. The single gateway
receives all requests, and metrics that are current every second.

The engines are groups of Llama 3.1 70B FP8. A prompt is one of a few system prompts, a document of
2,000 to 24,000 tokens, and a question. The popularity of documents follows Zipf's law. Both runs of
a seed have the same arrivals. The first `--warm` seconds fill the caches at a rising rate, and do
not count.

Goodput is the number of requests per second that get their first token within 3 s and each further
token within 50 ms on average.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, count
from math import log
from pathlib import Path
from random import Random
from statistics import fmean

import msgspec

from bench.gateway_views import SeveralGateways, ViewDelays
from planner.replay import FleetSpec, GroupKind, ReplayOptions, traffic
from planner.replay.results import ReplayFigures, figures
from planner.traces.recorded_request import TraceRequest
from policies import policy_registry
from policies.routing_types import Slo

KIND = GroupKind("llama-3.1-70b-fp8", "h100", 4, kv_tokens=600_000)
BLOCK_TOKENS = 512
SLO = Slo("tight", 3.0, 0.05)

DOCUMENTS_PER_GROUP = 16
ZIPF = 0.8
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 8, 2
SHORTEST, LONGEST = 2_000, 24_000
QUESTION = 500, 6_000
ANSWER_TOKENS, ANSWER_SIGMA, LONGEST_ANSWER = 250.0, 0.7, 1_500

PERFECT = ViewDelays(scrape_s=1.0)


class Setting(msgspec.Struct, frozen=True):
    """One comparison: a fleet, its traffic and its policy.

    rate    requests per second and group
    warm_s  seconds in which the caches are filled; they do not count
    span_s  seconds after that, which count
    """

    groups: int = 512
    policy: str = "prefix_aware"
    rate: float = 1.0
    warm_s: float = 40.0
    span_s: float = 80.0


def requests(setting: Setting, seed: int) -> list[TraceRequest]:
    """Return the arrivals of a setting: a Poisson process, whose rate rises at first."""
    rng, names = Random(f"stale views {seed}"), count()
    systems = [tuple(next(names) for _ in range(SYSTEM_BLOCKS)) for _ in range(SYSTEM_PROMPTS)]
    documents = []
    for _ in range(DOCUMENTS_PER_GROUP * setting.groups):
        tokens = SHORTEST * (LONGEST / SHORTEST) ** rng.random()
        own = tuple(next(names) for _ in range(int(tokens) // BLOCK_TOKENS))
        documents.append((*rng.choice(systems), *own))
    rng.shuffle(documents)
    weights = list(accumulate(1 / rank**ZIPF for rank in range(1, len(documents) + 1)))
    full_rate, now_s = setting.rate * setting.groups, 0.0
    made: list[TraceRequest] = []
    while True:
        rising = min(1.0, 0.25 + now_s / setting.warm_s) if setting.warm_s else 1.0
        now_s += rng.expovariate(full_rate * rising)
        if now_s >= setting.warm_s + setting.span_s:
            return made
        document = rng.choices(documents, cum_weights=weights)[0]
        question = rng.randint(*QUESTION)
        output = int(
            min(LONGEST_ANSWER, max(8, rng.lognormvariate(log(ANSWER_TOKENS), ANSWER_SIGMA)))
        )
        blocks = (*document, *(next(names) for _ in range(-(-question // BLOCK_TOKENS))))
        made.append(TraceRequest(now_s, len(document) * BLOCK_TOKENS + question, output, blocks))


def run(
    setting: Setting, arrivals: Sequence[TraceRequest], seed: int, gateways: int, delays: ViewDelays
) -> ReplayFigures:
    """Replay the arrivals through so many `gateways`; return the figures of counted requests."""
    spec = FleetSpec("stale views", (msgspec.structs.replace(KIND, count=setting.groups),))
    options = ReplayOptions(seed=seed, learns_lengths=True, standard=SLO, always_predicts=False)
    create = partial(policy_registry.build, setting.policy, {})
    fleet = SeveralGateways(spec, traffic(arrivals), create, options, gateways, delays)
    return figures(fleet.run(), setting.warm_s, setting.warm_s + setting.span_s)


def describe(name: str, result: ReplayFigures) -> str:
    ttft, tpot = result.ttft, result.tpot
    assert ttft is not None
    assert tpot is not None
    return (
        f"  {name:22} {result.goodput:8.2f} good/s  attained {result.attainment:.4f}  "
        f"hits {result.hit_ratio:.3f}  TTFT p50 {ttft.p50:.3f} p99 {ttft.p99:.3f} s  "
        f"TPOT p99 {tpot.p99 * 1e3:.1f} ms  busiest {result.imbalance:.2f}  "
        f"{result.offered} requests, {result.wall_s:.0f} s"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=512, help="number of engines")
    parser.add_argument("--gateways", type=int, default=3, help="number of gateways")
    parser.add_argument("--policy", default="prefix_aware", help="routing policy of all gateways")
    parser.add_argument("--seeds", default="1,2,3", help="random seeds, separated by commas")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="requests per second for each engine"
    )
    parser.add_argument(
        "--warm", type=float, default=40.0, help="seconds at the beginning that do not count"
    )
    parser.add_argument("--span", type=float, default=80.0, help="seconds that count")
    for name, default, text in (
        ("flush", 0.075, "for which a gateway collects its news; the setting `shared.flush`"),
        ("transit", 0.025, "that a message takes to the other gateways"),
        ("scrape", 3.0, "between two scrapes of an engine"),
        ("scrape-age", 2.0, "that the metrics are old when they reach a gateway"),
    ):
        help_text = f"seconds {text} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=float, default=default, help=help_text)
    parser.add_argument(
        "--only-one", action="store_true", help="run only the one gateway with the perfect view"
    )
    parser.add_argument("--out", type=Path, help="file to which lines of JSON are appended")
    return parser.parse_args()


def main() -> None:
    args = _options()
    setting = Setting(args.groups, args.policy, args.rate, args.warm, args.span)
    delays = ViewDelays(args.flush, args.transit, args.scrape, args.scrape_age)
    ratios = []
    for seed in map(int, args.seeds.split(",")):
        arrivals = requests(setting, seed)
        print(f"{setting.policy}, {setting.groups} groups, {setting.rate:g}/s each, seed {seed}:")
        one = run(setting, arrivals, seed, 1, PERFECT)
        print(describe("one gateway", one), flush=True)
        if args.only_one:
            continue
        several = run(setting, arrivals, seed, args.gateways, delays)
        print(describe(f"{args.gateways} gateways", several), flush=True)
        ratios.append(several.goodput / one.goodput)
        print(f"  goodput {ratios[-1]:.4f} of one gateway's", flush=True)
        if args.out is not None:
            row = {
                "setting": setting,
                "seed": seed,
                "delays": delays,
                "one": one,
                "several": several,
            }
            with args.out.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
    if ratios:
        print(f"mean {fmean(ratios):.4f}, least {min(ratios):.4f} of {len(ratios)} seeds")


if __name__ == "__main__":
    main()
