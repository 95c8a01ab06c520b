"""Computes the results of simulations (replays) and live runs, which `make planned` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from statistics import fmean, variance
from typing import Any, NamedTuple

import msgspec

from bench.confidence_intervals import student_t
from planner.bench import BenchReport
from planner.replay.results import ReplayRun, figures


class RunFigures(NamedTuple):
    """The results of one run. Shares are from 0 to 1; times are means in seconds.

    attainment  share of the requests that were served within their latency budgets
    refused     share of the requests that were refused with status 429
    hits        share of the prompt tokens that engines had cached
    believed    share of the prompt tokens that the gateway expected to be cached
    queue_s     time from the arrival at the gateway until the request is sent to an engine
    ttft_s      time to the first token
    tpot_s      time per further token
    """

    attainment: float
    refused: float
    hits: float
    believed: float
    queue_s: float
    ttft_s: float
    tpot_s: float


TARGET, CLOSE_ENOUGH = 0.85, 0.05
"""Attainment at which replays and live runs are compared, and how far from it a load may be."""

LOAD_STEP, MOST_LOADS = 1.06, 16


def load_near_target(attainment_at: Callable[[float], float]) -> float:
    """Return the multiple of the planned rate at which about TARGET of the requests are in time.

    attainment_at  returns the simulated share of requests within their latency budgets at a load.
                   It should fall with the load

    The load 1 is tried first. Then the load changes by steps until the target lies between two
    loads, and the interval is halved. After MOST_LOADS loads, the closest of them is returned.
    """
    tried: dict[float, float] = {}
    load, low, high = 1.0, 0.0, 0.0  # low attains more than the target, high less; 0: unknown
    while len(tried) < MOST_LOADS:
        tried[load] = attainment_at(load)
        if abs(tried[load] - TARGET) <= CLOSE_ENOUGH:
            return load
        if tried[load] > TARGET:
            low = load
        else:
            high = load
        load = sqrt(low * high) if low and high else low * LOAD_STEP or high / LOAD_STEP
    return min(tried, key=lambda load: abs(tried[load] - TARGET))


def figures_of_replay(run: ReplayRun) -> RunFigures:
    result = figures(run)
    assert result.ttft is not None
    assert result.tpot is not None
    queued = [
        record.entered_s - record.arrived_s
        for record in run.records
        if record.entered_s is not None
    ]
    return RunFigures(
        result.attainment,
        result.ends.get("shed", 0) / result.offered,
        result.hit_ratio,
        result.believed_ratio,
        fmean(queued),
        result.ttft.mean,
        result.tpot.mean,
    )


def figures_of_live(report: BenchReport, log: Iterable[bytes]) -> RunFigures:
    """Compute the results of a run from the client's report and the gateway's access log.

    Lines of requests that were not served are ignored.
    """
    assert report.ttft is not None
    assert report.tpot is not None
    served = [line for line in map(_access_line, log) if line.get("outcome") == "served"]
    prompt = sum(line["prompt_tokens"] for line in served)
    return RunFigures(
        report.good_fraction,
        report.errors.get("http_429", 0) / len(report.records),
        report.cached_ratio or 0.0,
        sum(line["believed_cached_tokens"] for line in served) / prompt,
        fmean(1e-6 * line["sent_us"] for line in served),
        report.ttft.mean,
        report.tpot.mean,
    )


def _access_line(line: bytes) -> dict[str, Any]:
    if not line.startswith(b'{"time"'):
        return {}
    decoded: dict[str, Any] = msgspec.json.decode(line)
    return decoded


class SeedRuns(NamedTuple):
    """All simulations and live runs that used the traffic of one random seed."""

    replays: Sequence[RunFigures]
    live: Sequence[RunFigures]


class Difference(NamedTuple):
    """How one result differs between live runs and their simulations, as means over random seeds.

    margin  half of the 95% confidence interval of the difference; None with fewer than two runs per
            seed on a side
    """

    replayed: float
    live: float
    margin: float | None

    @property
    def value(self) -> float:
        return self.live - self.replayed


def difference(seeds: Sequence[SeedRuns], name: str) -> Difference:
    """Compare the mean of one result over the live runs with that over the simulations (replays).

    Both sides get the same requests for each seed, so the margin measures only random variation
    between runs of the same seed.
    """
    replays = [[float(getattr(run, name)) for run in seed.replays] for seed in seeds]
    lives = [[float(getattr(run, name)) for run in seed.live] for seed in seeds]
    replayed = fmean(map(fmean, replays))
    live = fmean(map(fmean, lives))
    if min(map(len, [*replays, *lives])) < 2:
        return Difference(replayed, live, None)
    error = sqrt(_square_error(replays) + _square_error(lives))
    freedom = sum(len(runs) - 1 for runs in lives)
    return Difference(replayed, live, student_t(freedom) * error)


def _square_error(groups: Sequence[Sequence[float]]) -> float:
    # Return the squared standard error of the mean of group means, with a common variance.
    freedom = sum(len(runs) - 1 for runs in groups)
    common = sum((len(runs) - 1) * variance(runs) for runs in groups) / freedom
    return common * sum(1 / len(runs) for runs in groups) / len(groups) ** 2


_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("attainment", "attainment", lambda value: f"{100 * value:.1f} %"),
    ("refused", "refused", lambda value: f"{100 * value:.1f} %"),
    ("hits", "hit ratio", lambda value: f"{100 * value:.2f} %"),
    ("believed", "believed hits", lambda value: f"{100 * value:.2f} %"),
    ("queue_s", "queue, mean", lambda value: f"{1e3 * value:.1f} ms"),
    ("ttft_s", "TTFT, mean", lambda value: f"{1e3 * value:.1f} ms"),
    ("tpot_s", "TPOT, mean", lambda value: f"{1e3 * value:.3f} ms"),
)


def difference_table(seeds: Sequence[SeedRuns]) -> str:
    """Return a table of all results: mean simulation, mean live run, and their difference."""
    lines = [f"  {'':<14}{'replayed':>12}{'live':>12}{'difference':>14}"]
    for name, label, text in _ROWS:
        result = difference(seeds, name)
        margin = "" if result.margin is None else f" +- {text(result.margin)}"
        sign = "+" if result.value >= 0 else "-"
        lines.append(
            f"  {label:<14}{text(result.replayed):>12}{text(result.live):>12}"
            f"{sign + text(abs(result.value)):>14}{margin}"
        )
    return "\n".join(lines)
