"""Compares routing policies by many replays: every policy at every load, and their capacities.

`penstock replay` runs it. The capacity of a policy is the highest load at which it meets its
target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planner.replay.capacity_search import Capacity, capacity
from planner.replay.fleet_sim import replay
from planner.replay.fleet_spec import FleetSpec
from planner.replay.replay_options import ReplayOptions
from planner.replay.results import ReplayFigures, ReplayRun, figures
from planner.replay.traffic import Traffic, traffic, users
from planner.traces.mix import scale_rate
from planner.traces.recorded_request import TraceRequest
from policies import policy_registry
from policies.admission_registry import build_admission

Progress = Callable[[str, float], None]
"""A function that is called during a comparison with the name of the running replay.

Its second argument is the share of the replay's requests that have ended, 0 to 1.
"""


class NoCountedRequestError(ValueError):
    """Raised if no request arrived after the warm-up. `tried` has the results so far."""

    def __init__(self, message: str, tried: tuple[tuple[float, float], ...]) -> None:
        super().__init__(message)
        self.tried = tried


class UnknownCapacity(msgspec.Struct, frozen=True):
    """The result instead of a Capacity if the capacity could not be determined.

    reason  why it could not be determined
    target  as in Capacity
    tried   as in Capacity
    load    always None
    """

    reason: str
    target: float
    tried: tuple[tuple[float, float], ...]
    load: None = None


class Comparison(msgspec.Struct, frozen=True):
    """The policies, loads and options of a comparison of routing policies by replays.

    fleet      the fleet
    requests   the trace
    policies   names of the policies, each with its default parameters
    admission  name of the admission policy; None: every request is admitted
    loads      request rates relative to the recorded rate; with `by_users`, numbers of users
    by_users   whether the loads are numbers of users, each of whom waits for answers
    targets    shares (0 to 1) of requests within their latency budgets. For each, the highest load
               that reaches it is determined
    warmup_s   requests that arrive before this time in seconds are not counted
    options    the options of each replay
    """

    fleet: FleetSpec
    requests: Sequence[TraceRequest]
    policies: tuple[str, ...]
    admission: str | None = None
    loads: tuple[float, ...] = (1.0,)
    by_users: bool = False
    targets: tuple[float, ...] = ()
    warmup_s: float = 0.0
    options: ReplayOptions = ReplayOptions()


class ComparisonPoint(msgspec.Struct, frozen=True):
    """One replay of a comparison: a routing policy at a load, and its results.

    ttfts_s  time to the first token of each served request in seconds, sorted
    tpots_s  time per further token of each served request in seconds, sorted
    """

    policy: str
    load: float
    figures: ReplayFigures
    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]


class ComparisonResult(msgspec.Struct, frozen=True):
    """The result of a comparison of routing policies.

    comparison  what was compared
    points      every replay
    capacities  by policy, its capacity for each target
    """

    comparison: Comparison
    points: tuple[ComparisonPoint, ...]
    capacities: dict[str, tuple[Capacity | UnknownCapacity, ...]]


def load_of(comparison: Comparison, load: float) -> Traffic:
    """Return the requests that a replay sends at this load.

    comparison  has the trace, and what loads mean
    load        a number of concurrent users, or a factor on the trace's request rate
    """
    if comparison.by_users:
        return users(comparison.requests, _users_at(load), comparison.options.seed)
    return traffic(scale_rate(comparison.requests, load))


def _users_at(load: float) -> int:
    return max(1, round(load))


def one_run(
    comparison: Comparison,
    policy: str,
    load: float,
    watch: Callable[[float, int], None] | None = None,
) -> ReplayRun:
    """Run one replay of a comparison: one policy at one load, with empty caches.

    comparison  the fleet, traffic and options
    policy      name of the routing policy
    load        as in load_of()
    watch       called with (clock, finished requests) at every end of a request
    """
    gate = None if comparison.admission is None else build_admission(comparison.admission, {})
    return replay(
        comparison.fleet,
        load_of(comparison, load),
        policy_registry.build(policy, {}),
        gate,
        comparison.options,
        watch=watch,
    )


def compare(comparison: Comparison, show_progress: Progress | None = None) -> ComparisonResult:
    """Run all replays of a comparison one after another, and return the result."""
    points = []
    capacities: dict[str, tuple[Capacity | UnknownCapacity, ...]] = {}
    for policy in comparison.policies:
        points += [_point(comparison, policy, load, show_progress) for load in comparison.loads]
        capacities[policy] = tuple(
            _capacity_or_reason(comparison, policy, target, show_progress)
            for target in comparison.targets
        )
    return ComparisonResult(comparison, tuple(points), capacities)


def _point(
    comparison: Comparison, policy: str, load: float, show_progress: Progress | None
) -> ComparisonPoint:
    run = one_run(
        comparison, policy, load, _watch(comparison, f"{policy} at {load:g}", show_progress)
    )
    served = [
        record
        for record in run.records
        if record.done_s is not None and record.arrived_s >= comparison.warmup_s
    ]
    return ComparisonPoint(
        policy,
        load,
        figures(run, comparison.warmup_s),
        tuple(sorted(record.ttft_s for record in served if record.ttft_s is not None)),
        tuple(sorted(record.tpot_s for record in served if record.tpot_s is not None)),
    )


def _capacity_or_reason(
    comparison: Comparison, policy: str, target: float, show_progress: Progress | None
) -> Capacity | UnknownCapacity:
    try:
        return _capacity(comparison, policy, target, show_progress)
    except NoCountedRequestError as error:
        return UnknownCapacity(str(error), target, error.tried)


def _capacity(
    comparison: Comparison, policy: str, target: float, show_progress: Progress | None
) -> Capacity:
    known: dict[float, float] = {}

    def attainment(load: float) -> float:
        # Reuse the result of another load that rounds to the same number of users.
        rounded_load = _users_at(load) if comparison.by_users else load
        if rounded_load not in known:
            watch = _watch(
                comparison, f"{policy}, capacity at {target:.0%}: {rounded_load:.3g}", show_progress
            )
            result = figures(one_run(comparison, policy, rounded_load, watch), comparison.warmup_s)
            if not result.offered:
                warmup = f"a warm-up of {comparison.warmup_s:g} s"
                text = f"at load {rounded_load:.3g} no request counts after {warmup}"
                raise NoCountedRequestError(text, tuple(known.items()))
            known[rounded_load] = result.attainment
        return known[rounded_load]

    start = comparison.loads[0]
    least = 1.0 if comparison.by_users else min(1.0, start) / 64
    return capacity(attainment, target, start, least=least, most=64 * max(1.0, start))


def _watch(
    comparison: Comparison, name: str, show_progress: Progress | None
) -> Callable[[float, int], None] | None:
    if show_progress is None:
        return None
    total, horizon_s = len(comparison.requests), comparison.options.horizon_s

    def watch(now: float, over: int) -> None:
        show_progress(
            name, now / horizon_s if comparison.by_users and horizon_s else over / max(1, total)
        )

    return watch
