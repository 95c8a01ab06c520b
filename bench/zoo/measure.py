"""Measures one policy on one random workload: attainment at a load, and capacity by a search.

Attainment is the share of requests that meet both latency budgets. Capacity is the highest load
with a certain attainment.

The loads that are tried form a geometric series. So all policies are compared at the same loads,
with the same arrivals, and each load is simulated only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil, exp, log
from time import process_time

import msgspec

from bench.zoo.fleets import (
    IDLE_TTFT,
    SHORTEST_LIMIT,
    budgets,
    build_fleet,
    estimate_rate,
    idle_ttft_s,
    most_prompt_tokens,
)
from bench.zoo.requests import Requests, generate
from bench.zoo.space import SPANS, Workload, draw
from planner.replay import ReplayOptions, Traffic, replay, users
from planner.replay.fleet_spec import FleetSpec
from planner.replay.results import figures
from policies import policy_registry
from policies.routing_types import Slo

STEP = 1.04
"""Ratio of two adjacent loads of the grid; capacities are interpolated between them."""

STRIDE = 6
LOWEST, HIGHEST = -ceil(log(30) / log(STEP)), ceil(log(30) / log(STEP))
"""Grid steps of the lowest and the highest load that is tried, relative to the estimated
capacity.
"""

COLD = 0.2
"""Share of the requests, from the first one on, that fill the caches and are not counted."""


COLD_SESSIONS = 0.35
SHRINK = 0.75
"""Factor by which the longest prompt is shortened, repeatedly, until the arrivals last long enough.
"""

TURNS = 5.0
"""Minimum duration of a replay of sessions in turns; pauses are shortened if necessary."""

SECONDS_PER_TOKEN, FIXED_S = 0.03, 1.0
"""Constants of the estimated duration of an answer, in seconds per token and in seconds.

The number of sessions at load 1 is derived from that duration.
"""


class Case(msgspec.Struct, frozen=True):
    """One random workload and the random seed of its arrival times, ready to be simulated.

    rate_s   requests per second at load 1
    users    concurrent sessions at load 1; 0 if requests do not wait for earlier answers
    pause_s  median pause within a session, in seconds
    """

    workload: Workload
    arrivals: int
    fleet: FleetSpec
    slo: Slo
    requests: Requests
    rate_s: float
    users: float
    pause_s: float

    @property
    def horizon_s(self) -> float | None:
        """Return when the sessions of a workload end, in seconds; None if it has no sessions."""
        return self.workload.requests / self.rate_s if self.users else None

    def at(self, load: float) -> Traffic:
        """Return the requests of the workload at a load, which multiplies their rate.

        If the workload has sessions, the load multiplies the number of concurrent sessions.
        """
        change = msgspec.structs.replace
        if self.users:
            assert self.horizon_s is not None
            paced = (
                request
                if request.think_s is None
                else change(request, think_s=request.think_s * self.pause_s)
                for request in self.requests.requests
            )
            count = max(1, round(load * self.users))
            return users(paced, count, self.arrivals, COLD_SESSIONS / 2 * self.horizon_s)
        gap_s = 1.0 / (self.rate_s * load)
        return Traffic(
            [
                change(request, arrival_s=request.arrival_s * gap_s)
                for request in self.requests.requests
            ]
        )


@lru_cache(4)
def build_case(seed: str, number: int, arrivals: int) -> Case:
    return build_case_of(draw(seed, number), arrivals)


def build_case_of(workload: Workload, arrivals: int) -> Case:
    fleet = build_fleet(workload)
    generated, rate_s = _fit_prompts(workload, fleet, arrivals)
    requests = generated.requests
    slo = budgets(workload, fleet, requests[: workload.requests], rate_s)
    count = pause_s = 0.0
    if workload.sharing == "sessions":
        answer = sum(request.output_tokens for request in requests) / len(requests)
        answer_s = FIXED_S + answer * SECONDS_PER_TOKEN
        # e^0.5 is the mean of a log-normal distribution with sigma 1, divided by its median.
        room_s = (workload.requests / rate_s / TURNS - answer_s) / exp(0.5)
        pause_s = max(0.1, min(workload.think_s, room_s))
        count = rate_s * (answer_s + exp(0.5) * pause_s)
    return Case(workload, arrivals, fleet, slo, generated, rate_s, count, pause_s)


def _fit_prompts(workload: Workload, fleet: FleetSpec, arrivals: int) -> tuple[Requests, float]:
    # Return requests and their rate, with prompts so short that the arrivals last long enough.
    #
    # The TTFT budget follows from the longest prompt, and the arrivals must last SPANS budgets.
    most = most_prompt_tokens(workload, fleet)
    while True:
        generated = generate(workload, arrivals, most)
        rate_s = estimate_rate(fleet, generated.requests, generated.uncached)
        least_s = IDLE_TTFT * idle_ttft_s(workload, fleet, generated.requests)
        if least_s * SPANS * rate_s <= workload.requests or most < SHORTEST_LIMIT:
            return generated, rate_s
        most = int(most * SHRINK)


class Attainments:
    """The shares of requests that one policy serves in time on one workload, by load.

    Loads are the powers of STEP. Each one is simulated when it is first needed.
    """

    def __init__(
        self, case: Case, policy: str, parameters: Mapping[str, object] | None = None
    ) -> None:
        self._case, self._policy, self._parameters = case, policy, parameters or {}
        self.by_step: dict[int, float] = {}
        self.cpu_s = 0.0

    def at(self, step: int) -> float:
        """Return the share of requests that meet both latency budgets at the load STEP**step."""
        if step not in self.by_step:
            began = process_time()
            self.by_step[step] = self._replay(STEP**step)
            self.cpu_s += process_time() - began
        return self.by_step[step]

    def _replay(self, load: float) -> float:
        case = self._case
        horizon_s = case.horizon_s
        options = ReplayOptions(
            seed=case.arrivals, learns_lengths=True, standard=case.slo, horizon_s=horizon_s
        )
        policy = policy_registry.build(self._policy, self._parameters)
        run = replay(case.fleet, case.at(load), policy, None, options)
        if horizon_s is not None:
            return figures(run, COLD_SESSIONS * horizon_s, horizon_s).attainment
        counted = run.records[round(COLD * len(run.records)) :]
        return sum(record.is_good for record in counted) / len(counted)

    def capacity(self, target: float, start: int) -> float:
        """Return the highest load with an attainment of at least `target`, or 0.0 if there is none.

        start  index of the first load to try, in the series of increasing loads
        """
        return find_capacity(self.at, target, start)


def find_capacity(at: Callable[[int], float], target: float, start: int, width: int = 1) -> float:
    """Find the highest load at which a share of requests is still served in time.

    at      function that returns the share at the load STEP**step, given `step`
    target  the share, 0 to 1
    start   the first step to try
    width   number of steps between the two between which the result is interpolated, at most

    Returns 0.0 if even the lowest load misses the target, and the highest load if none does.
    """
    low, high = _bracket(at, target, start)
    if low is None:
        return 0.0
    if high is None:
        return STEP**low
    while high - low > width:
        middle = (low + high) // 2
        if at(middle) >= target:
            low = middle
        else:
            high = middle
    above, below = at(low), at(high)
    return STEP ** (low + (high - low) * (above - target) / (above - below))


def _bracket(
    at: Callable[[int], float], target: float, start: int
) -> tuple[int | None, int | None]:
    # Return two grid steps between which attainment falls below the target.
    #
    # The first is None if attainment is below at all steps, the second if it is below at none.
    stride = STRIDE
    if at(start) >= target:
        low = start
        while low < HIGHEST:
            high = min(HIGHEST, low + stride)
            if at(high) < target:
                return low, high
            low, stride = high, 2 * stride
        return low, None
    high = start
    while high > LOWEST:
        low = max(LOWEST, high - stride)
        if at(low) >= target:
            return low, high
        high, stride = low, 2 * stride
    return None, high
