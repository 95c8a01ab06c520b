"""Simulates split requests in a replay: a prefill job, a KV transfer, and a decode job.

The transfer goes over the network links of the two groups (simulated engines). The gateway's own
Splitter decides which requests are split. KV blocks are kept and fetched as in a live mock engine.
"""

from __future__ import annotations

from math import inf

import msgspec

from mockgpu.scheduler import Job, JobState
from mockgpu.split_legs import AgentPeer, DecodeLeg
from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_interfaces import FleetPort
from planner.traces.recorded_request import TraceRequest
from policies import load_ledger
from policies.policy_types import Policy
from policies.pricing.split_decision import (
    EndpointPair,
    SplitPools,
    SplitRule,
    SplitShape,
    begin_transfer,
    build_splitter,
    decode_wait_s,
    end_transfer,
    kv_compatibility_key,
    transfer_s,
)
from policies.pricing.split_decision import PairGroup as Fits
from policies.pricing.transfer_time import TransferTimes
from policies.routing_types import Role, RoutingQuery

_WHOLE = SplitShape()
_NOWHERE = AgentPeer("")


class DisaggSim:
    """Simulates split requests: one engine (group) computes the prompt, another one the answer.

    It decides which requests are split like this, and when their KV cache is transferred.
    """

    def __init__(self, fleet: FleetPort, rule: SplitRule, policy: Policy) -> None:
        self._fleet = fleet
        self._splitter = build_splitter(rule, policy)
        self._splitting = False
        self._transfers = TransferTimes()
        self._pools = _pools(fleet.groups)

    def fitting(self, request: TraceRequest) -> SplitPools:
        """Return the engines by role, without those whose KV memory is too small for the request.

        A prefill engine needs memory for the prompt and one token. A decode engine needs memory for
        the prompt and the answer.
        """
        front = self._fleet.gateway
        if front.fits_everywhere(request):
            return self._pools
        pair_groups = [
            Fits(
                group.compat,
                tuple(front.with_room_for(request.input_tokens + 1, group.prefills)),
                tuple(
                    front.with_room_for(request.input_tokens + request.output_tokens, group.decodes)
                ),
            )
            for group in self._pools.groups
        ]
        alone = front.with_room_for(request.input_tokens + request.output_tokens, self._pools.alone)
        return SplitPools(
            tuple(
                pair_group
                for pair_group in pair_groups
                if pair_group.prefills and pair_group.decodes
            ),
            tuple(alone),
        )

    def serve(self, now: float, inflight: InflightRequest, query: RoutingQuery) -> bool:
        """Send a request to two engines if the gateway would split it; return whether it was split.

        If it was not, a single engine must serve the request.

        now       virtual time in seconds
        inflight  the request's state in the replay
        query     the request as policies see it
        """
        front = self._fleet.gateway
        pools = self.fitting(inflight.trace_request)
        began = front.clock()
        decision = self._splitter.decide(pools, query, _WHOLE, self._splitting, self._transfers)
        front.pick_s += front.clock() - began
        front.picks += 1
        self._splitting = decision.splitting
        if decision.pair is None:
            return False
        self._reserve(now, inflight, query, decision.pair)
        request, prefill = inflight.request, decision.pair.prefill
        inflight.prefill_job = Job(request.prompt_tokens, 1, inflight.keys, keeps_blocks=True)
        prefill_group = self._fleet.groups[prefill.candidate.load.slot]
        self._fleet.send(now, inflight, prefill_group, prefill, inflight.prefill_job)
        return True

    def _reserve(
        self, now: float, inflight: InflightRequest, query: RoutingQuery, pair: EndpointPair
    ) -> None:
        # Reserve capacity at both groups of a split request, and predict its latencies.
        prefill, decode, groups = pair.prefill, pair.decode, self._fleet.groups
        prefill_group = groups[prefill.candidate.load.slot]
        decode_group = groups[decode.candidate.load.slot]
        request, record = inflight.request, inflight.record
        rule, transfers = self._splitter.rule, self._transfers
        after_s = transfer_s(rule, query, prefill.candidate, decode, transfers)
        after_s += decode_wait_s(query, decode)
        self._fleet.admission.on_reserved(query, prefill)
        short = msgspec.structs.replace(request, output_tokens=1)
        inflight.prefill_reservation = load_ledger.reserve(
            prefill_group.load, short, prefill.cached_tokens, now
        )
        inflight.reservation = load_ledger.reserve_decode(
            decode_group.load, request, decode.cached_tokens, now
        )
        computed_s = inflight.prefill_reservation.predicted_ttft_s
        inflight.transfer = begin_transfer(transfers, rule, pair, request.prompt_tokens, now)
        # The time of a transfer over a link that is being tested is unknown: inf.
        record.predicted_ttft_s = None
        if computed_s is not None and after_s < inf:
            record.predicted_ttft_s = computed_s + after_s
        record.predicted_tpot_s = inflight.reservation.predicted_tpot_s
        record.group, record.prefilled_by = decode_group.name, prefill_group.name
        inflight.believed_tokens = prefill.cached_tokens
        inflight.pair = pair
        inflight.prefill_group, inflight.decode_group = prefill_group, decode_group

    def on_prefilled(
        self, now: float, inflight: InflightRequest, prefill_group: ReplayGroup, given: Job
    ) -> None:
        """Start the decode half of a split request, because its prompt has been computed.

        now            virtual time in seconds
        inflight       the request's state in the replay
        prefill_group  the engine that computed the prompt
        given          the prompt's job, which is complete
        """
        record, decode_group = inflight.record, inflight.decode_group
        assert inflight.prefill_reservation is not None
        assert decode_group is not None
        inflight.prefill_reservation.finish(now, 1)
        inflight.prefill_reservation, inflight.prefilled_s = None, now
        if inflight.transfer is not None:
            inflight.transfer.on_ready(now)
        record.cached_tokens, record.believed_tokens = given.cached, inflight.believed_tokens
        self._fleet.gateway.confirm(
            prefill_group.load.slot, inflight.believed_tokens, given.cached, given.prompt_tokens
        )
        prefill_group.totals.requests += 1
        job = Job(
            given.prompt_tokens,
            inflight.trace_request.output_tokens,
            self._fleet.job_keys(inflight),
            leg=DecodeLeg("", _NOWHERE, inf),
        )
        inflight.group, inflight.job = decode_group, job
        self._fleet.inflight[job] = inflight
        self._fleet.schedule(
            now + decode_group.kind.software.request_s, self._fleet.enter, (decode_group, job)
        )

    def on_first_token(self, now: float, inflight: InflightRequest) -> None:
        """Record that the answer of a split request has begun, so that its KV cache has arrived.

        The duration of the transfer is learned, as by a real gateway.
        """
        pair, transfer = inflight.pair, inflight.transfer
        if pair is None or inflight.prefilled_s is None:
            return
        # Until its KV has arrived, the engine computes the same prefix again for other requests.
        self._fleet.gateway.learn(inflight.fingerprint, pair.decode, inflight.request.prompt_tokens)
        if transfer is None:
            return
        end_transfer(transfer, pair, now)
        ready_at = inflight.prefilled_s + self._splitter.rule.handoff_s
        self._transfers.learn(transfer, ready_at, now)
        inflight.transfer = None

    def fetch(self, decode_group: ReplayGroup, job: Job, now: float) -> None:
        """Simulate the transfer of a prompt's KV cache to the engine that decodes it.

        Tokens that the decode engine has cached are not sent. A network link carries one transfer
        at a time, so this transfer may have to wait.

        decode_group  the decode engine
        job           the request's work there
        now           virtual time in seconds
        """
        inflight = self._fleet.inflight[job]
        prefill_group = inflight.prefill_group
        if job.state is not JobState.FETCHING:
            self._release_prefill_blocks(now, inflight)
        elif prefill_group is None:
            self._fleet.schedule(now, self._finish_fetch, (inflight, job))
        else:
            starts_s = max(now, prefill_group.sends_at_s, decode_group.receives_at_s)
            rate = min(prefill_group.kind.link_gb_s, decode_group.kind.link_gb_s) * 1e9
            ends_s = (
                starts_s + (job.prompt_tokens - job.computed) * prefill_group.kv_token_bytes / rate
            )
            prefill_group.sends_at_s = decode_group.receives_at_s = ends_s
            self._fleet.schedule(ends_s, self._finish_fetch, (inflight, job))

    def _finish_fetch(self, now: float, event: tuple[InflightRequest, Job]) -> None:
        inflight, job = event
        decode_group = inflight.decode_group
        if inflight.job is not job or decode_group is None:  # the job was withdrawn meanwhile
            return
        if inflight.prefill_group is None:
            if inflight.transfer is not None:
                inflight.transfer.cancel()
            decode_group.engine.scheduler_of(job).recompute(job)
            assert inflight.reservation is not None
            inflight.reservation.recompute_prompt(now)
        else:
            decode_group.engine.scheduler_of(job).on_landed(job, job.computed)
            self._release_prefill_blocks(now, inflight)
        self._fleet.wake(now, decode_group)

    def _release_prefill_blocks(self, now: float, inflight: InflightRequest) -> None:
        prefill_group, given = inflight.prefill_group, inflight.prefill_job
        inflight.prefill_group = inflight.prefill_job = None
        if prefill_group is not None and given is not None and prefill_group.is_alive:
            prefill_group.engine.scheduler_of(given).release_kept(given)
            self._fleet.wake(now, prefill_group)

    def withdraw(self, now: float, inflight: InflightRequest) -> None:
        """Cancel the prompt computation of a split request and the transfer of its KV cache."""
        if inflight.transfer is not None:
            inflight.transfer.cancel()
        if inflight.prefill_reservation is not None:
            inflight.prefill_reservation.drop(now)
            inflight.prefill_reservation = None
        self._release_prefill_blocks(now, inflight)
        inflight.decode_group = None

    def on_group_died(self, now: float, group: ReplayGroup) -> None:
        """Record that a simulated engine (group) has failed.

        KV that was not fetched from it yet is lost, and split requests that decode there fail.
        """
        group.sends_at_s = group.receives_at_s = now
        for inflight in list(self._fleet.inflight.values()):
            if inflight.decode_group is group:
                self._fleet.retry_elsewhere(now, inflight, group)
            elif inflight.prefill_group is group:
                inflight.prefill_group = inflight.prefill_job = None


def _pools(groups: list[ReplayGroup]) -> SplitPools:
    by_model: dict[str, tuple[list[ReplayGroup], list[ReplayGroup]]] = {}
    for group in groups:
        model = f"{group.kind.model} {group.kind.kv_scalar_bytes:g}"
        key = kv_compatibility_key(group.candidate.endpoint.engine, model, {})
        prefills, decodes = by_model.setdefault(key, ([], []))
        if group.kind.role is not Role.DECODE:
            prefills.append(group)
        if group.kind.role is not Role.PREFILL:
            decodes.append(group)
    fits = tuple(
        Fits(
            key,
            tuple(group.candidate for group in prefills),
            tuple(group.candidate for group in decodes),
        )
        for key, (prefills, decodes) in by_model.items()
        if prefills and decodes
    )
    return SplitPools(
        fits, tuple(group.candidate for group in groups if group.kind.role is Role.BOTH)
    )
