"""What happens to a replayed fleet besides requests: groups fail, slow down, drain or join, and metrics are scraped."""

from __future__ import annotations

from planner.replay.group import Group
from planner.replay.options import Fault, Trouble
from planner.replay.port import FleetPort
from policies import ledger
from policies.warmup import ceiling

Reading = tuple[Group, int, int, float]
"""What a group's metrics said: jobs running, jobs waiting, share of its KV blocks in use."""
SWEEP_S = 0.25
"""How often the gateway looks again how many requests a group that warms up may have at once."""


class Happenings:
    """Puts them on the fleet's heap. Owns nothing."""

    def __init__(self, fleet: FleetPort) -> None:
        self._fleet = fleet

    def announce(self) -> None:
        """Everything that is known beforehand."""
        fleet = self._fleet
        for fault in fleet.options.faults:
            fleet.at(fault.at_s, self._befall, fault)
        for group in fleet.groups:
            if not group.alive:
                fleet.at(group.kind.up_at_s, self._up, group)
        if fleet.options.scrape_s is not None:
            fleet.at(0.0, self._scrape)

    def _befall(self, now: float, fault: Fault) -> None:
        group = self._fleet.groups[fault.group]
        if fault.trouble is Trouble.SLOW:
            self._set_pace(now, group)
            if fault.for_s is not None:
                self._fleet.at(now + fault.for_s, self._set_pace, group)
        elif fault.trouble is Trouble.DRAIN:
            group.load.available = False
            self._fleet.door.refresh(now)
            if fault.for_s is not None:
                self._fleet.at(now + fault.for_s, self._bring_back, group)
        elif group.alive:
            self._lose(now, group)
            if fault.for_s is not None:
                self._fleet.at(now + fault.for_s, self._up, group)

    def _lose(self, now: float, group: Group) -> None:
        """A rank falls out, and with it the whole group: who waits for a first token goes elsewhere."""
        fleet = self._fleet
        group.alive = group.load.available = False
        group.engine.stop()
        group.count()
        fleet.front.forget(group)
        fleet.door.refresh(now)
        for flight in [flight for flight in fleet.flights.values() if flight.group is group]:
            fleet.failed(now, flight, group)
        if fleet.halves is not None:
            fleet.halves.died(now, group)

    def _set_pace(self, now: float, group: Group) -> None:
        """An engine is as slow as the fault says that came last of those still in force; without one, as its kind."""
        prefill = decode = 1.0
        for fault in sorted(self._fleet.options.faults, key=lambda fault: fault.at_s):
            in_force = fault.at_s <= now and (fault.for_s is None or now < fault.at_s + fault.for_s)
            if in_force and fault.trouble is Trouble.SLOW and fault.group == group.load.slot:
                prefill = 1.0 if fault.only == "decode" else fault.factor
                decode = 1.0 if fault.only == "prefill" else fault.factor
        group.engine.slow_prefill = group.kind.slowness * prefill
        group.engine.slow_decode = group.kind.slowness * decode

    def _up(self, now: float, group: Group) -> None:
        """A group joins, with nothing in its cache."""
        group.renew()
        group.alive = True
        self._bring_back(now, group)

    def _bring_back(self, now: float, group: Group) -> None:
        """A group is asked (again), if it lives."""
        group.load.available = group.alive
        self._warm(now, (group, now))
        self._fleet.door.refresh(now)

    def _warm(self, now: float, what: tuple[Group, float]) -> None:
        """Raise a group's ceiling by how long it has been up, as the gateway's sweep does."""
        group, since = what
        ramp_s, cap = self._fleet.options.slow_start_s, group.kind.max_concurrency
        group.load.ceiling = ceiling(cap, now - since, ramp_s)
        if group.load.ceiling < cap:
            self._fleet.at(now + SWEEP_S, self._warm, what)

    def _scrape(self, now: float, _: object) -> None:
        """Every engine's own view of itself, on its way to the gateway."""
        fleet = self._fleet
        readings: list[Reading] = []
        for group in fleet.groups:
            if group.alive:
                scheduler = group.engine.scheduler
                readings.append((group, scheduler.running, scheduler.queued, scheduler.pool.usage))
        if fleet.options.scrape_age_s:
            fleet.at(now + fleet.options.scrape_age_s, self._scraped, readings)
        else:
            self._scraped(now, readings)
        if fleet.under_way and fleet.options.scrape_s is not None:
            fleet.at(now + fleet.options.scrape_s, self._scrape)

    def _scraped(self, now: float, readings: list[Reading]) -> None:
        """As the gateway's table does it; what others sent is counted against what is in flight when it arrives."""
        for group, running, waiting, usage in readings:
            ledger.scraped(group.load, running, waiting, usage, group.kind.capacity_tokens, now)
