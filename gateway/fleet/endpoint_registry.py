"""Plans and applies which endpoints a new configuration adds, keeps and removes; owns their slots.

plan() computes the changes without side effects, and apply() carries them out. plan_steps() does
the work of plan() in parts, between which requests can run.

An endpoint is identified by its pool and URL. As long as the configuration has the endpoint, its
load, health, connections and slot number stay. When it has left the configuration, it keeps them
until release(). A new endpoint whose URL is known from another pool takes over what is known of
that engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from time import monotonic
from typing import NamedTuple

import msgspec

from gateway.config import Config, EndpointSpec
from gateway.fleet.endpoint_from_config import prior_belief, to_endpoint
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.rank_endpoints import join_lockstep_ranks, split_by_rank
from gateway.http.engine_request import UpstreamTimeouts
from gateway.http.outgoing_tls import ClientContexts
from gateway.http.write_queue import WriteQueue
from gateway.util.tls_contexts import Encryption
from gateway.util.work_in_turns import Steps, WorkMeter, run_at_once
from policies.endpoint_load import EndpointLoad, LoadChanges
from policies.engine.output_length import RecentLengths
from policies.engine_kinds import ENGINE_TRAITS
from policies.health.endpoint_health import Health, HealthState
from policies.routing_types import Candidate, Endpoint, EngineKind, endpoint_key

log = logging.getLogger("penstock")

CHANGED_ENDPOINT, NEW_ENDPOINT = 4, 16
"""How many unchanged endpoints take as long to plan as one with other settings, and a new one."""


class MeteredSettings(msgspec.Struct, frozen=True):
    """The settings of an endpoint from which its gauges (metrics) and its KV capacity are derived.

    After a reload that has changed them, gauges and capacity are set again.
    """

    name: str
    has_kv_events: bool
    kv_tokens: int | None

    @classmethod
    def of(cls, live: LiveEndpoint) -> MeteredSettings:
        spec = live.spec
        return cls(live.endpoint.name, spec.kv_events is not None, spec.kv_tokens)


class PlannedEndpoint(msgspec.Struct, frozen=True, eq=False):
    """An endpoint of a new configuration, and the live endpoint that will get its settings.

    The live endpoint exists already, or was created for the plan.

    encryption  the TLS settings of its connections; None: its URL is http://
    twin        an older endpoint with the same URL, from which this new endpoint takes over what is
                known of the engine; None: there is none
    """

    live: LiveEndpoint
    endpoint: Endpoint
    spec: EndpointSpec
    encryption: Encryption | None = None
    twin: LiveEndpoint | None = None

    @property
    def is_change(self) -> bool:
        """Return whether the new configuration changes the endpoint's settings.

        plan() reuses the live endpoint's objects where the settings are equal, so objects that
        differ are changes.
        """
        return self.live.endpoint is not self.endpoint or self.live.spec is not self.spec


class RegistryPlan(msgspec.Struct, frozen=True, eq=False):
    """The endpoints that the gateway would have under a new configuration, before it is applied.

    A plan becomes invalid when the registry of endpoints changes.

    members         all endpoints of the new configuration
    pools           the endpoints among which each pool's policy would pick
    live_by_load    live endpoints by the id() of their loads
    changes         the object that records changes of the endpoints' loads
    entering        those of the members that are new, or are added again before their release
    changed         those of the members whose settings change
    removed         the endpoints that leave the configuration
    has_ranks       whether a member is one data-parallel rank of an engine
    unused_names    the names that no endpoint has any more
    name_conflicts  (pool, configuration) of each discovered endpoint that was left out because
                    another endpoint has its name
    """

    config: Config
    timeouts: UpstreamTimeouts
    members: tuple[PlannedEndpoint, ...]
    pools: Mapping[str, tuple[Candidate, ...]]
    live_by_load: Mapping[int, LiveEndpoint]
    changes: LoadChanges
    entering: tuple[PlannedEndpoint, ...] = ()
    changed: tuple[PlannedEndpoint, ...] = ()
    removed: tuple[LiveEndpoint, ...] = ()
    has_ranks: bool = False
    unused_names: tuple[str, ...] = ()
    name_conflicts: tuple[tuple[str, EndpointSpec], ...] = ()

    def lacks(self, path: str, candidates: Iterable[Candidate]) -> bool:
        """Return whether at least one candidate's engine is known to lack the API at `path`.

        The paths that an engine lists at /openapi.json decide. For an engine without this page, two
        facts decide: what its kind is known to lack, and which paths it has answered with 404.
        """
        return any(facts.lacks(path) for facts in self.api_facts(candidates))

    def api_facts(self, candidates: Iterable[Candidate]) -> frozenset[ApiFacts]:
        """Return what is known of the APIs of the candidates' engines, each different set once."""
        lives = self.live_by_load
        facts = set()
        for candidate in candidates:
            live = lives[id(candidate.load)]
            facts.add((candidate.endpoint.engine, live.api_paths, live.missing_paths))
        return frozenset(ApiFacts(*fact) for fact in facts)


class ApiFacts(NamedTuple):
    """What is known of an engine's APIs: its kind, the listed paths, the paths with status 404."""

    engine: EngineKind
    listed: frozenset[str]
    missing: frozenset[str]

    def lacks(self, path: str) -> bool:
        """Return whether the engine is known to lack the API at `path`."""
        if self.listed:
            return path not in self.listed
        return path in ENGINE_TRAITS[self.engine].lacked_paths or path in self.missing


class RegistryChanges(msgspec.Struct, frozen=True, eq=False):
    """What a plan has changed: added and removed endpoints, and names no longer used."""

    added: tuple[LiveEndpoint, ...]
    removed: tuple[LiveEndpoint, ...]
    unused_names: tuple[str, ...]


class EndpointRegistry:
    """The registry of all live endpoints of the gateway.

    Each endpoint has a slot number, which is its index in `by_slot` and in arrays such as the
    cached tokens per endpoint. `by_slot` is changed in place and never replaced. A removed endpoint
    stays in its slot until a new endpoint takes the slot.

    discovered  discovered endpoints by pool; only the class Discovery changes it
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
        free = self._free
        if not free:
            return tuple(self.by_slot)
        return tuple(live for slot, live in enumerate(self.by_slot) if slot not in free)

    def plan(self, config: Config) -> RegistryPlan:
        """Return which endpoints a configuration would add, keep and remove. Changes nothing."""
        return run_at_once(self.plan_steps(config))

    def plan_steps(self, config: Config) -> Steps[RegistryPlan]:
        """Do the work of plan() in parts: yield after each. The registry must not change."""
        meter, builder = WorkMeter(), _PlanBuilder(config)
        for live in self.all():
            builder.add_known(live)
            if meter.is_part_over():
                yield
        slots = self._unused_slots()
        discovered = yield from self._usable_discovered(config, meter, builder)
        for pool, pool_spec in config.pools.items():
            builder.begin_pool(pool)
            specs = (*pool_spec.endpoints, *discovered.get(pool, ()))
            for spec, rank in split_by_rank(specs):
                items = self._plan_member(builder, spec, rank, slots)
                if meter.is_part_over(items):
                    yield
        for live in builder.leaving():
            builder.remove(live)
            if meter.is_part_over():
                yield
        return builder.finish(self._changes)

    def _plan_member(
        self, builder: _PlanBuilder, spec: EndpointSpec, rank: int | None, slots: Iterator[int]
    ) -> int:
        # Add an endpoint to a plan; return the items of a WorkMeter as which that counts.
        live, pool = builder.find(spec.url, rank), builder.pool
        twin, items = None, 1
        is_known = live is not None
        if live is not None and (live.spec is spec or live.spec == spec):
            # Unchanged endpoints are reused, which is fast: most of them do not change.
            endpoint, spec = live.endpoint, live.spec
        else:
            endpoint, items = to_endpoint(pool, spec, rank), CHANGED_ENDPOINT
        encryption = self._contexts.encryption_for(spec)
        if live is None:
            belief = prior_belief(builder.config, endpoint)
            load = EndpointLoad(next(slots), belief, builder.lengths)
            live = self._new_endpoint(endpoint, spec, load, builder.timeouts, encryption)
            twin = builder.find_twin(spec.url, rank)
            live.adopt(twin)
            items = NEW_ENDPOINT
        is_entering = not is_known or live.is_leaving
        builder.add(PlannedEndpoint(live, endpoint, spec, encryption, twin), is_entering)
        return items

    def _new_endpoint(
        self,
        endpoint: Endpoint,
        spec: EndpointSpec,
        load: EndpointLoad,
        timeouts: UpstreamTimeouts,
        encryption: Encryption | None,
    ) -> LiveEndpoint:
        # A new endpoint starts as ejected, so it gets requests only after a successful probe. The
        # endpoints of the first configuration are exempt.
        live = LiveEndpoint(endpoint, spec, load, timeouts, self._write_queue, encryption)
        if not self._is_first_plan:
            now = monotonic()
            live.health = Health(HealthState.EJECTED, now, until=now)
        return live

    def _usable_discovered(
        self, config: Config, meter: WorkMeter, builder: _PlanBuilder
    ) -> Steps[dict[str, list[EndpointSpec]]]:
        # Return the usable discovered endpoints by pool; report name conflicts to the builder.
        #
        # Endpoints that the configuration also lists are left out. Names are unique over all pools.
        # A conflicting endpoint is added once its name is free, without a new report of its source.
        usable: dict[str, list[EndpointSpec]] = {}
        if not any(self.discovered.values()):
            return usable
        used_names = set()
        for pool_spec in config.pools.values():
            for spec in pool_spec.endpoints:
                used_names.add(spec.display_name)
                if meter.is_part_over():
                    yield
        for pool, pool_spec in config.pools.items():
            configured = {spec.url for spec in pool_spec.endpoints}
            for spec in self.discovered.get(pool, ()) if pool_spec.discover is not None else ():
                if meter.is_part_over():
                    yield
                if spec.url in configured:
                    continue
                if spec.display_name in used_names:
                    builder.conflicts.append((pool, spec))
                else:
                    used_names.add(spec.display_name)
                    usable.setdefault(pool, []).append(spec)
        return usable

    def _unused_slots(self) -> Iterator[int]:
        yield from sorted(self._free)
        yield from count(len(self.by_slot))

    def apply(self, plan: RegistryPlan) -> RegistryChanges:
        """Carry out a plan, and return the added and the removed endpoints."""
        added = [member.live for member in plan.entering]
        for member in plan.entering:
            if member.twin is not None:  # it may have changed since the plan
                member.live.adopt(member.twin)
            self._enter(member.live)
        for member in plan.changed:
            args = member.endpoint, member.spec, plan.timeouts, member.encryption
            member.live.reconfigure(*args)
        for member in plan.members:
            member.live.upstream.timeouts = plan.timeouts
        if plan.has_ranks:
            join_lockstep_ranks((member.endpoint, member.live) for member in plan.members)
        for live in plan.removed:
            live.is_leaving = True
        self._report_conflicts(plan.name_conflicts)
        self._is_first_plan = False
        return RegistryChanges(tuple(added), plan.removed, plan.unused_names)

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
        """Free the slot number (index in `by_slot`) of an endpoint that no request uses."""
        self._free.add(live.load.slot)


class _PlanBuilder:
    # Collects the endpoints of a plan.
    #
    # pool       the pool whose endpoints are added
    # lengths    lengths of answers that the endpoints of this pool have learned together
    # conflicts  (pool, configuration) of discovered endpoints with a name that another one has

    __slots__ = (
        *("_candidates", "_changed", "_entering", "_has_ranks", "_known", "_learned"),
        "_live_by_load",
        *("_members", "_names_after", "_names_before", "_removed", "_staying", "_twins"),
        *("config", "conflicts", "lengths", "pool", "timeouts"),
    )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.timeouts = UpstreamTimeouts(
            config.timeouts.connect, config.timeouts.first_byte, config.timeouts.stall
        )
        self.pool, self.lengths = "", RecentLengths()
        self.conflicts: list[tuple[str, EndpointSpec]] = []
        self._known: dict[tuple[str, str], LiveEndpoint] = {}
        self._twins: dict[tuple[str, int | None], LiveEndpoint] = {}
        self._learned: dict[str, RecentLengths] = {}
        self._names_before, self._names_after = dict[str, None](), set[str]()
        self._members: list[PlannedEndpoint] = []
        self._candidates: dict[str, list[Candidate]] = {pool: [] for pool in config.pools}
        self._live_by_load: dict[int, LiveEndpoint] = {}
        self._entering: list[PlannedEndpoint] = []
        self._changed: list[PlannedEndpoint] = []
        self._staying = set[LiveEndpoint]()
        self._removed: list[LiveEndpoint] = []
        self._has_ranks = False

    def add_known(self, live: LiveEndpoint) -> None:
        endpoint = live.endpoint
        self._known[endpoint.key] = live
        self._learned[endpoint.pool] = live.load.timeline.lengths
        if not live.is_leaving:
            self._twins[live.spec.url, endpoint.rank] = live
            self._names_before[endpoint.name] = None

    def begin_pool(self, pool: str) -> None:
        self.pool, self.lengths = pool, self._learned.get(pool) or RecentLengths()

    def find(self, url: str, rank: int | None) -> LiveEndpoint | None:
        return self._known.get(endpoint_key(self.pool, url, rank))

    def find_twin(self, url: str, rank: int | None) -> LiveEndpoint | None:
        return self._twins.get((url, rank)) or self._twins.get((url, None))

    def add(self, member: PlannedEndpoint, is_entering: bool) -> None:
        live, endpoint = member.live, member.endpoint
        self._members.append(member)
        self._candidates[self.pool].append(Candidate(endpoint, live.load))
        self._live_by_load[id(live.load)] = live
        self._staying.add(live)
        self._names_after.add(endpoint.name)
        if endpoint.rank is not None:
            self._has_ranks = True
        if is_entering:
            self._entering.append(member)
        if member.is_change or live.encryption != member.encryption:
            self._changed.append(member)

    def leaving(self) -> Iterator[LiveEndpoint]:
        return (live for live in self._known.values() if live not in self._staying)

    def remove(self, live: LiveEndpoint) -> None:
        if not live.is_leaving:
            self._removed.append(live)

    def finish(self, changes: LoadChanges) -> RegistryPlan:
        unused = sorted(self._names_before.keys() - self._names_after)
        return RegistryPlan(
            self.config,
            self.timeouts,
            tuple(self._members),
            {pool: tuple(candidates) for pool, candidates in self._candidates.items()},
            self._live_by_load,
            changes,
            tuple(self._entering),
            tuple(self._changed),
            tuple(self._removed),
            self._has_ranks,
            tuple(unused),
            tuple(self.conflicts),
        )
