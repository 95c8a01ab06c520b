"""`make planned`: compare a plan's replayed attainment with a live fleet from its emitted files.

    python -m bench.load.planned_fleets [--case NAME]... [--seed 0] [--requests 3000] [--load 1]
                                        [--within 3] [--replays-only]

For each case, `penstock size` plans a fleet and replays it on a generated trace (--from). The same
command emits gateway.yaml and the command of mock groups, and both are started unchanged; a client
sends the trace over HTTP, in real time. The attainment that the client measures is compared with
the replayed one. Routing amplifies small delays, so replays with jittered arrivals show by how much
attainment varies by chance.

Exit status: 1 if a live attainment differs by more than `within` percentage points, or does not lie
between 70 and 95 %. The gateway uses its default ports 8080 and 8081. A case takes two to three
minutes, so it is not part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.load.run import ROOT, _await_models, _free_run
from bench.load.two_clocks import jitter
from gateway.cli.main import config_in_text
from planner.bench import BenchPlan, BenchReport, run
from planner.bench.plan import BenchSlo
from planner.bench.stats import Summary
from planner.bench.workloads import lognormal
from planner.plan import Assumptions, PoolCase, cases
from planner.replay import replay, traffic
from planner.replay.results import ReplayFigures, figures
from planner.text_generator import BLOCK_TOKENS
from planner.traces import TraceRequest, read_mooncake

PENSTOCK = (sys.executable, "-m", "gateway")
GATEWAY = "http://127.0.0.1:8080"
MOST_GROUPS = 64
REPLICAS = 4
LEAST, MOST = 0.7, 0.95


class SizedCase(NamedTuple):
    """A fleet to plan with `penstock size`, and the traffic that is sent to it.

    Prompts begin with one of `beginnings` shared texts, of which number n is chosen with a
    probability proportional to 1 / n.

    size           arguments of `penstock size`: the model and its options
    ttft_s         latency budget of the first token
    tpot_s         latency budget of each further token
    rate           requests per second for which the fleet is sized
    load           rate of the traffic, divided by `rate`
    shared         tokens of each shared beginning
    beginnings     number of shared beginnings
    mean           mean tokens of a prompt after its shared beginning
    median         median of the same
    answer_mean    mean tokens of an answer
    answer_median  median of the same
    """

    size: tuple[str, ...]
    ttft_s: float
    tpot_s: float
    rate: float
    load: float
    shared: int
    beginnings: int
    mean: int
    median: int
    answer_mean: int
    answer_median: int


CASES = {
    "contracts": SizedCase(
        ("llama-3.1-70b", "--in", "3000", "--out", "120", "--context", "16k"),
        *(1.2, 0.038, 24.0, 0.94, 0, 1, 3000, 2400, 120, 100),
    ),
    "chat": SizedCase(
        ("llama-3.1-8b", "--in", "1500", "--out", "130", "--context", "16k", "--cached", "0.3"),
        *(0.5, 0.012, 30.0, 1.58, 512, 1, 1000, 800, 130, 100),
    ),
    "documents": SizedCase(
        (
            *("qwen3-32b", "--in", "6500", "--out", "100", "--context", "32k"),
            *("--cached", "0.8", "--quant", "bf16"),
        ),
        *(1.5, 0.030, 30.0, 0.99, 6144, 40, 400, 300, 100, 80),
    ),
}


def generate(case: SizedCase, load: float, count: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield the lines of a trace in Mooncake's format, whose arrivals are a Poisson process."""
    rng, at_s, next_id = Random(f"planned {seed}"), 0.0, 1 << 20
    popularity = [1 / (rank + 1) for rank in range(case.beginnings)]
    for _ in range(count):
        at_s += rng.expovariate(case.rate * case.load * load)
        own = lognormal(rng, case.median, case.mean, 16, 12_000)
        blocks = case.shared // BLOCK_TOKENS
        (first,) = rng.choices(range(case.beginnings), popularity)
        ids = [first * blocks + place for place in range(blocks)]
        ids += range(next_id, next_id + -(-own // BLOCK_TOKENS))
        next_id += 1000
        yield {
            "timestamp": 1e3 * at_s,
            "input_length": case.shared + own,
            "output_length": lognormal(rng, case.answer_median, case.answer_mean, 2, 2_000),
            "hash_ids": ids,
        }


def _size(case: SizedCase, *more: str) -> str:
    promises = ("--ttft", f"{case.ttft_s}s", "--tpot", f"{case.tpot_s * 1e3:g}ms")
    command = (*PENSTOCK, "size", *case.size, "--rate", str(case.rate), *promises, *more)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_env())
    if done.returncode not in (0, 3):
        raise SystemExit(f"penstock size ended with status {done.returncode}: {done.stderr}")
    return done.stdout


def run_live(gateway: str, mock: str, trace: Path, case: SizedCase) -> BenchReport:
    """Start the planned fleet from the emitted files, and send the trace in real time.

    Returns the client's report.
    """
    folder = trace.parent
    Path(folder, "gateway.yaml").write_text(gateway)
    slo = BenchSlo(case.ttft_s, case.tpot_s)
    with ExitStack() as stack:
        words = shlex.split(mock)
        port = words[words.index("--port") + 1]
        stack.enter_context(_running(words[1:], f"http://127.0.0.1:{port}", folder))
        stack.enter_context(_running(["serve", "--config", "gateway.yaml"], GATEWAY, folder))
        return asyncio.run(run(BenchPlan(url=GATEWAY, trace=trace, ignore_eos=True, slo=slo)))


def run_virtual(case: PoolCase, requests: list[TraceRequest]) -> ReplayFigures:
    return figures(
        replay(
            *(case.fleet, traffic(requests), case.policy(), case.admission(), case.options()),
            *(case.limits, case.shares),
        )
    )


@contextmanager
def _running(arguments: list[str], url: str, folder: Path) -> Iterator[None]:
    with Path(folder, f"{arguments[0]}.log").open("wb") as log:
        command = [*PENSTOCK, *arguments]
        process = subprocess.Popen(command, cwd=folder, env=_env(), stdout=log, stderr=log)
        try:
            _await_models(process, url)
            yield
        finally:
            process.terminate()
            process.wait(20)


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def compare(name: str, options: argparse.Namespace) -> float | None:
    """Plan one fleet, and print its attainment in a replay and live.

    Returns live minus replayed attainment in percentage points, or None without a live run.
    """
    case = CASES[name]
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        lines = generate(case, options.load, options.requests, options.seed)
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        port = str(_free_run(MOST_GROUPS))
        gateway, mock = (
            _size(case, "--first-port", port, "--emit", target) for target in ("gateway", "mock")
        )
        print(f"{name}, seed {options.seed}: {options.requests} requests; {mock.strip()}")
        replayed = json.loads(_size(case, "--from", str(trace), "--last", "24h", "--json"))
        attainment = _attainment_of_plan(replayed)
        requests = list(read_mooncake(trace))
        model = mock.split("--model ")[1].split()[0]
        pool = cases(config_in_text(gateway), Assumptions(model))["main"]
        jittered = [run_virtual(pool, jitter(requests, seed)) for seed in range(REPLICAS)]
        shares = [result.attainment for result in jittered]
        print(
            f"  replayed by `size --from` {attainment:.1%}; jittered, mean {fmean(shares):.1%} "
            f"({min(shares):.1%} to {max(shares):.1%})\n  {_virtual_text(jittered[0])}",
            flush=True,
        )
        if options.replays_only:
            return None
        report = run_live(gateway, mock, trace, case)
    live = report.good_fraction
    print(f"  {_live_text(report)}")
    print(f"  live {live:.1%}, difference {100 * (live - attainment):+.1f} points", flush=True)
    if not LEAST <= live <= MOST:
        print(f"  the live attainment is not between {LEAST:.0%} and {MOST:.0%}")
        return 100.0
    return 100 * (live - attainment)


def _attainment_of_plan(replayed: Any) -> float:
    (plan,) = replayed["plans"]
    name = f"{plan['replicas']} x TP {plan['layout']['tp']}"
    (own,) = (result for result in replayed["replayed"] if result["fleet"] == name)
    return float(own["attainment"])


def _virtual_text(result: ReplayFigures) -> str:
    assert result.ttft is not None
    assert result.tpot is not None
    refused = result.ends.get("shed", 0) / result.offered
    return (
        f"virtual: refused {refused:.1%}, {_times_text(result.ttft, result.tpot)}, "
        f"hits {result.hit_ratio:.3f}"
    )


def _live_text(report: BenchReport) -> str:
    assert report.ttft is not None
    assert report.tpot is not None
    refused = report.errors.get("http_429", 0) / len(report.records)
    lag_s = max(record.lag_s for record in report.records)
    return (
        f"live:    refused {refused:.1%}, {_times_text(report.ttft, report.tpot)}, "
        f"hits {report.cached_ratio or 0.0:.3f}, errors {report.errors}, "
        f"longest send lag {1e3 * lag_s:.0f} ms"
    )


def _times_text(ttft: Summary, tpot: Summary) -> str:
    return (
        f"TTFT {ttft.p50:.3f} s (p95 {ttft.p95:.3f}), "
        f"TPOT {1e3 * tpot.p50:.2f} ms (p95 {1e3 * tpot.p95:.2f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case",
        action="append",
        choices=tuple(CASES),
        help="case to run; repeat the option for more (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the generated traffic")
    parser.add_argument(
        "--requests",
        type=int,
        default=3000,
        help="number of requests per case (default: %(default)s)",
    )
    parser.add_argument(
        "--load",
        type=float,
        default=1.0,
        help="factor by which the request rate of each case is multiplied",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=3.0,
        metavar="POINTS",
        help="largest accepted difference between live and replayed attainment, in "
        "percentage points (default: %(default)s)",
    )
    parser.add_argument(
        "--replays-only", action="store_true", help="only replay; start no live fleets"
    )
    options = parser.parse_args()
    differences = [compare(name, options) for name in options.case or CASES]
    known = [difference for difference in differences if difference is not None]
    return 0 if all(abs(difference) <= options.within for difference in known) else 1


if __name__ == "__main__":
    sys.exit(main())
