"""The main loop of a replay: the heap of events, and each request from arrival to its end.

    run = replay(preset("F1"), traffic(requests), registry.build("prefix_aware", {}))

Mock engines (groups) serve the requests, and the gateway's own code routes them. All events are in
one heap, and nothing waits in real time. Runs with equal seeds are equal.

- admission_sim.py: admission
- client_retries.py: when refused clients return
- gateway_sim.py: the gateway's information and decisions
- engine_sim.py: the computation of a group
- disagg_sim.py: split requests
- pull_sim.py and store_sim.py: KV that is fetched instead of computed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from time import perf_counter
from typing import Any

from msgspec.structs import replace

from mockgpu.scheduler import Job
from mockgpu.split_legs import DecodeLeg
from planner.replay.admission_sim import AdmissionSim
from planner.replay.block_chain import AnswerBlocks, UnlimitedCache, keys_of
from planner.replay.disagg_sim import DisaggSim
from planner.replay.fault_events import FaultEvents
from planner.replay.fleet_spec import FleetSpec
from planner.replay.gateway_sim import GatewaySim
from planner.replay.group_sim import ReplayGroup, build_engines
from planner.replay.hedge_sim import Hedges
from planner.replay.inflight_request import InflightRequest
from planner.replay.pull_sim import PullSim
from planner.replay.replay_options import CacheView, ReplayOptions
from planner.replay.results import ReplayRecord, ReplayRun, RequestEnd
from planner.replay.speed_monitor_sim import SpeedMonitorSim
from planner.replay.store_sim import StoreSim
from planner.replay.traffic import Traffic
from planner.traces.recorded_request import TraceRequest
from policies import load_ledger
from policies.admission.admission_policy import Admission, WaitQueueLimits
from policies.admission.fairness import FairShares
from policies.admission.wait_queue import WaitQueue
from policies.policy_types import Policy
from policies.routing_types import Candidate, Pick, Role, RoutingQuery

MOST_TRIES = 3
"""Maximum number of attempts of one request before its first token, as with the gateway's
retries.
"""


def replay(
    spec: FleetSpec,
    traffic: Traffic,
    policy: Policy,
    admission: Admission | None = None,
    options: ReplayOptions | None = None,
    limits: WaitQueueLimits | None = None,
    shares: FairShares | None = None,
    watch: Callable[[float, int], None] | None = None,
) -> ReplayRun:
    """Replay the traffic on a fleet with empty caches, and return the run.

    spec       the fleet
    traffic    the requests
    policy     the routing policy. It learns, so build a new one for every replay
    admission  the admission policy, which learns too; None: every request enters at once, whatever
               the groups' caps
    options    the options of the replay; None: the defaults
    limits     limits of the wait queue
    shares     how tenants share a full pool
    watch      called with (clock, finished requests) at every end of a request
    """
    wait_queue = None if admission is None else WaitQueue[int](admission, limits, shares)
    return Fleet(spec, traffic, policy, wait_queue, options or ReplayOptions(), watch).run()


class Fleet:
    """A replay in progress: its queue of future events, its requests, and its simulated engines.

    A simulated engine is called a group.
    """

    def __init__(
        self,
        spec: FleetSpec,
        traffic: Traffic,
        policy: Policy,
        wait_queue: WaitQueue[int] | None,
        options: ReplayOptions,
        watch: Callable[[float, int], None] | None = None,
    ) -> None:
        self.options = options
        self._spec, self._traffic, self._watch = spec, traffic, watch
        self.engines = build_engines(
            spec, self, options.merges_steps, has_caps=wait_queue is not None
        )
        self.groups = [group for ranks in self.engines for group in ranks]
        reads_forecast = policy.reads_forecast or (
            wait_queue is not None and wait_queue.admission.reads_forecast
        )
        for group in self.groups:
            load_ledger.set_modelled(group.load, options.always_predicts or reads_forecast, 0.0)
        if spec.ideal_cache:  # the prefix index would know of one engine alone
            self.options = options = replace(options, view=CacheView.EXACT)
        self.gateway = GatewaySim(policy, self.groups, options, spec.block_tokens, perf_counter)
        split = spec.pairs or any(kind.role is not Role.BOTH for kind in spec.groups)
        self.disagg = DisaggSim(self, spec.split, policy) if split else None
        self.stores = StoreSim(self, spec.block_tokens)
        self.pulls = PullSim(self, policy, spec) if _can_pull(spec, policy) else None
        self.admission = AdmissionSim(self, wait_queue)
        self.speed_monitor = SpeedMonitorSim(self, self.options.slow_factor)
        self.hedges = Hedges(self, self.options.hedge_share)
        self._ideal = UnlimitedCache(spec.block_tokens)
        self._answers = AnswerBlocks(spec.block_tokens) if spec.caches_answers else None
        self.inflight: dict[Job, InflightRequest] = {}
        self._records: list[ReplayRecord] = []
        self._heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._order = self._over = 0
        self.running_requests = 0
        self._last_s = 0.0

    @property
    def arrived(self) -> int:
        return len(self._records)

    def run(self) -> ReplayRun:
        """Process all events of the replay, and return the run.

        It ends with the last token, or at the time `horizon_s` of the options.
        """
        began = perf_counter()
        self._prepare()
        heap, horizon_s = self._heap, self.options.horizon_s
        while heap:
            now, _, callback, what = heappop(heap)
            if horizon_s is not None and now > horizon_s:
                break
            callback(now, what)
        return self._report(perf_counter() - began)

    def schedule(
        self, when_s: float, callback: Callable[[float, Any], None], what: Any = None
    ) -> None:
        """Schedule the call `callback(when_s, what)` for the virtual time `when_s`.

        Events of the same moment run in the order in which they were scheduled.
        """
        self._order += 1
        heappush(self._heap, (when_s, self._order, callback, what))

    def _prepare(self) -> None:
        for request in sorted(self._traffic.arrivals, key=lambda request: request.arrival_s):
            self._schedule_arrival(request.arrival_s, request, None)
        for loop in self._traffic.loops:
            self._schedule_next(loop.begins_s, loop.requests(), first=True)
        FaultEvents(self).announce()
        self.admission.open()
        self.speed_monitor.open()

    def _schedule_arrival(
        self, when_s: float, request: TraceRequest, remaining: Iterator[TraceRequest] | None
    ) -> None:
        self.running_requests += 1
        self.schedule(when_s, self._arrive, (request, remaining))

    def _schedule_next(
        self, now: float, remaining: Iterator[TraceRequest], first: bool = False
    ) -> None:
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
        record = ReplayRecord(
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
        request = self.gateway.request(record, trace_request)
        fingerprint = self.gateway.fingerprint(request, trace_request, keys)
        inflight = InflightRequest(record, trace_request, request, keys, fingerprint, remaining)
        if self._fits(trace_request):
            self.admission.arrive(now, inflight)
        else:
            self.end(now, inflight, RequestEnd.SHED, "too_long")

    def _fits(self, request: TraceRequest) -> bool:
        if self.disagg is None:
            return bool(self.gateway.fitting(request))
        pools = self.disagg.fitting(request)
        return bool(pools.alone or pools.groups)

    # Methods that send requests to a group

    def serve(self, now: float, inflight: InflightRequest, query: RoutingQuery) -> None:
        """Pick a simulated engine for the request, reserve capacity there, and send the request.

        As in the gateway, no other request is routed between these actions.
        """
        if self.disagg is not None and self.disagg.serve(now, inflight, query):
            return
        candidates = self._single_candidates(inflight.trace_request)
        pick = self.gateway.pick(query, candidates) or self.gateway.pick_over_cap(query, candidates)
        if pick is None:
            self.admission.on_not_routed(now, inflight)
            return
        if self.pulls is not None:
            pick = self.pulls.choose(now, inflight, query, candidates, pick)
        group = self.groups[pick.candidate.load.slot]
        self.admission.on_reserved(query, pick)
        if inflight.first_pick is None:
            inflight.first_pick, inflight.first_cached = pick, query.cached_by_slot
        self.start(now, inflight, group, pick)
        assert inflight.reservation is not None
        inflight.record.predicted_ttft_s = inflight.reservation.predicted_ttft_s
        inflight.record.predicted_tpot_s = inflight.reservation.predicted_tpot_s
        # An earlier attempt may have been split.
        inflight.record.group, inflight.record.prefilled_by = group.name, ""

    def start(self, now: float, inflight: InflightRequest, group: ReplayGroup, pick: Pick) -> None:
        # The time of a pull says nothing about the speed of the engine.
        inflight.reservation = load_ledger.reserve(
            group.load, inflight.request, pick.cached_tokens, now, inflight.pull is None
        )
        inflight.believed_tokens = pick.cached_tokens
        inflight.ahead_tokens, inflight.sent_s = group.load.prefill_tokens, now
        inflight.is_overtaken = False
        tokens = max(1, inflight.trace_request.input_tokens - inflight.believed_tokens)
        group.speed.on_sent(tokens, now, is_decoding=group.load.decoding > 0)
        trace_request, keys = inflight.trace_request, self.job_keys(inflight)
        job = Job(trace_request.input_tokens, trace_request.output_tokens, keys)
        job.restores = self.stores.may_fetch(group, inflight)
        if job.restores:
            self.stores.watch(group)
        self.send(now, inflight, group, pick, job)

    def job_keys(self, inflight: InflightRequest) -> tuple[int, ...]:
        """Return the ids of the KV blocks that a request adds to the cache of its engine."""
        if self._answers is None:
            return inflight.keys
        return self._answers.append_to(inflight.keys, inflight.trace_request)

    def _single_candidates(self, request: TraceRequest) -> Sequence[Candidate]:
        return (
            self.gateway.fitting(request)
            if self.disagg is None
            else self.disagg.fitting(request).alone
        )

    def send(
        self, now: float, inflight: InflightRequest, group: ReplayGroup, pick: Pick, job: Job
    ) -> None:
        """Send a request's work (job) to a simulated engine (group).

        The gateway's prefix index records that the engine will have the prompt cached. The job
        enters the engine's queue after the API latency.
        """
        if inflight.record.entered_s is None:
            inflight.record.entered_s = now
            inflight.record.ideal_tokens = self._ideal.hit(
                inflight.keys, inflight.request.prompt_tokens
            )
        inflight.group, inflight.job = group, job
        if inflight.pull is None:
            self.gateway.learn(inflight.fingerprint, pick, inflight.request.prompt_tokens)
        if self.options.view is CacheView.EXACT or self.pulls is not None:
            group.expect(inflight.keys)
            inflight.is_expected = True
        self.inflight[job] = inflight
        self.schedule(now + group.kind.software.request_s, self.enter, (group, job))

    def enter(self, now: float, what: tuple[ReplayGroup, Job]) -> None:
        """Put a job that has reached its engine into the queue, unless it was cancelled on the way.

        what  the engine (group) and the job
        """
        group, job = what
        if job in self.inflight:
            group.engine.add(job, now)
            self.wake(now, group)

    def wake(self, now: float, group: ReplayGroup) -> None:
        """Let a group's engine read its queue after the current step, or now if the engine is idle.

        An idle engine starts after all other events of this moment, so that simultaneous jobs start
        together.
        """
        if group.engine.due_s == inf:
            self.schedule(now, self._on_wake, group)
        else:
            group.engine.wake(now)
            self.watch(group)

    def _on_wake(self, now: float, group: ReplayGroup) -> None:
        if group.is_alive:
            group.engine.wake(now)
            self.watch(group)

    def watch(self, group: ReplayGroup) -> None:
        due_s = group.engine.due_s
        if due_s != group.watched_s:
            group.watched_s = due_s
            if due_s < inf:
                self.schedule(due_s, self._advance, group)

    def _advance(self, now: float, group: ReplayGroup) -> None:
        if group.engine.due_s == now:
            group.watched_s = inf
            group.engine.advance(now)
            self.watch(group)

    # Results

    def on_first_token(self, group: ReplayGroup, job: Job, now: float) -> None:
        """Record that an engine has generated the first token of a job, and learn from its time.

        If the job is the prefill half of a split request, this is not yet the request's first
        token.
        """
        inflight = self.inflight[job]
        if inflight.race is not None:
            inflight = self.hedges.decide(now, inflight)
        self.stop_expecting(now, inflight)
        group.totals.prompt_tokens += 0 if isinstance(job.leg, DecodeLeg) else job.prompt_tokens
        group.totals.cached_tokens += 0 if isinstance(job.leg, DecodeLeg) else job.cached
        if job.keeps_blocks:
            assert inflight.prefill_reservation is not None
            inflight.prefill_reservation.on_first_token(now)
            return
        assert inflight.reservation is not None
        inflight.reservation.on_first_token(now)
        record = inflight.record
        if not record.prefilled_by:
            group.speed.on_first_token(
                max(1, job.prompt_tokens - inflight.believed_tokens),
                now,
                budget_tokens=group.load.belief.shape.budget_tokens,
            )
        record.first_s = now
        if self.pulls is not None:
            self.pulls.on_first_token(now, inflight)
        if not record.prefilled_by:
            record.cached_tokens = job.cached
        elif self.disagg is not None:
            self.disagg.on_first_token(now, inflight)

    def on_blocks_allocated(self, group: ReplayGroup, job: Job, now: float) -> None:
        """Start to fetch a job's KV from a store or another group: its blocks are allocated."""
        if job.restores:
            self.stores.fetch(group, job, now)
            return
        assert self.disagg is not None
        self.disagg.fetch(group, job, now)

    def stop_expecting(self, now: float, inflight: InflightRequest) -> None:
        """Record that a group has computed a request's KV blocks, or will not compute them.

        The blocks no longer count as blocks that the group will soon have cached.
        """
        if inflight.is_expected:
            inflight.is_expected = False
            assert inflight.group is not None
            inflight.group.expect_no_more(inflight.keys)
            self.stores.on_computed(now, inflight.group)

    def on_last_token(self, group: ReplayGroup, job: Job, now: float) -> None:
        """Record that a job is complete: its request ends, or its decode half starts."""
        inflight = self.inflight.pop(job)
        if job.keeps_blocks:
            assert self.disagg is not None
            self.disagg.on_prefilled(now, inflight, group, job)
            return
        record, entry = inflight.record, inflight.reservation
        assert entry is not None
        record.longest_gap_s = group.engine.longest_gap_s(job, record.first_s or now)
        record.preemptions += job.preemptions
        record.done_s = now
        entry.finish(now, record.output_tokens)
        self.gateway.learn_length(record)
        inflight.reservation = None
        if not record.prefilled_by:
            record.believed_tokens = inflight.believed_tokens
            if inflight.pull is None:
                self.gateway.confirm(
                    group.load.slot, inflight.believed_tokens, job.cached, job.prompt_tokens
                )
        self.stores.save(now, group, job)
        group.totals.output_tokens += job.output_tokens
        group.totals.requests += 1
        self.end(now, inflight, RequestEnd.SERVED, "")

    def end(self, now: float, inflight: InflightRequest, end: RequestEnd, reason: str) -> None:
        """End a request with this result and reason.

        Every request of the replay ends by this call.
        """
        inflight.has_ended = True
        record = inflight.record
        record.end, record.reason = end, reason
        self.running_requests -= 1
        self._over += 1
        self._last_s = now
        if self._watch is not None:
            self._watch(now, self._over)
        self.admission.on_ended(now, inflight)
        if inflight.next_requests is not None:
            self._schedule_next(now, inflight.next_requests)

    def withdraw(self, now: float, inflight: InflightRequest) -> None:
        """Cancel all that runs for a request: its job, its KV transfer, and its second attempt.

        Tokens computed so far count as wasted.
        """
        job, group = inflight.job, inflight.group
        if inflight.race is not None:
            self.hedges.end_race(now, inflight)
        self.stop_expecting(now, inflight)
        if job is not None and group is not None and self.inflight.pop(job, None) is not None:
            inflight.record.wasted_tokens += max(0, job.computed - max(0, job.cached))
            if group.is_alive and group.engine.holds(job):
                scheduler = group.engine.scheduler_of(job)
                group.engine.abort(job, now)
                scheduler.release_kept(job)
                self.wake(now, group)
            # The index has not learned the prompt at a decode group before the first token.
            if group.is_alive and group is not inflight.decode_group:
                self.gateway.forget_prompt(
                    inflight.fingerprint,
                    group.load.slot,
                    inflight.believed_tokens,
                    inflight.request.prompt_tokens,
                )
        if self.disagg is not None:
            self.disagg.withdraw(now, inflight)
        if self.pulls is not None:
            self.pulls.withdraw(inflight)
        is_awaited = (
            inflight.record.first_s is None
            and not inflight.record.prefilled_by
            and not inflight.is_overtaken
        )
        if group is not None and is_awaited:
            self.speed_monitor.on_dropped(now, inflight, group)
        if inflight.reservation is not None:
            inflight.reservation.drop(now)
            inflight.reservation = None
        inflight.job = inflight.group = None

    def retry_elsewhere(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Send a request to another engine, because the engine that served it (`group`) has failed.

        If the answer had begun, the request ends instead.
        """
        self.withdraw(now, inflight)
        if inflight.is_hedge:
            return
        inflight.failed_endpoints |= {group.name}
        if inflight.record.first_s is not None or len(inflight.failed_endpoints) >= MOST_TRIES:
            self.end(now, inflight, RequestEnd.LOST, "engine_dead")
            return
        inflight.record.retries += 1
        self.serve(now, inflight, self.gateway.query(inflight, now))

    def _report(self, wall_s: float) -> ReplayRun:
        for group in self.groups:
            if group.is_alive:
                group.add_totals()
        totals = [group.totals for group in self.groups]
        return ReplayRun(
            policy=self.gateway.policy.name,
            fleet=self._spec.name,
            records=self._records,
            groups=totals,
            ended_s=self._last_s,
            picks=self.gateway.picks,
            pick_s=self.gateway.pick_s,
            wall_s=wall_s,
        )


def _can_pull(spec: FleetSpec, policy: Policy) -> bool:
    has_source = spec.pulls or any(kind.store_gb for kind in spec.kinds)
    return has_source and policy.phase_prices is not None
