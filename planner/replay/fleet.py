"""The virtual clock: traffic in, mock TP groups behind the gateway's own decisions, one record per
request out.

    run = replay(preset("F1"), traffic(requests), registry.build("prefix_aware", {}))

All events are in one heap; nothing waits or sleeps, and an equal seed gives an equal run. Admission
and retries are in admission_sim.py, the gateway's view and decisions in gateway_sim.py, a group's
computation in engine.py, split requests in disagg_sim.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from time import perf_counter
from typing import Any

from mockgpu.job import Job, State
from mockgpu.leg_params import Take
from planner.replay.admission_sim import Door
from planner.replay.block_chain import Ideal, keys_of
from planner.replay.disagg_sim import Halves
from planner.replay.fault_events import Happenings
from planner.replay.gateway_sim import Front
from planner.replay.group import Group
from planner.replay.hedge_sim import Hedges
from planner.replay.inflight import Flight
from planner.replay.options import Options, View
from planner.replay.record import End, Record, Run
from planner.replay.spec import FleetSpec
from planner.replay.speed_monitor_sim import Speeds
from planner.replay.traffic import Traffic
from planner.traces.shape import TraceRequest
from policies import ledger
from policies.admission.admission import Admission, WaitingRoom
from policies.admission.fairness import FairShares
from policies.admission.wait_queue import Room
from policies.contract import Policy
from policies.model import Ask, Candidate, Pick, Role

MOST_TRIES = 3
"""Attempts of one request before its first token, like the gateway's retries."""


def replay(
    spec: FleetSpec,
    traffic: Traffic,
    policy: Policy,
    admission: Admission | None = None,
    options: Options | None = None,
    limits: WaitingRoom | None = None,
    shares: FairShares | None = None,
    watch: Callable[[float, int], None] | None = None,
) -> Run:
    """Replay the traffic on a cold fleet.

    `policy` and `admission` learn, so build new ones for every replay.

    admission None: every request enters at once, whatever the groups' caps. `watch` is called with
    (clock, finished requests) at every end of a request.
    """
    room = None if admission is None else Room[int](admission, limits, shares)
    return Fleet(spec, traffic, policy, room, options or Options(), watch).run()


class Fleet:
    """One running replay. Owner of the event heap, the requests and the groups."""

    def __init__(
        self,
        spec: FleetSpec,
        traffic: Traffic,
        policy: Policy,
        room: Room[int] | None,
        options: Options,
        watch: Callable[[float, int], None] | None = None,
    ) -> None:
        self.options = options
        self._spec, self._traffic, self._watch = spec, traffic, watch
        rooflines = {kind: kind.roofline() for kind in set(spec.groups)}
        self.groups = [
            Group(
                slot,
                kind,
                rooflines[kind],
                spec.block_tokens,
                self,
                options.leaping,
                capped=room is not None,
            )
            for slot, kind in enumerate(spec.groups)
        ]
        self.front = Front(policy, self.groups, options, spec.block_tokens, perf_counter)
        split = spec.pairs or any(kind.role is not Role.BOTH for kind in spec.groups)
        self.halves = Halves(self, spec.split, policy) if split else None
        self.door = Door(self, room)
        self.speeds = Speeds(self, self.options.slow_factor)
        self.hedges = Hedges(self, self.options.hedge_share)
        self._ideal = Ideal(spec.block_tokens)
        self.flights: dict[Job, Flight] = {}
        self._records: list[Record] = []
        self._heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._order = self._over = 0
        self.under_way = 0
        self._last_s = 0.0

    @property
    def arrived(self) -> int:
        """Requests that have arrived so far."""
        return len(self._records)

    def run(self) -> Run:
        """Process all events, to the last token or the horizon."""
        began = perf_counter()
        self._prepare()
        heap, horizon_s = self._heap, self.options.horizon_s
        while heap:
            now, _, act, what = heappop(heap)
            if horizon_s is not None and now > horizon_s:
                break
            act(now, what)
        return self._report(perf_counter() - began)

    def at(self, when_s: float, act: Callable[[float, Any], None], what: Any = None) -> None:
        """Schedule an event.

        Events of the same moment run in the order in which they were scheduled.
        """
        self._order += 1
        heappush(self._heap, (when_s, self._order, act, what))

    def _prepare(self) -> None:
        for request in sorted(self._traffic.arrivals, key=lambda request: request.arrival_s):
            self._schedule_arrival(request.arrival_s, request, None)
        for loop in self._traffic.loops:
            self._schedule_next(loop.begins_s, loop.requests(), first=True)
        Happenings(self).announce()
        self.door.open()
        self.speeds.open()

    def _schedule_arrival(
        self, when_s: float, request: TraceRequest, remaining: Iterator[TraceRequest] | None
    ) -> None:
        self.under_way += 1
        self.at(when_s, self._arrive, (request, remaining))

    def _schedule_next(
        self, now: float, remaining: Iterator[TraceRequest], first: bool = False
    ) -> None:
        """Schedule the next request of a closed loop, if there is one."""
        request = next(remaining, None)
        if request is not None:
            self._schedule_arrival(
                now if first else now + (request.think_s or 0.0), request, remaining
            )

    def _arrive(
        self, now: float, event: tuple[TraceRequest, Iterator[TraceRequest] | None]
    ) -> None:
        trace_request, remaining = event
        options = self.options
        slo = options.classes.get(trace_request.slo, options.standard)
        record = Record(
            len(self._records),
            now,
            trace_request.input_tokens,
            trace_request.output_tokens,
            slo,
            trace_request.tenant,
            trace_request.session,
        )
        self._records.append(record)
        keys = keys_of(trace_request, self._spec.block_tokens)
        request = self.front.request(record, trace_request)
        flight = Flight(
            record, trace_request, request, keys, self.front.fingerprint(request, keys), remaining
        )
        if self._fits(trace_request):
            self.door.arrive(now, flight)
        else:
            self.over_with(now, flight, End.SHED, "too_long")

    def _fits(self, request: TraceRequest) -> bool:
        """Return whether there are groups whose KV could hold the request, whole or split."""
        if self.halves is None:
            return bool(self.front.fitting(request))
        pools = self.halves.fitting(request)
        return bool(pools.alone or pools.groups)

    # Sending to a group

    def serve(self, now: float, flight: Flight, query: Ask) -> None:
        """Pick a group and book the request in one step, as the gateway does, then send it to the
        engine.
        """
        if self.halves is not None and self.halves.serve(now, flight, query):
            return
        pick = self.front.pick(query, self._single_candidates(flight.one))
        if pick is None:
            self.door.nobody(now, flight)
            return
        group = self.groups[pick.candidate.load.slot]
        self.door.booked(query, pick)
        self.start(now, flight, group, pick)
        assert flight.entry is not None
        flight.record.predicted_ttft_s = flight.entry.predicted_ttft_s
        flight.record.predicted_tpot_s = flight.entry.predicted_tpot_s
        flight.record.group = group.name

    def start(self, now: float, flight: Flight, group: Group, pick: Pick) -> None:
        """Book the picked group and send it the whole request."""
        flight.entry = ledger.book(group.load, flight.request, pick.cached_tokens, now)
        flight.believed = pick.cached_tokens
        flight.ahead_tokens, flight.sent_s = group.load.prefill_tokens, now
        flight.is_overtaken = False
        group.speed.sent(max(1, flight.one.input_tokens - flight.believed), now)
        job = Job(flight.one.input_tokens, flight.one.output_tokens, flight.keys)
        self.send(now, flight, group, pick, job)

    def _single_candidates(self, request: TraceRequest) -> Sequence[Candidate]:
        """Return the groups that could serve the whole request."""
        return (
            self.front.fitting(request)
            if self.halves is None
            else self.halves.fitting(request).alone
        )

    def send(self, now: float, flight: Flight, group: Group, pick: Pick, job: Job) -> None:
        """Send a job to a group: update the index, and let the engine have it after the API
        latency.
        """
        if flight.record.entered_s is None:
            flight.record.entered_s = now
            flight.record.ideal_tokens = self._ideal.hit(flight.keys, flight.request.prompt_tokens)
        flight.group, flight.job = group, job
        self.front.learn(flight.fingerprint, pick, flight.request.prompt_tokens)
        if self.options.view is View.EXACT:
            group.expect(flight.keys)
            flight.expected = True
        self.flights[job] = flight
        self.at(now + group.kind.software.request_s, self.enter, (group, job))

    def enter(self, now: float, what: tuple[Group, Job]) -> None:
        """Put a job into the engine's queue, unless it was withdrawn."""
        group, job = what
        if job in self.flights:
            group.engine.scheduler.add(job)
            self.wake(now, group)

    def wake(self, now: float, group: Group) -> None:
        """Make an engine look at its queue: at the end of its current step, or now if idle.

        An idle engine wakes after all other events of this moment, so that simultaneous jobs start
        together.
        """
        if group.engine.due_s == inf:
            self.at(now, self._woken, group)
        else:
            group.engine.wake(now)
            self.watch(group)

    def _woken(self, now: float, group: Group) -> None:
        if group.alive:
            group.engine.wake(now)
            self.watch(group)

    def watch(self, group: Group) -> None:
        """Put the engine's next event on the heap."""
        due_s = group.engine.due_s
        if due_s != group.watched_s:
            group.watched_s = due_s
            if due_s < inf:
                self.at(due_s, self._advance, group)

    def _advance(self, now: float, group: Group) -> None:
        if group.engine.due_s == now:
            group.watched_s = inf
            group.engine.advance(now)
            self.watch(group)

    # Results

    def began(self, group: Group, job: Job, now: float) -> None:
        """Handle a job's first token."""
        flight = self.flights[job]
        if flight.race is not None:
            flight = self.hedges.decide(now, flight)
        self.computed(flight)
        group.totals.prompt_tokens += 0 if isinstance(job.leg, Take) else job.prompt_tokens
        group.totals.cached_tokens += 0 if isinstance(job.leg, Take) else job.cached
        if job.keep:
            assert flight.prefill_entry is not None
            flight.prefill_entry.first_token(now)
            return
        assert flight.entry is not None
        flight.entry.first_token(now)
        record = flight.record
        if not record.prefilled_by:
            group.speed.first_token(max(1, job.prompt_tokens - flight.believed), now)
        record.first_s = now
        if not record.prefilled_by:
            record.cached_tokens = job.cached

    def fetch(self, group: Group, job: Job, now: float) -> None:
        """Handle that a job whose KV comes from another group has its blocks allocated."""
        assert self.halves is not None
        self.halves.fetch(group, job, now)

    def computed(self, flight: Flight) -> None:
        """Remove the request's keys from those its group is about to compute."""
        if flight.expected:
            flight.expected = False
            assert flight.group is not None
            flight.group.expect_no_more(flight.keys)

    def ended(self, group: Group, job: Job, now: float) -> None:
        """Handle a job's last token."""
        flight = self.flights.pop(job)
        if job.keep:
            assert self.halves is not None
            self.halves.prefilled(now, flight, group, job)
            return
        record, entry = flight.record, flight.entry
        assert entry is not None
        record.longest_gap_s = group.engine.longest_gap_s(job, record.first_s or now)
        record.preemptions += job.preemptions
        record.done_s = now
        entry.finished(now, record.output_tokens)
        flight.entry = None
        if not record.prefilled_by:
            record.believed_tokens = flight.believed
            self.front.confirm(group.load.slot, flight.believed, job.cached, job.prompt_tokens)
        group.totals.output_tokens += job.output_tokens
        group.totals.requests += 1
        self.over_with(now, flight, End.SERVED, "")

    def over_with(self, now: float, flight: Flight, end: End, reason: str) -> None:
        """End a request. This is the only place where one ends."""
        flight.over = True
        record = flight.record
        record.end, record.reason = end, reason
        self.under_way -= 1
        self._over += 1
        self._last_s = now
        if self._watch is not None:
            self._watch(now, self._over)
        self.door.left(now, flight)
        if flight.rest is not None:
            self._schedule_next(now, flight.rest)

    def withdraw(self, now: float, flight: Flight) -> None:
        """Cancel a request wherever it is; what was computed for it is wasted."""
        job, group = flight.job, flight.group
        if flight.race is not None:
            self.hedges.end_race(now, flight)
        self.computed(flight)
        if job is not None and group is not None and self.flights.pop(job, None) is not None:
            flight.record.wasted_tokens += max(0, job.computed - max(0, job.cached))
            scheduler = group.engine.scheduler
            if group.alive and (job.state is not State.WAITING or job in scheduler.waiting):
                group.engine.abort(job, now)
                scheduler.let_go(job)
                self.wake(now, group)
            if group.alive:
                self.front.unlearn(
                    flight.fingerprint,
                    group.load.slot,
                    flight.believed,
                    flight.request.prompt_tokens,
                )
        if self.halves is not None:
            self.halves.withdraw(now, flight)
        is_awaited = (
            flight.record.first_s is None
            and not flight.record.prefilled_by
            and not flight.is_overtaken
        )
        if group is not None and is_awaited:
            group.speed.dropped(max(1, flight.one.input_tokens - flight.believed))
        if flight.entry is not None:
            flight.entry.dropped(now)
            flight.entry = None
        flight.job = flight.group = None

    def failed(self, now: float, flight: Flight, group: Group) -> None:
        """Retry a request after its group died, or end it if its answer had begun."""
        self.withdraw(now, flight)
        if flight.is_hedge:
            return
        flight.tried |= {group.name}
        if flight.record.first_s is not None or len(flight.tried) >= MOST_TRIES:
            self.over_with(now, flight, End.LOST, "engine_dead")
            return
        flight.record.moved += 1
        self.serve(now, flight, self.front.query(flight, now))

    def _report(self, wall_s: float) -> Run:
        for group in self.groups:
            if group.alive:
                group.count()
        totals = [group.totals for group in self.groups]
        return Run(
            policy=self.front.policy.name,
            fleet=self._spec.name,
            records=self._records,
            groups=totals,
            ended_s=self._last_s,
            picks=self.front.picks,
            pick_s=self.front.pick_s,
            wall_s=wall_s,
        )
