"""Many replays as one comparison: every policy at every load, and capacities. What `penstock replay` carries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planner.replay.capacity import Capacity, capacity
from planner.replay.figures import Figures, figures
from planner.replay.fleet import replay
from planner.replay.options import Options
from planner.replay.record import Run
from planner.replay.spec import FleetSpec
from planner.replay.traffic import Traffic, traffic, users
from planner.traces.mix import scaled
from planner.traces.shape import TraceRequest
from policies import registry
from policies.admissions import build_admission

Progress = Callable[[str, float], None]
"""Told of a replay under way: which one it is, and the share of its requests that are over."""


class NothingCountedError(ValueError):
    """A capacity was looked for at a load at which no request comes after the warm-up. `tried`: what was until then."""

    def __init__(self, message: str, tried: tuple[tuple[float, float], ...]) -> None:
        super().__init__(message)
        self.tried = tried


class Unjudged(msgspec.Struct, frozen=True):
    """In place of a Capacity that could not be found: `reason` says why, `tried` is as there."""

    reason: str
    target: float
    tried: tuple[tuple[float, float], ...]
    load: None = None


class Contest(msgspec.Struct, frozen=True):
    """What is compared.

    policies    names, each with its defaults
    admission   a name; None lets everybody in
    loads       rates relative to the recorded one, or with `by_users` numbers of users
    targets     attainments whose capacity is looked for
    warmup_s    requests before it do not count
    """

    fleet: FleetSpec
    requests: Sequence[TraceRequest]
    policies: tuple[str, ...]
    admission: str | None = None
    loads: tuple[float, ...] = (1.0,)
    by_users: bool = False
    targets: tuple[float, ...] = ()
    warmup_s: float = 0.0
    options: Options = Options()


class Point(msgspec.Struct, frozen=True):
    """One replay of a contest. `ttfts_s`, `tpots_s`: of the served, ascending."""

    policy: str
    load: float
    figures: Figures
    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]


class Standing(msgspec.Struct, frozen=True):
    """The outcome: every point, and every policy's capacities by target, as far as there are any."""

    contest: Contest
    points: tuple[Point, ...]
    capacities: dict[str, tuple[Capacity | Unjudged, ...]]


def load_of(contest: Contest, load: float) -> Traffic:
    """The traffic at a load."""
    if contest.by_users:
        return users(contest.requests, _users_at(load), contest.options.seed)
    return traffic(scaled(contest.requests, load))


def _users_at(load: float) -> int:
    return max(1, round(load))


def one_run(contest: Contest, policy: str, load: float, watch: Callable[[float, int], None] | None = None) -> Run:
    """One replay: a fresh policy and admission before a cold fleet."""
    gate = None if contest.admission is None else build_admission(contest.admission, {})
    return replay(contest.fleet, load_of(contest, load), registry.build(policy, {}), gate, contest.options, watch=watch)


def compare(contest: Contest, tell: Progress | None = None) -> Standing:
    """Everything the contest asks for, one replay after another."""
    points = []
    capacities: dict[str, tuple[Capacity | Unjudged, ...]] = {}
    for policy in contest.policies:
        points += [_point(contest, policy, load, tell) for load in contest.loads]
        capacities[policy] = tuple(_judged(contest, policy, target, tell) for target in contest.targets)
    return Standing(contest, tuple(points), capacities)


def _point(contest: Contest, policy: str, load: float, tell: Progress | None) -> Point:
    run = one_run(contest, policy, load, _watch(contest, f"{policy} at {load:g}", tell))
    served = [one for one in run.records if one.done_s is not None and one.arrived_s >= contest.warmup_s]
    return Point(
        policy,
        load,
        figures(run, contest.warmup_s),
        tuple(sorted(one.ttft_s for one in served if one.ttft_s is not None)),
        tuple(sorted(one.tpot_s for one in served if one.tpot_s is not None)),
    )


def _judged(contest: Contest, policy: str, target: float, tell: Progress | None) -> Capacity | Unjudged:
    """What cannot be judged for one does not take the others' outcome with it."""
    try:
        return _capacity(contest, policy, target, tell)
    except NothingCountedError as error:
        return Unjudged(str(error), target, error.tried)


def _capacity(contest: Contest, policy: str, target: float, tell: Progress | None) -> Capacity:
    known: dict[float, float] = {}

    def attainment(load: float) -> float:
        # Between two loads there may be no whole number of users more to try.
        offered = _users_at(load) if contest.by_users else load
        if offered not in known:
            watch = _watch(contest, f"{policy}, capacity at {target:.0%}: {offered:.3g}", tell)
            seen = figures(one_run(contest, policy, offered, watch), contest.warmup_s)
            if not seen.offered:
                text = f"at load {offered:.3g} no request counts after a warm-up of {contest.warmup_s:g} s"
                raise NothingCountedError(text, tuple(known.items()))
            known[offered] = seen.attainment
        return known[offered]

    start = contest.loads[0]
    least = 1.0 if contest.by_users else min(1.0, start) / 64
    return capacity(attainment, target, start, least=least, most=64 * max(1.0, start))


def _watch(contest: Contest, name: str, tell: Progress | None) -> Callable[[float, int], None] | None:
    if tell is None:
        return None
    total, horizon_s = len(contest.requests), contest.options.horizon_s

    def watch(now: float, over: int) -> None:
        tell(name, now / horizon_s if contest.by_users and horizon_s else over / max(1, total))

    return watch
