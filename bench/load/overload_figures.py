"""Computes the results of an overload run from the records of all requests, and checks limits.

The phases of a run (called spike and storm here) are explained in bench/load/overload.py. This
module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from bench.load.overload_load import LAST_RETRY_S, ClientRecord, ClientRecords, Stream, Try
from bench.load.overload_plan import SLO, Plan
from planner.bench.percentiles import percentile

RECOVERED_S, WATCHED_S = 10.0, 20.0
"""When goodput is measured after the spike.

It must have recovered RECOVERED_S seconds after the spike, and is then measured for WATCHED_S
seconds.
"""

WAITED = frozenset(("ttft", "waited_too_long"))
"""Reasons of refusals that requests get after a wait in the gateway's queue."""


class Times(msgspec.Struct, frozen=True):
    count: int
    p50_ms: float
    p99_ms: float


class Bound(msgspec.Struct, frozen=True):
    """A result of the overload run, and the limit that it must keep.

    value  the measured value
    limit  its limit
    least  True if the limit is a minimum, False if it is a maximum
    unit   text after the printed numbers
    """

    name: str
    value: float
    limit: float
    least: bool = False
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit


class Figures(msgspec.Struct, frozen=True):
    """The computed results of one overload run, such as goodput and waiting times.

    A spike is a load of twice the capacity with clients that obey Retry-After; a storm is the same
    with clients that ignore it. A request is good if it meets both latency budgets. Shares are
    between 0 and 1.

    idle              round trips to a server that only refuses, on the idle machine
    busy              the same round trips during the spike and the storm
    shed              time from sending a request to its 429 in the client's socket, for immediate
                      refusals in the spike and the storm
    shed_inside       the part of `shed` within the gateway, from the access log
    unread            time from the 429 in the client's socket until the client's process read it
    waited            time to a refusal of requests that waited in the queue first
    refused           number of refusals by reason
    streams_open      number of long streams that made progress from the spike to the storm
    streams_good      share of these streams within the TPOT budget during the spike
    offered           number of clients that arrived in the spike
    accepted          number of requests admitted during the spike
    accepted_good     share of the admitted requests that were good
    good_after        good requests admitted 10 to 20 s after the spike, divided by the number of
                      clients that arrived then; the requests include retries
    fresh_after       share of these new clients that were admitted at the first try and good
    calm_after        `fresh_after`, but after the storm, once its clients have given up
    first_retry       share of clients refused in the spike with a Retry-After that were admitted at
                      their first retry
    with_retry_after  share of the refusals that had a Retry-After
    tries             number of requests per client in the storm
    amplification     requests that reached the engines since the beginning of the storm, per client
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
    with_retry_after: float
    tries: float
    amplification: float

    def bounds(self) -> Iterator[Bound]:
        idle_ms = self.idle.p50_ms
        yield Bound("open streams", self.streams_open, 600, least=True)
        yield Bound("429 above the idle loopback, p50", self.shed.p50_ms - idle_ms, 2.0, unit=" ms")
        yield Bound("429 above the idle loopback, p99", self.shed.p99_ms - idle_ms, 5.0, unit=" ms")
        yield Bound(
            "admitted during the spike, within both budgets", self.accepted_good, 0.95, least=True
        )
        yield Bound(
            "streams in the spike, within the TPOT budget", self.streams_good, 0.95, least=True
        )
        yield Bound(
            "goodput 10 s after the spike, relative to new clients",
            self.good_after,
            0.95,
            least=True,
        )
        yield Bound("good 10 s after the storm, of new clients", self.calm_after, 0.95, least=True)
        yield Bound(
            "admitted at the first retry, of obedient clients", self.first_retry, 0.90, least=True
        )
        yield Bound("engines' requests per client in the storm", self.amplification, 1.2)


class Refusal(msgspec.Struct, frozen=True):
    reason: str
    inside_s: float


def figures(
    plan: Plan,
    records: ClientRecords,
    streams: Sequence[Stream],
    refusals: Mapping[str, Refusal],
    sent: int,
) -> Figures:
    """Compute the results of an overload run from the records of its requests.

    plan      the phases of the run
    refusals  refused requests in the access log, by request identifier
    sent      number of requests that reached the engines since the start of the storm
    """
    spike, storm = plan.window("spike"), plan.window("storm")
    refused = _refused(records.clients)
    in_overload = [item for item in refused if _in_overload(plan, item.sent_s)]
    immediate = [item for item in in_overload if _reason(item, refusals) not in WAITED]
    waited = [item for item in in_overload if _reason(item, refusals) in WAITED]
    accepted = _accepted(records.clients, spike)
    after = spike[1] + RECOVERED_S, spike[1] + WATCHED_S
    over_s = storm[1] + LAST_RETRY_S  # time of the last retry by clients of the storm
    new_after = list(_new_clients(records.clients, after))
    calm = over_s + RECOVERED_S, over_s + WATCHED_S
    return Figures(
        idle=times(records.idle_s),
        busy=times(took_s for sent_s, took_s in records.busy_s if _in_overload(plan, sent_s)),
        shed=times(map(_duration_s, immediate)),
        shed_inside=times(refusals[item.id].inside_s for item in immediate if item.id in refusals),
        unread=times(item.unread_s for item in immediate),
        waited=times(map(_duration_s, waited)),
        refused=_by_reason(in_overload, refusals),
        streams_open=sum(_flowed_throughout(plan, item) for item in streams),
        streams_good=_share(streams, lambda item: _kept_budget(plan, item)),
        offered=len(list(_new_clients(records.clients, spike))),
        accepted=len(accepted),
        accepted_good=_share(accepted, is_good),
        good_after=_good_in(records.clients, after) / max(1, len(new_after)),
        fresh_after=_share(new_after, is_good_at_once),
        calm_after=_share(list(_new_clients(records.clients, calm)), is_good_at_once),
        first_retry=_share(
            _obedient_retries(plan, records.clients), lambda item: item.tries[1].status == 200
        ),
        with_retry_after=_share(refused, lambda item: item.retry_after_s is not None),
        tries=_mean([len(item.tries) for item in _new_clients(records.clients, storm)]),
        amplification=sent
        / max(1, sum(item.tries[-1].sent_s >= storm[0] for item in records.clients)),
    )


def _refused(clients: Sequence[ClientRecord]) -> list[Try]:
    return [item for item in _tries(clients) if item.status == 429 and item.answered_s is not None]


def is_good(client: ClientRecord) -> bool:
    """Return whether a client got a complete answer within both latency budgets.

    The latency of the last attempt counts, which the gateway admitted. An answer that the end of
    the run interrupted counts as complete.
    """
    if not (client.whole or client.cut) or client.first_s is None or client.last_s is None:
        return False
    tpot_s = (client.last_s - client.first_s) / max(1, client.tokens - 1)
    return client.first_s - client.tries[-1].due_s <= SLO.ttft_s and tpot_s <= SLO.tpot_s


def is_good_at_once(client: ClientRecord) -> bool:
    return len(client.tries) == 1 and is_good(client)


def times(seconds: Iterable[float]) -> Times:
    """Return the number and percentiles of durations in seconds; zeros if there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return Times(0, 0.0, 0.0)
    return Times(len(ordered), percentile(ordered, 50) * 1e3, percentile(ordered, 99) * 1e3)


def _tries(clients: Sequence[ClientRecord]) -> Iterator[Try]:
    return (item for client in clients for item in client.tries)


def _within(moment_s: float, window: tuple[float, float]) -> bool:
    return window[0] <= moment_s < window[1]


def _in_overload(plan: Plan, moment_s: float) -> bool:
    return _within(moment_s, plan.window("spike")) or _within(moment_s, plan.window("storm"))


def _duration_s(item: Try) -> float:
    return (item.answered_s or 0.0) - item.sent_s


def _reason(item: Try, refusals: Mapping[str, Refusal]) -> str:
    refusal = refusals.get(item.id)
    return "unknown" if refusal is None else refusal.reason


def _by_reason(tries: Sequence[Try], refusals: Mapping[str, Refusal]) -> dict[str, int]:
    names = [_reason(item, refusals) for item in tries]
    return {name: names.count(name) for name in sorted(set(names))}


def _flowed_throughout(plan: Plan, item: Stream) -> bool:
    names = [phase.name for phase in plan.phases]
    first, last = names.index("spike"), names.index("storm")
    return all(item.tokens[phase] > 1 for phase in range(first, last + 1))


def _kept_budget(plan: Plan, item: Stream) -> bool:
    spike = [phase.name for phase in plan.phases].index("spike")
    return item.tokens[spike] > 1 and item.lasted_s[spike] / (item.tokens[spike] - 1) <= SLO.tpot_s


def _new_clients(
    clients: Sequence[ClientRecord], window: tuple[float, float]
) -> Iterator[ClientRecord]:
    return (item for item in clients if _within(item.tries[0].due_s, window))


def _accepted(clients: Sequence[ClientRecord], window: tuple[float, float]) -> list[ClientRecord]:
    return [
        item
        for item in clients
        if item.tries[-1].status == 200 and _within(item.tries[-1].due_s, window)
    ]


def _good_in(clients: Sequence[ClientRecord], window: tuple[float, float]) -> int:
    return sum(is_good(item) for item in clients if _within(item.tries[-1].due_s, window))


def _obedient_retries(plan: Plan, clients: Sequence[ClientRecord]) -> list[ClientRecord]:
    # Return the clients that were refused in the spike with a Retry-After, and retried.
    spike = plan.window("spike")
    refused = [
        item for item in clients if _within(item.tries[0].due_s, spike) and len(item.tries) > 1
    ]
    return [item for item in refused if item.tries[0].retry_after_s is not None]


Item = ClientRecord | Stream | Try


def _share(items: Sequence[Item], holds: Callable[..., bool]) -> float:
    # Return the share of items for which `holds` is true; 0 if there are no items.
    return sum(map(holds, items)) / len(items) if items else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
