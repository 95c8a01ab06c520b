"""Split requests in a replay: prefill job, KV transfer over the two groups' links, decode job.

The decision is the gateway's own Splitter; blocks are kept and fetched as in a live mock group.
"""

from __future__ import annotations

from math import inf

import msgspec

from mockgpu.job import Job, State
from mockgpu.leg_params import At, Take
from planner.replay.fleet_port import FleetPort
from planner.replay.group import Group
from planner.replay.inflight import Flight
from planner.traces.shape import TraceRequest
from policies import ledger
from policies.contract import Policy
from policies.model import Ask, Role
from policies.pricing.split import Group as Fits
from policies.pricing.split import Pools, Shape, SplitRule, after_prefill_s, compat, splitter

_WHOLE = Shape()
_NOWHERE = At("")


class Halves:
    """Owner of the links' schedules and of the splitter's mode."""

    def __init__(self, fleet: FleetPort, rule: SplitRule, policy: Policy) -> None:
        self._fleet = fleet
        self._splitter = splitter(rule, policy)
        self._splitting = False
        self._pools = _pools(fleet.groups)

    def fitting(self, request: TraceRequest) -> Pools:
        """Return the pools without groups whose KV could not hold their part of the request.

        A prefill group needs the prompt and one token, a decode group prompt and answer.
        """
        front = self._fleet.front
        if front.fits_everywhere(request):
            return self._pools
        pair_groups = [
            Fits(
                group.compat,
                tuple(front.holding(request.input_tokens + 1, group.prefills)),
                tuple(front.holding(request.input_tokens + request.output_tokens, group.decodes)),
            )
            for group in self._pools.groups
        ]
        alone = front.holding(request.input_tokens + request.output_tokens, self._pools.alone)
        return Pools(
            tuple(
                pair_group
                for pair_group in pair_groups
                if pair_group.prefills and pair_group.decodes
            ),
            tuple(alone),
        )

    def serve(self, now: float, flight: Flight, query: Ask) -> bool:
        """Send the request to a pair if the gateway would.

        Return False if it is for a single group.
        """
        front, groups = self._fleet.front, self._fleet.groups
        pools = self.fitting(flight.one)
        began = front.clock()
        decision = self._splitter.decide(pools, query, _WHOLE, self._splitting)
        front.pick_s += front.clock() - began
        front.picks += 1
        self._splitting = decision.splitting
        if decision.pair is None:
            return False
        prefill, decode = decision.pair.prefill, decision.pair.decode
        giver, taker = groups[prefill.candidate.load.slot], groups[decode.candidate.load.slot]
        request, record = flight.request, flight.record
        self._fleet.door.booked(query, prefill)
        short = msgspec.structs.replace(request, output_tokens=1)
        flight.prefill_entry = ledger.book(giver.load, short, prefill.cached_tokens, now)
        after_s = after_prefill_s(self._splitter.rule, query, decode)
        flight.entry = ledger.reserve(taker.load, request, decode.cached_tokens, now)
        computed_s = flight.prefill_entry.predicted_ttft_s
        record.predicted_ttft_s = None if computed_s is None else computed_s + after_s
        record.predicted_tpot_s = flight.entry.predicted_tpot_s
        record.group, record.prefilled_by = taker.name, giver.name
        flight.believed, flight.giver, flight.taker = prefill.cached_tokens, giver, taker
        front.learn(flight.fingerprint, decode, request.prompt_tokens)
        flight.given = Job(request.prompt_tokens, 1, flight.keys, keep=True)
        self._fleet.send(now, flight, giver, prefill, flight.given)
        return True

    def prefilled(self, now: float, flight: Flight, giver: Group, given: Job) -> None:
        """Send the decode half, because the prompt was computed."""
        record, taker = flight.record, flight.taker
        assert flight.prefill_entry is not None
        assert taker is not None
        flight.prefill_entry.finished(now, 1)
        flight.prefill_entry = None
        record.cached_tokens, record.believed_tokens = given.cached, flight.believed
        self._fleet.front.confirm(
            giver.load.slot, flight.believed, given.cached, given.prompt_tokens
        )
        giver.totals.requests += 1
        job = Job(
            given.prompt_tokens, flight.one.output_tokens, flight.keys, leg=Take("", _NOWHERE, inf)
        )
        flight.group, flight.job = taker, job
        self._fleet.flights[job] = flight
        self._fleet.at(now + taker.kind.software.request_s, self._fleet.enter, (taker, job))

    def fetch(self, taker: Group, job: Job, now: float) -> None:
        """Fetch the KV that the decode group lacks over the links, one transfer after another."""
        flight = self._fleet.flights[job]
        giver = flight.giver
        if job.state is not State.FETCHING:
            self._release_prefill_blocks(now, flight)
        elif giver is None:
            self._fleet.at(now, self._finish_fetch, (flight, job))
        else:
            starts_s = max(now, giver.sends_at_s, taker.receives_at_s)
            rate = min(giver.kind.link_gb_s, taker.kind.link_gb_s) * 1e9
            ends_s = starts_s + (job.prompt_tokens - job.computed) * giver.kv_token_bytes / rate
            giver.sends_at_s = taker.receives_at_s = ends_s
            self._fleet.at(ends_s, self._finish_fetch, (flight, job))

    def _finish_fetch(self, now: float, event: tuple[Flight, Job]) -> None:
        flight, job = event
        taker = flight.taker
        if flight.job is not job or taker is None:  # it was withdrawn in the meantime
            return
        if flight.giver is None:
            taker.engine.scheduler.recompute(job)
            assert flight.entry is not None
            flight.entry.recompute(now)
        else:
            taker.engine.scheduler.landed(job, job.computed)
            self._release_prefill_blocks(now, flight)
        self._fleet.wake(now, taker)

    def _release_prefill_blocks(self, now: float, flight: Flight) -> None:
        """Let the prefill group forget the blocks."""
        giver, given = flight.giver, flight.given
        flight.giver = flight.given = None
        if giver is not None and given is not None and giver.alive:
            giver.engine.scheduler.let_go(given)
            self._fleet.wake(now, giver)

    def withdraw(self, now: float, flight: Flight) -> None:
        """Cancel the request wherever it is."""
        if flight.prefill_entry is not None:
            flight.prefill_entry.dropped(now)
            flight.prefill_entry = None
        self._release_prefill_blocks(now, flight)
        flight.taker = None

    def died(self, now: float, group: Group) -> None:
        """Handle the death of a group: its unfetched KV is lost, and requests to be decoded there
        fail.
        """
        group.sends_at_s = group.receives_at_s = now
        for flight in list(self._fleet.flights.values()):
            if flight.taker is group:
                self._fleet.failed(now, flight, group)
            elif flight.giver is group:
                flight.giver = flight.given = None


def _pools(groups: list[Group]) -> Pools:
    """Group the candidates by compatible KV, which means by equal model."""
    by_model: dict[str, tuple[list[Group], list[Group]]] = {}
    for group in groups:
        key = compat(
            group.candidate.endpoint.engine,
            f"{group.kind.model} {group.kind.kv_scalar_bytes:g}",
            {},
        )
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
    return Pools(fits, tuple(group.candidate for group in groups if group.kind.role is Role.BOTH))
