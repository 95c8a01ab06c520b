"""`make planned`: checks that three planned fleets perform live as their simulation predicts.

    python -m bench.load.planned_fleets [--case NAME]... [--seed N]... [--requests 3000] [--load 0]
                                        [--runs 3] [--replays 12] [--clock virtual] [--within 3]

For each case:

1. `penstock size` plans a fleet, and simulates it on a generated trace (--from)
2. the rate of the trace is changed until simulations serve about 85% of the requests in time, if
   they do not at first: almost any two fleets agree where all or no requests are in time
3. the files of the plan, gateway.yaml and a command for mock engines, are started unchanged
4. a client sends the trace over HTTP

Means of several runs are compared, because routing amplifies small differences in time. All results
of both sides are printed, to show where a difference comes from.

With the virtual clock, the gateway, the engines and the client share one process, whose clock jumps
to the next timer whenever there is nothing to do (planned_live.py). The load of the machine then
has no effect. With the real clock they are separate processes, which need idle cores, and the
gateway uses the ports 8080 and 8081.

Exit status: 1 if the shares of requests within their latency budgets differ by more than --within
percentage points, or are outside of 70 to 95%. A live run takes a minute or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from bench.load.locust_run import ROOT, await_models
from bench.load.planned_figures import (
    RunFigures,
    SeedRuns,
    difference,
    difference_table,
    figures_of_live,
    figures_of_replay,
    load_near_target,
)
from bench.load.replay_accuracy import jitter
from gateway.cli.main import config_in_text
from mockgpu.mock_tokenizer import render_chat, token_count
from planner.bench import BenchPlan, BenchRecord, BenchReport, BenchSlo, run
from planner.bench.workloads import lognormal
from planner.plan import Assumptions, PoolCase, cases
from planner.replay import replay, traffic
from planner.replay.results import ReplayRun
from planner.text_generator import BLOCK_TOKENS
from planner.traces import TraceRequest, read_mooncake
from tests.ports import free_run

PENSTOCK = (sys.executable, "-m", "gateway")
GATEWAY = "http://127.0.0.1:8080"
MOST_GROUPS = 64
TEMPLATE_TOKENS = token_count(render_chat({"messages": [{"role": "user", "content": ""}]}))
"""Tokens that the mock engine's chat template puts around the text of a request."""
LEAST, MOST = 0.7, 0.95
SEARCH_JITTERS = range(1000, 1003)
"""Numbers of the simulations that choose the rate; the compared ones have other numbers."""


class SizedCase(NamedTuple):
    """A fleet to plan with `penstock size`, and its traffic. Lengths are in tokens.

    Each prompt begins with one of several shared texts. Text number n is chosen with a probability
    proportional to 1 / n.

    size           arguments of `penstock size`: the model and options
    ttft_s         limit on the time to the first token
    tpot_s         limit on the time per further token
    rate           requests per second for which the fleet is planned
    load           rate of the traffic, divided by `rate`
    shared         length of each shared text
    beginnings     number of shared texts
    mean           mean length of the rest of a prompt
    median         median length of the rest of a prompt
    answer_mean    mean length of an answer
    answer_median  median length of an answer
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
    """Yield the lines of a trace in Mooncake's format. The arrivals are a Poisson process."""
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


class LiveFleet(NamedTuple):
    """The files that `penstock size` wrote for a plan, and the latency budgets of its clients.

    gateway  text of gateway.yaml
    mock     command that starts the mock engines
    slo      latency budgets
    """

    gateway: str
    mock: str
    slo: BenchSlo


def run_live(fleet: LiveFleet, requests: Sequence[TraceRequest], *, is_virtual: bool) -> RunFigures:
    """Start the planned fleet from the files that `penstock size` wrote, and send the requests."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        report = send_live(fleet, requests, folder, is_virtual=is_virtual)
        with Path(folder, "serve.log").open("rb") as log:
            return figures_of_live(report, log)


def send_live(
    fleet: LiveFleet, requests: Sequence[TraceRequest], folder: Path, *, is_virtual: bool
) -> BenchReport:
    """Start a fleet from the files of its plan, send the requests, and return the client's report.

    The requests must be in order of arrival. The gateway's access log is written to serve.log in
    the folder.
    """
    trace = Path(folder, "trace.jsonl")
    trace.write_text("".join(map(_client_line, requests)))
    Path(folder, "gateway.yaml").write_text(fleet.gateway)
    plan = BenchPlan(url=GATEWAY, trace=trace, ignore_eos=True, slo=fleet.slo)
    send = _send_on_virtual_clock if is_virtual else _send_on_real_clock
    return BenchReport(plan, send(plan, fleet, folder))


def _client_line(request: TraceRequest) -> str:
    # Return a line of a trace whose prompt has as many tokens as the request, once the engine has
    # put its chat template around it.
    line = {
        "timestamp": 1e3 * request.arrival_s,
        "input_length": request.input_tokens - TEMPLATE_TOKENS,
        "output_length": request.output_tokens,
        "hash_ids": request.blocks,
    }
    return json.dumps(line) + "\n"


def _send_on_virtual_clock(plan: BenchPlan, fleet: LiveFleet, folder: Path) -> list[BenchRecord]:
    Path(folder, "mock.txt").write_text(fleet.mock)
    Path(folder, "client.json").write_bytes(msgspec.json.encode(plan, enc_hook=str))
    with Path(folder, "serve.log").open("wb") as log:
        command = [sys.executable, "-m", "bench.load.planned_live", str(folder)]
        subprocess.run(command, cwd=folder, env=_env(), stdout=log, check=True)
    return msgspec.json.decode(Path(folder, "records.json").read_bytes(), type=list[BenchRecord])


def _send_on_real_clock(plan: BenchPlan, fleet: LiveFleet, folder: Path) -> list[BenchRecord]:
    with ExitStack() as stack:
        words = shlex.split(fleet.mock)
        port = words[words.index("--port") + 1]
        stack.enter_context(_running(words[1:], f"http://127.0.0.1:{port}", folder))
        stack.enter_context(_running(["serve", "--config", "gateway.yaml"], GATEWAY, folder))
        return list(asyncio.run(run(plan)).records)


def run_replay(case: PoolCase, requests: Sequence[TraceRequest]) -> RunFigures:
    return figures_of_replay(replay_sent(case, requests))


def replay_sent(case: PoolCase, requests: Sequence[TraceRequest]) -> ReplayRun:
    """Simulate the requests exactly as the live client sends them.

    The client limits each answer to its recorded length. So the simulated gateway knows this
    length. In other simulations, it has to estimate the length.
    """
    options = msgspec.structs.replace(case.options(), learns_lengths=False, expected_output=None)
    return replay(
        *(case.fleet, traffic(requests), case.policy(), case.admission(), options),
        *(case.limits, case.shares),
    )


@contextmanager
def _running(arguments: list[str], url: str, folder: Path) -> Iterator[None]:
    with Path(folder, f"{arguments[0]}.log").open("wb") as log:
        command = [*PENSTOCK, *arguments]
        process = subprocess.Popen(command, cwd=folder, env=_env(), stdout=log, stderr=log)
        try:
            await_models(process, url)
            yield
        finally:
            process.terminate()
            process.wait(20)


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def compare_seed(name: str, seed: int, options: argparse.Namespace) -> SeedRuns:
    """Plan one fleet; simulate it, and run it live, with the traffic of one random seed."""
    case = CASES[name]
    port = str(free_run(MOST_GROUPS))
    gateway, mock = (
        _size(case, "--first-port", port, "--emit", target) for target in ("gateway", "mock")
    )
    model = mock.split("--model ")[1].split()[0]
    pool = cases(config_in_text(gateway), Assumptions(model))["main"]
    print(f"{name}, seed {seed}: {options.requests} requests; {mock.strip()}", flush=True)
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")

        def requests_at(load: float) -> list[TraceRequest]:
            lines = generate(case, load, options.requests, seed)
            trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return list(read_mooncake(trace))

        load = options.load or load_near_target(
            lambda load: _mean_attainment(pool, requests_at(load))
        )
        requests = requests_at(load)
        print(f"  {case.rate * case.load * load:.1f} requests/s", flush=True)
        sized = json.loads(_size(case, "--from", str(trace), "--last", "24h", "--json"))
    print(f"  replayed by `size --from`: {_attainment_of_plan(sized):.1%}", flush=True)
    replays = [run_replay(pool, jitter(requests, number)) for number in range(options.replays)]
    fleet = LiveFleet(gateway, mock, BenchSlo(case.ttft_s, case.tpot_s))
    lives = []
    for number in range(options.runs):
        is_virtual = options.clock == "virtual"
        arrivals = jitter(requests, number) if is_virtual else requests
        in_order = sorted(arrivals, key=lambda request: request.arrival_s)
        lives.append(run_live(fleet, in_order, is_virtual=is_virtual))
        print(f"  live run {number}: {lives[-1].attainment:.1%}", flush=True)
    return SeedRuns(replays, lives)


def compare(name: str, options: argparse.Namespace) -> bool:
    """Print the results of the simulations and live runs of one case, over all random seeds.

    Returns whether the live share of requests within their latency budgets is close enough to the
    simulated one, and both are in the required range.
    """
    seeds = [compare_seed(name, seed, options) for seed in options.seed or (0,)]
    if not options.runs:
        means = [fmean(run.attainment for run in seed.replays) for seed in seeds]
        print("  replayed attainment: " + ", ".join(f"{mean:.1%}" for mean in means))
        return True
    print(difference_table(seeds), flush=True)
    result = difference(seeds, "attainment")
    is_in_range = LEAST <= min(result.live, result.replayed) <= MOST
    if not is_in_range:
        print(f"  attainment is not between {LEAST:.0%} and {MOST:.0%}")
    return is_in_range and 100 * abs(result.value) <= options.within


def _mean_attainment(pool: PoolCase, requests: list[TraceRequest]) -> float:
    runs = [run_replay(pool, jitter(requests, number)) for number in SEARCH_JITTERS]
    return fmean(run.attainment for run in runs)


def _attainment_of_plan(replayed: Any) -> float:
    (plan,) = replayed["plans"]
    name = f"{plan['replicas']} x TP {plan['layout']['tp']}"
    (own,) = (result for result in replayed["replayed"] if result["fleet"] == name)
    return float(own["attainment"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case",
        action="append",
        choices=tuple(CASES),
        help="case to run; repeat the option for more (default: all)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        help="random seed of generated traffic; repeat the option for more (default: 0)",
    )
    counts = {"requests": 3000, "runs": 3, "replays": 12}
    texts = ("requests per run", "live runs per seed; 0: none", "replays per seed")
    for (option, count), text in zip(counts.items(), texts, strict=True):
        parser.add_argument(
            f"--{option}", type=int, default=count, help=f"number of {text} (default: %(default)s)"
        )
    _add_comparison_options(parser)
    return parser.parse_args()


def _add_comparison_options(parser: argparse.ArgumentParser) -> None:
    # Add the options about the load, the clock, and the difference that is accepted.
    parser.add_argument(
        "--load",
        type=float,
        default=0.0,
        help="factor by which the request rate of each case is multiplied (default: the one at "
        "which simulations serve about 85%% of the requests in time)",
    )
    parser.add_argument(
        "--clock",
        choices=("virtual", "real"),
        default="virtual",
        help="clock of the live runs (default: %(default)s)",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=3.0,
        metavar="POINTS",
        help="maximum difference between the live and simulated shares of requests within "
        "their latency budgets, in percentage points (default: %(default)s)",
    )


def main() -> int:
    options = _options()
    results = [compare(name, options) for name in options.case or CASES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
