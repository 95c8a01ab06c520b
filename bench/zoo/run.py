"""`make zoo`: compares our policy `priced` with the routing rules of other routers.

    python -m bench.zoo.run --seed SEED [--count 30] [--minutes 20] [--out FILE]

The workloads are random. The seed of a report is the hash of the last commit that changed the space
of workloads (space.py), so no policy can have been tuned on them.

Each result is a line of JSON in the file. An interrupted run can continue, because results in the
file are not measured again. Each workload is measured with two random seeds of arrivals, the same
for all policies. Rules far behind the best one with the first seed are not measured with the
second one (successive halving).

The capacity at 90% attainment is measured for all policies. Other results are measured only for
`priced` and the best rules. docs/policies.md describes the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from math import log
from pathlib import Path
from time import monotonic

import msgspec

from bench.goodput import code_digest
from bench.zoo.measure import STEP, Attainments, build_case
from bench.zoo.results import Result, best_rules, reference_step
from bench.zoo.space import draw
from bench.zoo.summary import page

ROOT = Path(__file__).parents[2]
OURS = "priced"
RULES = (
    "prefix_aware",
    "llmd_blend",
    "llmd_token",
    "llmd_predictor",
    "llumnix",
    "lmetric",
    "mooncake",
    "dualmap",
    "dynamo_kv",
    "preble",
    "power_of_two",
    "sglang_cache_aware",
)
FINALISTS = 4
"""Number of the best rules on a workload for which the other figures are measured."""

KEPT_SHARE = 0.9
"""Least share of the best rule's capacity with the first seed of arrivals with which a rule is also
measured with further seeds. A rule with less does not become the best one by other arrivals."""

TARGETS = (0.9, 0.95, 0.99)
LOW_LOADS = (0.25, 0.5, 0.8)
"""Shares of the best rule's capacity at which attainment is compared."""

SLOW_S = 60.0
"""CPU seconds of one replay beyond which a workload is dropped."""


class ResultFile:
    def __init__(self, path: Path, code: str, any_code: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._code = path, code
        self.known: dict[tuple[str, int, int, str], Result] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                result = msgspec.json.decode(line, type=Result)
                if any_code or result.code == code:
                    self.known[result.key] = result

    def add(self, result: Result) -> None:
        """Append a result to the results file.

        It replaces an earlier one of the same policy and workload.
        """
        result = msgspec.structs.replace(result, code=self._code)
        self.known[result.key] = result
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")


class Comparison:
    """Measures routing policies on one random workload, with one seed of the arrivals.

    first  the seed of arrivals that was measured first; all policies were measured with it
    """

    def __init__(
        self, seed: str, number: int, arrivals: int, file: ResultFile, first: int = 0
    ) -> None:
        self._place = (seed, number, arrivals)
        self._first = (seed, number, first)
        self._file = file

    def run(self, policies: Sequence[str], quick: bool = False) -> None:
        """Measure the policies whose results on this workload are not in the results file yet.

        Capacities come first. The other figures follow, unless `quick` is true.
        """
        start = 0
        if self._place != self._first:
            policies = [policy for policy in policies if policy == OURS or self._is_near(policy)]
        for policy in policies:
            result = self._measure(policy, start, TARGETS[:1])
            start = round(log(max(result.capacity.get("0.9", 0.0), 1 / 30)) / log(STEP))
            if result.dropped:
                return
        if quick:
            return
        results = self._known_rules(self._place)
        reference = reference_step(results)
        best = best_rules(results, FINALISTS)
        steps = [reference + round(log(share) / log(STEP)) for share in LOW_LOADS]
        for policy in policies:
            if policy == OURS or policy in best:
                self._measure(policy, reference, TARGETS, steps)

    def _known_rules(self, place: tuple[str, int, int]) -> list[Result]:
        known = (self._file.known.get((*place, rule)) for rule in RULES)
        return [result for result in known if result is not None]

    def _is_near(self, policy: str) -> bool:
        # Return whether a rule comes near the best one with the first seed, or was not measured.
        known = self._file.known.get((*self._first, policy))
        if known is None:
            return True
        best = max(result.load("0.9") for result in self._known_rules(self._first))
        return known.load("0.9") >= KEPT_SHARE * best

    def _measure(
        self, policy: str, start: int, targets: Iterable[float], steps: Iterable[int] = ()
    ) -> Result:
        # Return the policy's result; measure those targets and load steps that it lacks.
        known = self._file.known.get((*self._place, policy))
        if known is not None and known.covers(targets, steps):
            return known
        attainments = Attainments(build_case(*self._place), policy)
        if known is not None:
            attainments.by_step.update(known.attainment)
        for step in steps:
            attainments.at(step)
        capacity = {f"{target:g}": attainments.capacity(target, start) for target in targets}
        runs = max(1, len(attainments.by_step) - (len(known.attainment) if known else 0))
        result = Result(
            *self._place,
            policy,
            attainments.by_step,
            capacity,
            attainments.cpu_s + (known.cpu_s if known else 0.0),
            dropped="slow" if attainments.cpu_s / runs > SLOW_S else "",
        )
        self._file.add(result)
        return result


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="development", help="random seed of all workloads")
    parser.add_argument(
        "--arrivals", default="0,1", help="random seeds of the arrival times, separated by commas"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first workload to run")
    parser.add_argument(
        "--count", type=int, default=30, help="number of workloads to run (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure only the capacity at 90 %% attainment"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=1e9,
        help="minutes after which no further workload is started",
    )
    parser.add_argument(
        "--policies",
        default=",".join((*RULES, OURS)),
        help="policies to compare, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--any-code",
        action="store_true",
        help="keep results that were measured with other versions of the code",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "zoo" / "results.jsonl",
        help="file of JSON lines for the results; those already there are kept (default: "
        "build/zoo/results.jsonl)",
    )
    parser.add_argument("--page", type=Path, help="Markdown file to which the tables are written")
    return parser.parse_args()


def main() -> None:
    args = _parse_options()
    file = ResultFile(args.out, code_digest(), args.any_code)
    until = monotonic() + 60 * args.minutes
    numbers = range(args.first, args.first + args.count)
    seeds = [int(arrivals) for arrivals in args.arrivals.split(",")]
    for number in numbers:
        for arrivals in seeds:
            if monotonic() > until:
                break
            comparison = Comparison(args.seed, number, arrivals, file, seeds[0])
            comparison.run(args.policies.split(","), args.quick)
    workloads = {number: draw(args.seed, number) for number in numbers}
    results = [
        result
        for (seed, number, *_), result in file.known.items()
        if seed == args.seed and number in workloads
    ]
    text = page(workloads, results, OURS)
    print(text)
    if args.page:
        args.page.write_text(text)


if __name__ == "__main__":
    main()
