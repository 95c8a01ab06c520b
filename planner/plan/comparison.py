"""Replays every pool of two configurations on the same traffic, and compares the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from planner.plan.config_to_replay import PoolCase
from planner.plan.recent_traffic import RecentTraffic
from planner.replay.fleet_sim import replay
from planner.replay.results import ReplayFigures, figures
from planner.replay.traffic import Traffic
from planner.traces.access_log import arrived_s
from planner.traces.recorded_request import TraceRequest


class PoolComparison(msgspec.Struct, frozen=True):
    """The results of one pool before and after a change of the configuration.

    pool    the pool's name
    before  results with the old configuration; None: the pool is new
    after   results with the new configuration; None: the pool was removed
    notes   what the comparison leaves out
    """

    pool: str
    before: ReplayFigures | None
    after: ReplayFigures | None
    notes: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Return the smallest increase of SLO attainment of a service class, -1 to 1.

        Attainment is the share of a class's requests served within their latency budgets. The
        increase is that from the old to the new configuration.
        """
        before, after = self.before, self.after
        if before is None or after is None:
            return 0.0
        known = [name for name in before.classes if name in after.classes]
        return min(
            (after.classes[name].attainment - before.classes[name].attainment for name in known),
            default=0.0,
        )


class ConfigComparison(msgspec.Struct, frozen=True):
    """The comparison of all pools of two configurations.

    requests  number of requests that were counted
    span_s    seconds of traffic in which they arrived
    blocks    whether the log has block ids of prompts, which show shared prefixes
    """

    pools: tuple[PoolComparison, ...]
    requests: int
    span_s: float
    blocks: bool


def plan(
    before: Mapping[str, PoolCase],
    after: Mapping[str, PoolCase],
    lately: RecentTraffic,
    seed: int = 0,
) -> ConfigComparison:
    """Replay every pool with both configurations, and return the comparison.

    before  the pools of the old configuration, by name
    after   the pools of the new configuration, by name
    lately  the recent requests of the access log
    seed    random seed of the replays

    Both are measured by the service classes of the old configuration.
    """
    pools = [
        _compare_pool(name, before.get(name), after.get(name), lately, seed)
        for name in dict.fromkeys((*before, *after))
    ]
    counted = [
        arrival_s for arrival_s in map(arrived_s, lately.lines) if arrival_s >= lately.from_s
    ]
    return ConfigComparison(
        tuple(pools),
        len(counted),
        max(counted, default=lately.from_s) - lately.from_s,
        lately.blocks,
    )


def _compare_pool(
    name: str,
    before: PoolCase | None,
    after: PoolCase | None,
    lately: RecentTraffic,
    seed: int,
) -> PoolComparison:
    known = before or after
    assert known is not None
    traffic = lately.requests(known.models)
    if not traffic:
        return PoolComparison(name, None, None, ("it got no requests",))
    figures_before = None if before is None else _run(before, before, traffic, lately, seed)
    figures_after = None if after is None else _run(after, before or after, traffic, lately, seed)
    return PoolComparison(name, figures_before, figures_after, _notes(before, after))


def _run(
    case: PoolCase,
    promises: PoolCase,
    requests: Sequence[TraceRequest],
    lately: RecentTraffic,
    seed: int,
) -> ReplayFigures:
    options = msgspec.structs.replace(
        case.options(seed), standard=promises.standard, classes=promises.classes
    )
    arrivals = Traffic(arrivals=requests)
    run = replay(
        case.fleet, arrivals, case.policy(), case.admission(), options, case.limits, case.shares
    )
    return figures(run, lately.warmup_s)


def _notes(before: PoolCase | None, after: PoolCase | None) -> tuple[str, ...]:
    notes = list((after or before).assumed)  # type: ignore[union-attr]
    if before is not None and after is not None:
        if (before.classes, before.standard) != (after.classes, after.standard):
            notes.append("service classes differ: both are measured by those now in force")
        if before.models != after.models:
            notes.append("it would serve other models: both get requests for the present ones")
    return tuple(notes)
