"""What an overload amounts to: from what was seen of every request to the figures that must hold. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from bench.load.overload_load import LAST_RETRY_S, Knock, Knocks, Stream, Try
from bench.load.overload_plan import SLO, Plan
from planner.bench.stats import percentile

RECOVERED_S, WATCHED_S = 10.0, 20.0
"""Ten seconds after the spike goodput must be back; it is looked at from then for ten more."""

WAITED = frozenset(("ttft", "waited_too_long"))
"""Reasons of refusals that come after waiting in the room, and so not at once."""


class Times(msgspec.Struct, frozen=True):
    """Round trips, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float


class Bound(msgspec.Struct, frozen=True):
    """One line that must hold. `least`: the value may not be below the limit; else it may not be above."""

    name: str
    value: float
    limit: float
    least: bool = False
    unit: str = ""

    @property
    def held(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit


class Figures(msgspec.Struct, frozen=True):
    """One run in numbers. Shares are of 1.

    idle, busy      round trips to a server that does nothing: on the idle machine, and beside the spike and the storm
    shed            from a request's sending to the 429 in its client's socket, of those refused at the door in the
                    spike and the storm
    shed_inside     the gateway's own part of it, by its access line
    unread          for how long these 429s lay there: the client's process had others to read, or no core
    waited          refusals after waiting in the room, and how long that took
    streams_open    long answers that flowed from the spike to the storm; streams_good: share that kept the budget then
    accepted, accepted_good   requests let in during the spike, and the share of them that kept both budgets
    good_after      good requests let in 10 to 20 s after the spike, those of clients who came back too, over new ones
    fresh_after     of those new ones, the share let in at once and good
    calm_after      the same after the storm, once its last clients have tried for the last time
    first_retry     of the clients refused in the spike and told when to come, the share let in when they did
    told            share of the refused who were told a time
    tries           sendings per client in the storm
    amplification   requests that reached the engines from the storm on, over clients that sent any
    """

    idle: Times
    busy: Times
    shed: Times
    shed_inside: Times
    unread: Times
    waited: Times
    refused: Mapping[str, int]
    streams_open: int
    streams_good: float
    offered: int
    accepted: int
    accepted_good: float
    good_after: float
    fresh_after: float
    calm_after: float
    first_retry: float
    told: float
    tries: float
    amplification: float

    def bounds(self) -> Iterator[Bound]:
        """What must hold."""
        idle_ms = self.idle.p50_ms
        yield Bound("open streams", self.streams_open, 600, least=True)
        yield Bound("429 above the idle loopback, p50", self.shed.p50_ms - idle_ms, 2.0, unit=" ms")
        yield Bound("429 above the idle loopback, p99", self.shed.p99_ms - idle_ms, 5.0, unit=" ms")
        yield Bound(
            "let in during the spike, both budgets kept", self.accepted_good, 0.95, least=True
        )
        yield Bound(
            "streams in the spike, budget per token kept", self.streams_good, 0.95, least=True
        )
        yield Bound(
            "goodput 10 s after the spike, over what is newly asked",
            self.good_after,
            0.95,
            least=True,
        )
        yield Bound("good 10 s after the storm, of all", self.calm_after, 0.95, least=True)
        yield Bound(
            "let in at the first retry, of those that obey", self.first_retry, 0.90, least=True
        )
        yield Bound("engines' requests per client in the storm", self.amplification, 1.2)


class Refusal(msgspec.Struct, frozen=True):
    """A refusal as the gateway's access line tells it."""

    reason: str
    inside_s: float


def figures(
    plan: Plan, seen: Knocks, streams: Sequence[Stream], refusals: Mapping[str, Refusal], sent: int
) -> Figures:
    """`refusals` by request id; `sent`: requests that reached the engines from the storm's begin on."""
    spike, storm = plan.window("spike"), plan.window("storm")
    refused = [
        one for one in _tries(seen.knocks) if one.status == 429 and one.answered_s is not None
    ]
    in_overload = [
        one for one in refused if _within(one.sent_s, spike) or _within(one.sent_s, storm)
    ]
    at_door = [one for one in in_overload if _reason(one, refusals) not in WAITED]
    waited = [one for one in in_overload if _reason(one, refusals) in WAITED]
    accepted = [
        one
        for one in seen.knocks
        if one.tries[-1].status == 200 and _within(one.tries[-1].due_s, spike)
    ]
    after = spike[1] + RECOVERED_S, spike[1] + WATCHED_S
    over_s = storm[1] + LAST_RETRY_S  # until then those who do not obey come again
    calm = over_s + RECOVERED_S, over_s + WATCHED_S
    return Figures(
        idle=times(seen.idle_s),
        busy=times([took for at, took in seen.busy_s if _within(at, spike) or _within(at, storm)]),
        shed=times(map(_took_s, at_door)),
        shed_inside=times(refusals[one.id].inside_s for one in at_door if one.id in refusals),
        unread=times(one.unread_s for one in at_door),
        waited=times(map(_took_s, waited)),
        refused=_by_reason(in_overload, refusals),
        streams_open=sum(_open(plan, one) for one in streams),
        streams_good=_share(streams, lambda one: _flowed(plan, one)),
        offered=sum(_within(one.tries[0].due_s, spike) for one in seen.knocks),
        accepted=len(accepted),
        accepted_good=_share(accepted, good),
        good_after=_good_in(seen.knocks, after) / max(1, len(list(_fresh(seen.knocks, after)))),
        fresh_after=_share(list(_fresh(seen.knocks, after)), good_at_once),
        calm_after=_share(list(_fresh(seen.knocks, calm)), good_at_once),
        first_retry=_share(_came_back(plan, seen.knocks), lambda one: one.tries[1].status == 200),
        told=_share(refused, lambda one: one.retry_after_s is not None),
        tries=_mean([len(one.tries) for one in seen.knocks if _within(one.tries[0].due_s, storm)]),
        amplification=sent / max(1, sum(one.tries[-1].sent_s >= storm[0] for one in seen.knocks)),
    )


def good(knock: Knock) -> bool:
    """Whether its answer was whole, or still flowing at the run's end, and kept both budgets from the try let in on."""
    if not (knock.whole or knock.cut) or knock.first_s is None or knock.last_s is None:
        return False
    tpot_s = (knock.last_s - knock.first_s) / max(1, knock.tokens - 1)
    return knock.first_s - knock.tries[-1].due_s <= SLO.ttft_s and tpot_s <= SLO.tpot_s


def good_at_once(knock: Knock) -> bool:
    return len(knock.tries) == 1 and good(knock)


def times(seconds: Iterable[float]) -> Times:
    """Their count and percentiles; zeros for none."""
    ordered = sorted(seconds)
    if not ordered:
        return Times(0, 0.0, 0.0)
    return Times(len(ordered), percentile(ordered, 50) * 1e3, percentile(ordered, 99) * 1e3)


def _tries(knocks: Sequence[Knock]) -> Iterator[Try]:
    return (one for knock in knocks for one in knock.tries)


def _within(moment_s: float, window: tuple[float, float]) -> bool:
    return window[0] <= moment_s < window[1]


def _took_s(one: Try) -> float:
    return (one.answered_s or 0.0) - one.sent_s


def _reason(one: Try, refusals: Mapping[str, Refusal]) -> str:
    found = refusals.get(one.id)
    return "unknown" if found is None else found.reason


def _by_reason(tries: Sequence[Try], refusals: Mapping[str, Refusal]) -> dict[str, int]:
    names = [_reason(one, refusals) for one in tries]
    return {name: names.count(name) for name in sorted(set(names))}


def _open(plan: Plan, one: Stream) -> bool:
    """Whether it flowed from the spike's beginning to the storm's end."""
    names = [phase.name for phase in plan.phases]
    return all(one.tokens[at] > 1 for at in range(names.index("spike"), names.index("storm") + 1))


def _flowed(plan: Plan, one: Stream) -> bool:
    """Whether it kept its budget per token through the spike."""
    at = [phase.name for phase in plan.phases].index("spike")
    return one.tokens[at] > 1 and one.lasted_s[at] / (one.tokens[at] - 1) <= SLO.tpot_s


def _fresh(knocks: Sequence[Knock], window: tuple[float, float]) -> Iterator[Knock]:
    """Clients that came for the first time then."""
    return (one for one in knocks if _within(one.tries[0].due_s, window))


def _good_in(knocks: Sequence[Knock], window: tuple[float, float]) -> int:
    """Good answers to what was let in then."""
    return sum(good(one) for one in knocks if _within(one.tries[-1].due_s, window))


def _came_back(plan: Plan, knocks: Sequence[Knock]) -> list[Knock]:
    """Clients who were refused in the spike, were told a time, and came."""
    spike = plan.window("spike")
    refused = [one for one in knocks if _within(one.tries[0].due_s, spike) and len(one.tries) > 1]
    return [one for one in refused if one.tries[0].retry_after_s is not None]


Item = Knock | Stream | Try


def _share(items: Sequence[Item], holds: Callable[..., bool]) -> float:
    """Of how many it holds; 0 of none."""
    return sum(map(holds, items)) / len(items) if items else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
