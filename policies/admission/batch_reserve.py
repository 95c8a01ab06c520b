"""Decides when to reserve a part of a pool's capacity for batches that must end soon.

A batch has a completion window, the time within which its requests must be answered. A place is
capacity for one running request. Batches run on places that other requests leave free. If free
places may not suffice, batches also get reserved places, at the last moment at which the reserve
alone is still enough. This is the safety net of Wu et al., "Can't Be Late" (NSDI 2024), where free
places are spot instances and the reserve is on-demand instances.

On `places` places, requests of `work_s` seconds in total, each at most `longest_s`, end within

    (work_s - longest_s) / places + longest_s

seconds in any order (R. L. Graham, "Bounds for Certain Multiprocessing Anomalies", 1966). Batches
run in the order in which their windows end. So before the end of a window, the work of its batch
and of all earlier batches must be done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, inf

import msgspec

HEADROOM = 0.8
"""Share (0 to 1) of the time left in which a batch must be able to finish.

The rest is a margin: durations are estimates, and requests may take a quarter longer.
"""

RELEASE = 0.4
"""Share of the time left in which the reserve must be able to finish before it is returned.

It is below HEADROOM, so that places are not taken and returned many times. The last requests of a
batch, one for each place, keep their places in any case.
"""


class WindowDemand(msgspec.Struct, frozen=True):
    """What an unfinished batch still needs before its completion window ends.

    A place is capacity for one running request.

    id         the batch's id
    left_s     seconds until its window ends
    work_s     seconds that its unfinished requests need, one after another on one place
    longest_s  seconds that the longest unfinished request needs
    is_known   whether one of its requests was measured; if not, one reserved place is enough
    """

    id: str
    left_s: float
    work_s: float
    longest_s: float
    is_known: bool = True


class WindowPlan(msgspec.Struct, frozen=True):
    """The capacity of one pool that is reserved for batches.

    places   number of requests of batches that may run at once on reserved capacity
    hurried  ids of the batches whose requests run first, in that order
    behind   ids of the batches that will probably miss their completion window if free capacity
             stays as it is now
    """

    places: int = 0
    hurried: tuple[str, ...] = ()
    behind: frozenset[str] = frozenset()


class WindowPlanner:
    """Decides how much capacity of one pool is reserved so that its batches end in time.

    A batch has a window, the time within which its requests must be answered. Capacity is counted
    in places; a place can run one request at a time. Reserved places are returned only when batches
    are clearly ahead of time. Otherwise they would be reserved and returned many times a second.
    """

    __slots__ = ("_is_hurried",)

    def __init__(self) -> None:
        self._is_hurried = False

    def plan(self, demands: Sequence[WindowDemand], reserve: int, supply: float) -> WindowPlan:
        """Return how many places are reserved now, and for which batches.

        demands  the unfinished batches
        reserve  maximum number of reserved places; 0: none are reserved
        supply   number of places on which batches have recently run, a mean over some time

        A batch that cannot end in its window runs after the others, so that it does not delay them.
        It is still completed, because each of its results is of use.
        """
        # Without a reserve, a batch that needs less than one place still has time.
        feasible, behind = _split(demands, max(supply, float(max(1, reserve))))
        first = self._critical(feasible, reserve)
        ids = frozenset(demand.id for demand in behind if demand.is_known)
        self._is_hurried = reserve > 0 and bool(behind or first)
        if not self._is_hurried:
            return WindowPlan(behind=ids)
        hurried = (*first, *behind)
        most = max(_needed(feasible, HEADROOM), default=0.0)
        places = reserve if behind or most >= reserve else max(1, ceil(most))
        if not any(demand.is_known for demand in hurried):
            places = 1
        return WindowPlan(places, tuple(demand.id for demand in hurried), ids)

    def _critical(self, demands: list[WindowDemand], reserve: int) -> list[WindowDemand]:
        # Return the batches that have no time to wait for free places, and those before them.
        share = RELEASE if self._is_hurried else HEADROOM
        count = 0
        for index, (places, demand) in enumerate(
            zip(_needed(demands, share), demands, strict=True)
        ):
            is_last = 0.0 < demand.work_s <= reserve * demand.longest_s
            if places >= reserve or (self._is_hurried and is_last):
                count = index + 1
        return demands[:count]


def _split(
    demands: Sequence[WindowDemand], supply: float
) -> tuple[list[WindowDemand], list[WindowDemand]]:
    # Return the batches that can end in their windows on `supply` places, and the others.
    #
    # Both are in the order in which their windows end. The first can use all of the time left.
    feasible: list[WindowDemand] = []
    behind: list[WindowDemand] = []
    for demand in sorted(demands, key=lambda demand: (demand.left_s, demand.id)):
        is_late = list(_needed([*feasible, demand], 1.0))[-1] > supply
        (behind if is_late else feasible).append(demand)
    return feasible, behind


def _needed(demands: Sequence[WindowDemand], share: float) -> Iterator[float]:
    # Yield how many places each batch needs, for itself and all before it, if only `share` of the
    # time left is used. A batch without a measured request first runs one alone, on one place, and
    # has that much less time.
    work_s = longest_s = 0.0
    for demand in demands:
        work_s += demand.work_s
        longest_s = max(longest_s, demand.longest_s)
        alone_s = 0.0 if demand.is_known else demand.longest_s
        yield places_needed(work_s, longest_s, share * demand.left_s - alone_s)


def places_needed(work_s: float, longest_s: float, left_s: float) -> float:
    """Return the number of places that certainly suffice to finish the work in time.

    A place is capacity for one running request.

    work_s     seconds of work in total
    longest_s  seconds of the longest request
    left_s     seconds left

    The result may be a fraction: 0.5 means that one place would be busy for half of the time. It is
    inf if no number of places suffices, and 0 if there is no work.
    """
    if work_s <= 0.0:
        return 0.0
    others_s, usable_s = work_s - longest_s, left_s - longest_s
    if usable_s > 0.0:
        return max(0.0, others_s) / usable_s
    return 0.0 if usable_s == 0.0 and others_s <= 0.0 else inf
