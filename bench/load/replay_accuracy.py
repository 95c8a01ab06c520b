"""`make clocks`: checks that the simulator predicts a live run of a recorded trace.

    python -m bench.load.replay_accuracy [--seconds 300] [--speed 1] [--policy prefix_aware]
                                    [--within 0.05]

The live run has four mock engines, a gateway and a client on 127.0.0.1, whose engines are `speed`
times faster than real time. The simulation (planner.replay) has the same engines and requests.

It is repeated with slightly different arrivals, and the mean of all repetitions is compared with
the live run. This is needed because routing amplifies small delays: a request on another endpoint
attracts similar ones.

Exit status: 1 if the mean time to first token, the mean time per output token or the cache hit
ratio differ by more than --within. Errors of latency predictions are only printed. A run takes
seconds / speed, so it is not part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from bench.load.policies_live import fleet
from planner.bench import BenchPlan, run
from planner.replay import FleetSpec, ReplayOptions, replay, traffic
from planner.replay.results import figures
from planner.traces import TraceRequest
from policies import policy_registry
from tests.sim.conversation import TRACE, conversation
from tests.sim.test_policies_on_a_virtual_clock import GROUP

REPLICAS = 5
JITTER_S = 0.01


class ClockResult(NamedTuple):
    """What a live run or its simulation measured. Times are in simulated seconds.

    ttft_s     mean time to first token
    tpot_s     mean time per output token
    hit_ratio  share of the prompt tokens that were cached
    """

    ttft_s: float
    tpot_s: float
    hit_ratio: float


class PredictionErrors(NamedTuple):
    """Relative errors of the predicted times to first token; 0.1 means 10%.

    mape    mean of the absolute errors
    median  median of the absolute errors
    """

    mape: float
    median: float


def run_live(
    policy: str, requests: int, speed: float
) -> tuple[ClockResult, PredictionErrors | None]:
    """Send the recorded trace to a running gateway over HTTP, and return the results.

    Raises SystemExit if a request fails.
    """
    with TemporaryDirectory() as folder:
        log = Path(folder, "access.jsonl")
        with fleet(policy, speed, str(log)) as url:
            plan = BenchPlan(url=url, trace=TRACE, speed=speed, limit=requests, ignore_eos=True)
            report = asyncio.run(run(plan))
        errors = prediction_errors(log.read_text())
    if report.errors:
        raise SystemExit(
            f"the live run has failed requests; the number by kind of error: {report.errors}"
        )
    ttft_s = fmean(record.ttft_s for record in report.completed if record.ttft_s is not None)
    tpot_s = fmean(record.tpot_s for record in report.completed if record.tpot_s is not None)
    return ClockResult(ttft_s * speed, tpot_s * speed, report.cached_ratio or 0.0), errors


def prediction_errors(log: str) -> PredictionErrors | None:
    """Return the prediction errors in an access log, or None if the log has no predictions.

    They are computed as in the gateway's metric and in simulations. Only some policies predict.
    """
    lines = [json.loads(line) for line in log.splitlines()]
    keys = {"predicted_ttft_us", "first_token_us", "picked_us"}
    errors = [
        abs(line["predicted_ttft_us"] / (line["first_token_us"] - line["picked_us"]) - 1.0)
        for line in lines
        if keys <= line.keys()
    ]
    return PredictionErrors(fmean(errors), median(errors)) if errors else None


def run_virtual(
    policy: str, requests: list[TraceRequest], speed: float
) -> tuple[ClockResult, PredictionErrors]:
    """Simulate the recorded trace with the settings of the live run, and return the results."""
    spec = FleetSpec(
        "live's twin", (msgspec.structs.replace(GROUP, max_concurrency=256),), block_tokens=16
    )
    options = ReplayOptions(expected_output=None, scrape_s=speed)
    result = figures(
        replay(spec, traffic(requests), policy_registry.build(policy, {}), options=options)
    )
    assert result.ttft is not None
    assert result.tpot is not None
    assert result.ttft_error is not None
    assert result.ttft_error_p50 is not None
    return ClockResult(result.ttft.mean, result.tpot.mean, result.hit_ratio), PredictionErrors(
        result.ttft_error, result.ttft_error_p50
    )


def jitter(requests: list[TraceRequest], seed: int) -> list[TraceRequest]:
    """Delay each arrival by a random time, as the network and the client do in a live run.

    requests  the requests of the trace
    seed      random seed
    """
    rng = Random(seed)
    return [
        msgspec.structs.replace(record, arrival_s=record.arrival_s + rng.expovariate(1 / JITTER_S))
        for record in requests
    ]


def main() -> int:
    options = _options()
    requests = [record for record in conversation() if record.arrival_s < options.seconds]
    replicas = [
        run_virtual(options.policy, jitter(requests, seed), options.speed)
        for seed in range(REPLICAS)
    ]
    live_result, errors = run_live(options.policy, len(requests), options.speed)
    worst = 0.0
    print(
        f"{len(requests)} requests of {options.seconds:g} s, {options.policy}, "
        f"live at speed {options.speed:g}"
    )
    for name, replays, result in zip(
        ClockResult._fields,
        zip(*(result for result, _ in replicas), strict=True),
        live_result,
        strict=True,
    ):
        expected = fmean(replays)
        difference = result / expected - 1
        worst = max(worst, abs(difference))
        spread = f"({min(replays):.4f} to {max(replays):.4f})"
        print(
            f"{name:<10} virtual {expected:.4f} {spread}  live {result:.4f}  "
            f"difference {difference:+.1%}"
        )
    for name, replays in zip(
        PredictionErrors._fields, zip(*(errors for _, errors in replicas), strict=True), strict=True
    ):
        live_text = (
            "none (use --policy priced)" if errors is None else f"{getattr(errors, name):.1%}"
        )
        print(f"TTFT prediction error, {name:<6}: virtual {fmean(replays):.1%}  live {live_text}")
    return 0 if worst <= options.within else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.load.replay_accuracy",
        description="Compare a live run over HTTP with a replay in virtual time.",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="length of the beginning of the trace that is used, in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        help=(
            "factor by which the mock engines and the trace are faster than real time (default: "
            "%(default)s)"
        ),
    )
    parser.add_argument(
        "--policy",
        default="prefix_aware",
        help="routing policy of the gateway (default: %(default)s)",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=0.05,
        help=(
            "highest allowed relative difference between the times of both runs; 0.05 is 5 %% "
            "(default: %(default)s)"
        ),
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
