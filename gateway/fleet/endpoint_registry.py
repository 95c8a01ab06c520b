"""The registry of live endpoints, and how a new configuration changes them.

plan() computes the changes without side effects, and apply() carries them out. An endpoint is
identified by its pool and URL. While both stay the same, a new configuration keeps its load,
health, connections and slot number. An endpoint that left the configuration has them until
release().
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf
from time import monotonic
from urllib.parse import urlsplit

import msgspec

from gateway.config import Config, EndpointSpec, Model, salt_member
from gateway.fleet.engine_metrics import UNKNOWN_PROGRESS
from gateway.fleet.engine_model_names import engine_name
from gateway.http.outgoing_tls import ClientContexts
from gateway.http.upstream import ConnectionPool, UpstreamTimeouts
from gateway.http.write_queue import WriteQueue
from gateway.util.tls_contexts import Encryption
from policies.endpoint_load import EndpointLoad, LoadChanges
from policies.engine.output_length import RecentLengths
from policies.engine.step_time import SpeedBelief, shape_for
from policies.engine_kinds import ENGINE_TRAITS
from policies.health.endpoint_health import Health, HealthState
from policies.health.speed_samples import SpeedRecord, SpeedVerdict
from policies.health.stall import is_doubted
from policies.routing_types import Candidate, Endpoint, Role, TokenPrice, endpoint_key
from policies.sizing.parallel_layout import Layout

log = logging.getLogger("penstock")

# Health of an endpoint that has never failed. Callers compare by identity to skip success events.
INITIAL_HEALTH = Health()


class LiveEndpoint:
    """One endpoint (an engine process behind one URL) with its configuration and live state.

    backlog_tokens     prompt tokens still to be computed when the engine last sent a byte; a large
                       backlog explains a long silence
    progress           counters of the engine's work, from the last scrape of its metrics
    models             names of the models that its engine lists; valid only if has_list is set
    models_at          monotonic time at which its engine last sent its list of models, or reported
                       that it has none
    answers_whole      whether its engine answered the last request for a stream with whole JSON
    has_list           whether its engine has sent a list of models
    lacks_health       whether its engine has no page at `health.path`; then its list of models is
                       requested as the health check
    api_paths          paths of the APIs that its engine lists at /openapi.json; empty if unknown
    has_tried_apis     whether the gateway has tried which translatable APIs its engine serves; only
                       for engines without /openapi.json
    missing_paths      those of the tried paths that its engine answered with 404, 405 or 501
    keeps_responses    whether its engine stores responses for later requests; None if unknown
    kv_received_bytes  KV bytes received from other engines since its start; None if not reported
    is_stalled         whether it stopped generating. Then its /health page is not trusted until it
                       generates a token
    throttled_until    monotonic time until which it gets few requests, because it was late; else
                       None
    refused_until      monotonic time until which its engine asked for no requests (429, 503); 0.0
                       if it never did
    is_unresolved      whether its host name could not be resolved at the last health check
    is_leaving         whether no current configuration contains it; older requests may still run
                       there
    is_drained         whether an operator drained it: it gets no new requests
    speed              the measurements of its speed, and the verdict on them
    slow_start_at      monotonic time at which it entered rotation, while its limit of concurrent
                       requests still rises; else None
    sent_tokens        total prompt tokens sent to it
    hit_tokens         those of sent_tokens that the prefix index predicted to be cached there
    """

    __slots__ = (
        *(
            "answers_whole",
            "api_paths",
            "backlog_tokens",
            "throttled_until",
            "refused_until",
            "is_unresolved",
            "is_drained",
            "encryption",
            "endpoint",
            "has_list",
            "has_tried_apis",
        ),
        *(
            "health",
            "hit_tokens",
            "keeps_responses",
            "key_header",
            "kv_received_bytes",
            "is_leaving",
            "lacks_health",
            "missing_paths",
            "load",
            "models",
        ),
        *(
            "models_at",
            "progress",
            "sent_tokens",
            "spec",
            "speed",
            "is_stalled",
            "upstream",
        ),
        "slow_start_at",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        spec: EndpointSpec,
        load: EndpointLoad,
        timeouts: UpstreamTimeouts,
        write_queue: WriteQueue,
        encryption: Encryption | None = None,
    ) -> None:
        self.load = load
        self.upstream = ConnectionPool(spec.url, None, timeouts, write_queue, encryption)
        self.reconfigure(endpoint, spec, timeouts, encryption)
        self.health = INITIAL_HEALTH
        self.models: tuple[str, ...] = ()
        self.has_list = self.lacks_health = self.has_tried_apis = False
        self.api_paths: frozenset[str] = frozenset()
        self.missing_paths: frozenset[str] = frozenset()
        self.keeps_responses: bool | None = None
        self.models_at: float | None = None
        self.backlog_tokens = self.sent_tokens = self.hit_tokens = 0
        self.progress: tuple[int | None, float | None] = UNKNOWN_PROGRESS
        self.kv_received_bytes: int | None = None
        self.slow_start_at: float | None = None
        self.throttled_until: float | None = None
        self.refused_until = 0.0
        self.speed = SpeedRecord()
        self.is_stalled = self.is_leaving = self.is_drained = self.is_unresolved = False
        self.answers_whole = False

    @property
    def cause(self) -> str | None:
        """Return in one word why the endpoint is or was out of rotation; None if it never was."""
        if self.is_unresolved:
            return "unresolved"
        return None if self.health.cause is None else str(self.health.cause)

    @property
    def is_doubted(self) -> bool:
        """Return whether the endpoint gets few requests because it was late or may be slow."""
        is_suspect = self.speed.verdict is SpeedVerdict.SUSPECT
        return (self.throttled_until is not None or is_suspect) and is_doubted(self.load)

    def reconfigure(
        self,
        endpoint: Endpoint,
        spec: EndpointSpec,
        timeouts: UpstreamTimeouts,
        encryption: Encryption | None,
    ) -> None:
        """Apply the settings that a new configuration has for this endpoint."""
        key = spec.api_key.reveal() if spec.api_key is not None else None
        self.endpoint = endpoint
        self.spec = spec
        if endpoint.stated_slots < inf:
            self.load.slots = endpoint.stated_slots
        self.key_header = {"Authorization": f"Bearer {key}"} if key else {}
        self.encryption = encryption
        self.upstream.reconfigure(key, timeouts, encryption, endpoint.rank)


def step_tokens(live: LiveEndpoint) -> int:
    """Return how many prompt tokens the endpoint's current prefill step may process at most."""
    load, speed = live.load, live.speed
    others = load.in_flight - load.decoding - speed.waiting
    return speed.step_tokens(load.prefill_tokens, load.belief.shape.budget_tokens, others)


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

    def filter_by_model(
        self, model: str, candidates: tuple[Candidate, ...]
    ) -> tuple[Candidate, ...]:
        """Return the candidates whose engine lists this model name."""
        listing = {id(member.live.load) for member in self.members if model in member.live.models}
        return tuple(candidate for candidate in candidates if id(candidate.load) in listing)

    def candidates_for(
        self, model: Model, candidates: tuple[Candidate, ...]
    ) -> tuple[Candidate, ...]:
        """Return the candidates that may serve a configured model.

        A candidate may serve it if its engine lists the model's name, or has sent no list of
        models.
        """
        lists = {
            id(member.live.load): member.live.models
            for member in self.members
            if member.live.has_list
        }
        return tuple(
            candidate
            for candidate in candidates
            if (names := lists.get(id(candidate.load))) is None
            or engine_name(model, candidate.endpoint) in names
        )

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

    def listed_names(self, pool: str) -> list[str]:
        """Return the names of the models that the engines of a pool list, sorted.

        Endpoints that are reserved for certain tenants are left out.
        """
        public = [
            member.live
            for member in self.members
            if member.endpoint.pool == pool and not member.endpoint.tenants
        ]
        return sorted({name for live in public if live.has_list for name in live.models})


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
        learned = {live.endpoint.pool: live.load.timeline.lengths for live in known.values()}
        slots = self._unused_slots()
        members = []
        discovered, conflicts = self._usable_discovered(config)
        for pool, pool_spec in config.pools.items():
            specs = (*pool_spec.endpoints, *discovered.get(pool, ()))
            lengths = learned.get(pool) or RecentLengths()
            for new_spec, rank in _with_ranks(specs):
                live = known.get(endpoint_key(pool, new_spec.url, rank))
                if live is not None and live.spec == new_spec:
                    # Of a thousand endpoints, most stay as they are.
                    endpoint, spec = live.endpoint, live.spec
                else:
                    endpoint, spec = to_endpoint(pool, new_spec, rank), new_spec
                if live is None:
                    load = EndpointLoad(next(slots), prior_belief(config, endpoint), lengths)
                    encryption = self._contexts.encryption_for(spec)
                    live = LiveEndpoint(
                        endpoint, spec, load, timeouts, self._write_queue, encryption
                    )
                members.append(PlannedEndpoint(live, endpoint, spec))
        candidates = _candidates_by_pool(config, members)
        parts = (tuple(members), candidates, self._changes, tuple(conflicts))
        return RegistryPlan(config, timeouts, *parts)

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
        # One that is added again before its release keeps its state.
        #
        # A new endpoint starts as ejected, so it gets requests only after a successful probe. The
        # endpoints of the first configuration are exempt.
        slot = live.load.slot
        live.is_leaving = False
        if self._has(live):
            return
        if not self._is_first_plan:
            now = monotonic()
            live.health = Health(HealthState.EJECTED, now, until=now)
        self._free.discard(slot)
        self.by_slot[slot : slot + 1] = [live]

    def release(self, live: LiveEndpoint) -> None:
        """Free the slot number of an endpoint that no request uses any more."""
        self._free.add(live.load.slot)


def _with_ranks(specs: Iterable[EndpointSpec]) -> Iterator[tuple[EndpointSpec, int | None]]:
    # Yield each endpoint's configuration with None, or with each of its ranks if it pins them.
    for spec in specs:
        if spec.pin_ranks:
            for rank in range(spec.layout.dp):
                yield spec, rank
        else:
            yield spec, None


def _candidates_by_pool(
    config: Config, members: Sequence[PlannedEndpoint]
) -> dict[str, tuple[Candidate, ...]]:
    pools: dict[str, list[Candidate]] = {pool: [] for pool in config.pools}
    for member in members:
        pools[member.endpoint.pool].append(Candidate(member.endpoint, member.live.load))
    return {pool: tuple(candidates) for pool, candidates in pools.items()}


def to_endpoint(pool: str, spec: EndpointSpec, rank: int | None = None) -> Endpoint:
    """Return the part of an endpoint's configuration that routing policies use.

    rank  the data-parallel rank that the endpoint stands for; None for the whole engine
    """
    layout = spec.layout
    return Endpoint(
        name=spec.display_name if rank is None else f"{spec.display_name}/dp{rank}",
        url=spec.url,
        pool=pool,
        served_model=spec.served_model or "",
        role=Role(spec.role),
        engine=spec.engine,
        layout=Layout(layout.tp, layout.pp, layout.ep, layout.dp),
        labels=dict(spec.labels),
        max_concurrency=spec.max_concurrency,
        bootstrap=_bootstrap(spec),
        context_tokens=spec.context_tokens,
        salt_member=salt_member(spec.engine, spec.cache_salt),
        tenants=frozenset(spec.tenants),
        rank=rank,
        token_price=_token_price(spec),
    )


def _token_price(spec: EndpointSpec) -> TokenPrice | None:
    price = spec.token_price
    if price is None:
        return None
    cached = price.prompt if price.cached is None else price.cached
    return TokenPrice(price.prompt, cached, price.answer)


def _bootstrap(spec: EndpointSpec) -> str | None:
    # Return the bootstrap address; a bare port (":8998") is on the endpoint's own host.
    if spec.bootstrap is None or not spec.bootstrap.startswith(":"):
        return spec.bootstrap
    host = urlsplit(spec.url).netloc.rpartition(":")[0]
    return host + spec.bootstrap


def prior_belief(config: Config, endpoint: Endpoint) -> SpeedBelief:
    """Estimate the speed of a new endpoint, before any measurement.

    The estimate follows from its GPU, its parallel layout and the largest model of its pool.
    """
    sized = [
        model
        for model in config.models
        if model.pool == endpoint.pool and model.parameters is not None
    ]
    model = max(sized, key=lambda candidate: candidate.parameters or 0.0, default=None)
    params_b = active_b = None
    if model is not None:
        params_b, active_b = model.parameters, model.active_parameters
    elif "gpu" not in endpoint.labels:
        return SpeedBelief()
    layout = endpoint.layout
    gpu = endpoint.labels.get("gpu")
    return SpeedBelief(shape_for(gpu, layout.tp, layout.pp, params_b, active_b))
