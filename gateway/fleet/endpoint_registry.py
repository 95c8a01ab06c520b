"""Plans and applies which endpoints a new configuration adds, keeps and removes; owns their slots.

plan() computes the changes without side effects, and apply() carries them out. An endpoint is
identified by its pool and URL. While both stay the same, a new configuration keeps its load,
health, connections and slot number. An endpoint that left the configuration has them until
release(). A new endpoint with the URL of a known one, in another pool, adopts what is known of the
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from time import monotonic

import msgspec

from gateway.config import Config, EndpointSpec
from gateway.fleet.endpoint_from_config import prior_belief, to_endpoint
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.rank_endpoints import join_lockstep_ranks, split_by_rank
from gateway.http.engine_request import UpstreamTimeouts
from gateway.http.outgoing_tls import ClientContexts
from gateway.http.write_queue import WriteQueue
from policies.endpoint_load import EndpointLoad, LoadChanges
from policies.engine.output_length import RecentLengths
from policies.engine_kinds import ENGINE_TRAITS
from policies.health.endpoint_health import Health, HealthState
from policies.routing_types import Candidate, Endpoint, endpoint_key

log = logging.getLogger("penstock")


class MeteredSettings(msgspec.Struct, frozen=True):
    """The settings of an endpoint that affect which gauges it has and its KV capacity."""

    name: str
    has_kv_events: bool
    kv_tokens: int | None

    @classmethod
    def of(cls, live: LiveEndpoint) -> MeteredSettings:
        spec = live.spec
        return cls(live.endpoint.name, spec.kv_events is not None, spec.kv_tokens)


class PlannedEndpoint(msgspec.Struct, frozen=True, eq=False):
    """An endpoint of a new configuration, and the live endpoint that will have its settings.

    The live endpoint exists already, or was created for the plan.
    """

    live: LiveEndpoint
    endpoint: Endpoint
    spec: EndpointSpec

    @property
    def is_change(self) -> bool:
        """Return whether the new configuration changes the endpoint's settings.

        plan() reuses the live endpoint's objects where the settings are equal, so comparing their
        identity suffices.
        """
        return self.live.endpoint is not self.endpoint or self.live.spec is not self.spec


class RegistryPlan(msgspec.Struct, frozen=True, eq=False):
    """The endpoints that the registry would have under a new configuration.

    A plan becomes invalid when the registry changes.

    pools           candidates by pool
    changes         the object that records changes of the endpoints' loads
    name_conflicts  (pool, configuration) of each discovered endpoint that was left out because
                    another endpoint has its name
    """

    config: Config
    timeouts: UpstreamTimeouts
    members: tuple[PlannedEndpoint, ...]
    pools: Mapping[str, tuple[Candidate, ...]]
    changes: LoadChanges
    name_conflicts: tuple[tuple[str, EndpointSpec], ...] = ()

    def lacks(self, path: str, candidates: tuple[Candidate, ...]) -> bool:
        """Return whether at least one candidate's engine is known to lack the API at `path`.

        The paths that an engine lists at /openapi.json decide. For an engine without this page, two
        facts decide: what its kind is known to lack, and which paths it has answered with 404.
        """
        members = {id(candidate.load) for candidate in candidates}
        return any(
            path not in paths
            if (paths := member.live.api_paths)
            else path in ENGINE_TRAITS[member.endpoint.engine].lacked_paths
            or path in member.live.missing_paths
            for member in self.members
            if id(member.live.load) in members
        )


class RegistryChanges(msgspec.Struct, frozen=True, eq=False):
    """The endpoints that a plan added and removed, and the endpoint names no longer used."""

    added: tuple[LiveEndpoint, ...]
    removed: tuple[LiveEndpoint, ...]
    unused_names: tuple[str, ...]


class EndpointRegistry:
    """The registry of all live endpoints of the gateway.

    Each endpoint has a slot number, which is its index in `by_slot` and in arrays such as the
    cached tokens per endpoint. `by_slot` is the same list object forever. A removed endpoint stays
    in its slot until a new endpoint takes the slot.

    discovered  discovered endpoints by pool; only Discovery changes it
    """

    def __init__(self, write_queue: WriteQueue) -> None:
        self.by_slot: list[LiveEndpoint] = []
        self._free: set[int] = set()
        self._changes = LoadChanges()
        self._write_queue = write_queue
        self._is_first_plan = True
        self._contexts = ClientContexts()
        self._reported_conflicts: frozenset[tuple[str, str]] = frozenset()
        self.discovered: dict[str, tuple[EndpointSpec, ...]] = {}

    def all(self) -> tuple[LiveEndpoint, ...]:
        """Return all live endpoints, including those that are leaving the configuration."""
        return tuple(live for live in self.by_slot if live.load.slot not in self._free)

    def plan(self, config: Config) -> RegistryPlan:
        """Return which endpoints a configuration would add, keep and remove. Changes nothing."""
        timeouts = UpstreamTimeouts(
            config.timeouts.connect, config.timeouts.first_byte, config.timeouts.stall
        )
        known = {live.endpoint.key: live for live in self.all()}
        twins = {
            (live.spec.url, live.endpoint.rank): live
            for live in known.values()
            if not live.is_leaving
        }
        learned = {live.endpoint.pool: live.load.timeline.lengths for live in known.values()}
        slots = self._unused_slots()
        members = []
        discovered, conflicts = self._usable_discovered(config)
        for pool, pool_spec in config.pools.items():
            specs = (*pool_spec.endpoints, *discovered.get(pool, ()))
            lengths = learned.get(pool) or RecentLengths()
            for new_spec, rank in split_by_rank(specs):
                live = known.get(endpoint_key(pool, new_spec.url, rank))
                if live is not None and live.spec == new_spec:
                    # Unchanged endpoints are reused, which is fast: most of them do not change.
                    endpoint, spec = live.endpoint, live.spec
                else:
                    endpoint, spec = to_endpoint(pool, new_spec, rank), new_spec
                if live is None:
                    load = EndpointLoad(next(slots), prior_belief(config, endpoint), lengths)
                    live = self._new_endpoint(endpoint, spec, load, timeouts)
                    live.adopt(twins.get((spec.url, rank)) or twins.get((spec.url, None)))
                members.append(PlannedEndpoint(live, endpoint, spec))
        candidates = _candidates_by_pool(config, members)
        parts = (tuple(members), candidates, self._changes, tuple(conflicts))
        return RegistryPlan(config, timeouts, *parts)

    def _new_endpoint(
        self, endpoint: Endpoint, spec: EndpointSpec, load: EndpointLoad, timeouts: UpstreamTimeouts
    ) -> LiveEndpoint:
        # A new endpoint starts as ejected, so it gets requests only after a successful probe. The
        # endpoints of the first configuration are exempt.
        encryption = self._contexts.encryption_for(spec)
        live = LiveEndpoint(endpoint, spec, load, timeouts, self._write_queue, encryption)
        if not self._is_first_plan:
            now = monotonic()
            live.health = Health(HealthState.EJECTED, now, until=now)
        return live

    def _usable_discovered(
        self, config: Config
    ) -> tuple[dict[str, list[EndpointSpec]], list[tuple[str, EndpointSpec]]]:
        # Return the usable discovered endpoints by pool, and (pool, spec) of name conflicts.
        #
        # Endpoints that the configuration also lists are left out. Names are unique over all pools.
        # A conflicting endpoint is added once its name is free, without a new report of its source.
        usable: dict[str, list[EndpointSpec]] = {}
        conflicts: list[tuple[str, EndpointSpec]] = []
        if not any(self.discovered.values()):
            return usable, conflicts
        used_names = {
            spec.display_name for pool in config.pools.values() for spec in pool.endpoints
        }
        for pool, pool_spec in config.pools.items():
            configured = {spec.url for spec in pool_spec.endpoints}
            for spec in self.discovered.get(pool, ()) if pool_spec.discover is not None else ():
                if spec.url in configured:
                    continue
                if spec.display_name in used_names:
                    conflicts.append((pool, spec))
                else:
                    used_names.add(spec.display_name)
                    usable.setdefault(pool, []).append(spec)
        return usable, conflicts

    def _unused_slots(self) -> Iterator[int]:
        yield from sorted(self._free)
        yield from count(len(self.by_slot))

    def apply(self, plan: RegistryPlan) -> RegistryChanges:
        """Carry out a plan, and return the added and the removed endpoints."""
        before = {id(live): live.endpoint.name for live in self.all() if not live.is_leaving}
        added = [member.live for member in plan.members if id(member.live) not in before]
        for member in plan.members:
            live = member.live
            if live.is_leaving or not self._has(live):
                self._enter(live)
            encryption = self._contexts.encryption_for(member.spec)
            if (
                member.is_change
                or live.upstream.timeouts != plan.timeouts
                or live.encryption != encryption
            ):
                live.reconfigure(member.endpoint, member.spec, plan.timeouts, encryption)
        join_lockstep_ranks((member.endpoint, member.live) for member in plan.members)
        staying = {id(member.live) for member in plan.members}
        removed = [live for live in self.all() if id(live) in before and id(live) not in staying]
        for live in removed:
            live.is_leaving = True
        names = set(before.values()) - {member.endpoint.name for member in plan.members}
        self._report_conflicts(plan.name_conflicts)
        self._is_first_plan = False
        return RegistryChanges(tuple(added), tuple(removed), tuple(sorted(names)))

    def _report_conflicts(self, conflicts: tuple[tuple[str, EndpointSpec], ...]) -> None:
        before = self._reported_conflicts
        self._reported_conflicts = frozenset((pool, spec.url) for pool, spec in conflicts)
        for pool, spec in conflicts:
            if (pool, spec.url) not in before:
                log.warning(
                    "service discovery: pool %s: the endpoint %s is ignored, because another "
                    "endpoint is already named %s",
                    pool,
                    spec.url,
                    spec.display_name,
                )

    def _has(self, live: LiveEndpoint) -> bool:
        slot = live.load.slot
        return slot < len(self.by_slot) and self.by_slot[slot] is live and slot not in self._free

    def _enter(self, live: LiveEndpoint) -> None:
        # Put an endpoint into its slot.
        #
        # An endpoint that is added again before its release keeps its state.
        slot = live.load.slot
        live.is_leaving = False
        if self._has(live):
            return
        self._free.discard(slot)
        self.by_slot[slot : slot + 1] = [live]

    def release(self, live: LiveEndpoint) -> None:
        """Free the slot number of an endpoint that no request uses any more."""
        self._free.add(live.load.slot)


def _candidates_by_pool(
    config: Config, members: Sequence[PlannedEndpoint]
) -> dict[str, tuple[Candidate, ...]]:
    pools: dict[str, list[Candidate]] = {pool: [] for pool in config.pools}
    for member in members:
        pools[member.endpoint.pool].append(Candidate(member.endpoint, member.live.load))
    return {pool: tuple(candidates) for pool, candidates in pools.items()}
