"""Simulates faults, drains, new groups and scrapes in a replay.

A group is one simulated engine. A scrape reads the metrics of an engine. The
syntax of faults is in planner/replay/fault_grammar.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.replay.engine_sim import EngineMetrics
from planner.replay.group_sim import ReplayGroup
from planner.replay.replay_interfaces import FleetPort
from planner.replay.replay_options import GroupFault, GroupFaultKind
from policies import scraped_load
from policies.health.slow_start import soft_cap

Reading = tuple[ReplayGroup, EngineMetrics]
"""One scrape of a simulated group: the group, and the metrics that its engine reported."""
SWEEP_S = 0.25
"""Seconds between two updates of the soft cap during slow start, as in the gateway."""


class FaultEvents:
    """Schedules and executes the faults, drains and metric scrapes of a replay. It has no state."""

    def __init__(self, fleet: FleetPort) -> None:
        self._fleet = fleet

    def announce(self) -> None:
        fleet = self._fleet
        for fault in fleet.options.faults:
            fleet.schedule(fault.start_s, self._apply_fault, fault)
        for ranks in fleet.engines:
            if not ranks[0].is_alive:
                fleet.schedule(ranks[0].kind.up_at_s, self._start, ranks)
        if fleet.options.scrape_s is not None:
            fleet.schedule(0.0, self._scrape)

    def _apply_fault(self, now: float, fault: GroupFault) -> None:
        # Apply a fault to an engine, and so to all of its data-parallel ranks.
        ranks = self._fleet.engines[fault.group]
        after: Callable[[float, Sequence[ReplayGroup]], None]
        if fault.kind is GroupFaultKind.SLOW:
            after = self._set_pace
            self._set_pace(now, ranks)
        elif fault.kind is GroupFaultKind.DRAIN:
            after = self._bring_back
            for group in ranks:
                group.load.is_available = False
                group.load.mark_changed()
            self._fleet.admission.refresh(now)
        elif ranks[0].is_alive:
            after = self._start
            self._fail_ranks(now, ranks)
        else:
            return
        if fault.duration_s is not None:
            self._fleet.schedule(now + fault.duration_s, after, ranks)

    def _fail_ranks(self, now: float, ranks: Sequence[ReplayGroup]) -> None:
        # Let a whole engine fail, as when one of its ranks fails.
        #
        # Requests of the engine that have no first token yet are retried at another engine.
        fleet = self._fleet
        for group in ranks:
            group.is_alive = group.load.is_available = False
            group.load.mark_changed()
            group.engine.stop()
            group.add_totals()
            fleet.gateway.forget_group(group)
        fleet.admission.refresh(now)
        for group in ranks:
            for inflight in [
                inflight for inflight in fleet.inflight.values() if inflight.group is group
            ]:
                fleet.retry_elsewhere(now, inflight, group)
            if fleet.disagg is not None:
                fleet.disagg.on_group_died(now, group)

    def _set_pace(self, now: float, ranks: Sequence[ReplayGroup]) -> None:
        # Set an engine's speed by the latest active fault, or without one by its kind.
        prefill = decode = 1.0
        for fault in sorted(self._fleet.options.faults, key=lambda fault: fault.start_s):
            in_force = fault.start_s <= now and (
                fault.duration_s is None or now < fault.start_s + fault.duration_s
            )
            is_slow = in_force and fault.kind is GroupFaultKind.SLOW
            if is_slow and self._fleet.engines[fault.group] is ranks:
                prefill = 1.0 if fault.only == "decode" else fault.factor
                decode = 1.0 if fault.only == "prefill" else fault.factor
        for group in ranks:
            group.engine.slow_prefill = group.kind.slowness * prefill
            group.engine.slow_decode = group.kind.slowness * decode

    def _start(self, now: float, ranks: Sequence[ReplayGroup]) -> None:
        for group in ranks:
            group.restart()
            group.is_alive = True
        self._bring_back(now, ranks)

    def _bring_back(self, now: float, ranks: Sequence[ReplayGroup]) -> None:
        for group in ranks:
            group.load.is_available = group.is_alive
            self._raise_soft_cap(now, (group, now))
        self._fleet.admission.refresh(now)

    def _raise_soft_cap(self, now: float, event: tuple[ReplayGroup, float]) -> None:
        # Raise a group's slow-start cap by its time in use, as the gateway does.
        group, since = event
        ramp_s, cap = self._fleet.options.slow_start_s, group.kind.max_concurrency
        group.load.soft_cap = soft_cap(cap, now - since, ramp_s)
        group.load.mark_changed()
        if group.load.soft_cap < cap:
            self._fleet.schedule(now + SWEEP_S, self._raise_soft_cap, event)

    def _scrape(self, now: float, _: object) -> None:
        fleet = self._fleet
        readings = [(group, group.engine.metrics) for group in fleet.groups if group.is_alive]
        if fleet.options.scrape_age_s:
            fleet.schedule(now + fleet.options.scrape_age_s, self._scraped, readings)
        else:
            self._scraped(now, readings)
        if fleet.running_requests and fleet.options.scrape_s is not None:
            fleet.schedule(now + fleet.options.scrape_s, self._scrape)

    def _scraped(self, now: float, readings: list[Reading]) -> None:
        # Record the delivered metrics as the gateway does.
        #
        # External requests are computed against in_flight at delivery.
        for group, metrics in readings:
            scraped_load.record_scrape(group.load, *metrics, group.capacity_tokens, now)
