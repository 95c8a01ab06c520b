"""Who is in the endpoint table: live endpoints by slot, and what a configuration makes of them.

plan() decides and touches nothing; take() carries it out. An endpoint is known by its pool and URL: its load, health,
connections and slot stay with it whatever else a configuration says of it. One that left keeps them until release().
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import count
from time import monotonic
from urllib.parse import urlsplit

import msgspec

from gateway.config import Config, EndpointSpec, Model, salt_member
from gateway.model_names import engine_name
from gateway.outbox import Outbox
from gateway.tls import Encryption
from gateway.tls_clients import ClientContexts
from gateway.upstream import Patience, Upstream
from policies.health import Health, State
from policies.latency import Belief, shape_for
from policies.model import Candidate, Endpoint, EndpointLoad, Layout, Role
from policies.speed_record import SpeedRecord

log = logging.getLogger("penstock")

HEALTHY = Health()  # nothing ever went wrong: a success has nothing to tell it


class LiveEndpoint:
    """One TP group with everything live about it.

    backlog_tokens  prefill_tokens when the engine was last heard: what its silence since then may be spent on
    produced        tokens the engine says it has ever generated, at its last scrape
    models          the names its engine lists; they count if has_list: else its list is not known, or it has none
    models_at       when its engine last said what it lists, or that it has no list
    kv_received_bytes   of KV from other engines, as it says, since its last start; None: it does not say
    stalled         it was found wedged: its /health is not believed until it generates again
    doubted_until   it gets few requests until then, for another endpoint has overtaken it; else None
    leaving         no configuration in force has it; requests of an older one may still be there
    drained         an operator wants it to get nothing new
    speed           the evidence of how fast it is, and the verdict on it
    warm_from       when it began to be asked (again), while it is given less than its cap for that; else None
    sent_tokens, hit_tokens   prompt tokens ever sent there, and those of them believed to be cached there
    """

    __slots__ = (
        *("backlog_tokens", "doubted_until", "drained", "encryption", "endpoint", "has_list", "health", "hit_tokens"),
        *("key_header", "kv_received_bytes", "leaving", "load", "models", "models_at", "produced", "sent_tokens"),
        *("spec", "speed", "stalled", "upstream", "warm_from"),
    )

    def __init__(
        self,
        endpoint: Endpoint,
        spec: EndpointSpec,
        load: EndpointLoad,
        patience: Patience,
        outbox: Outbox,
        encryption: Encryption | None = None,
    ) -> None:
        self.load = load
        self.upstream = Upstream(spec.url, None, patience, outbox, encryption)
        self.become(endpoint, spec, patience, encryption)
        self.health = HEALTHY
        self.models: tuple[str, ...] = ()
        self.has_list = False
        self.models_at: float | None = None
        self.backlog_tokens = self.sent_tokens = self.hit_tokens = 0
        self.produced: int | None = None
        self.kv_received_bytes: int | None = None
        self.warm_from: float | None = None
        self.doubted_until: float | None = None
        self.speed = SpeedRecord()
        self.stalled = self.leaving = self.drained = False

    def become(self, endpoint: Endpoint, spec: EndpointSpec, patience: Patience, encryption: Encryption | None) -> None:
        """What the configuration now says of it."""
        key = spec.api_key.reveal() if spec.api_key is not None else None
        self.endpoint = endpoint
        self.spec = spec
        self.key_header = {"Authorization": f"Bearer {key}"} if key else {}
        self.encryption = encryption
        self.upstream.become(key, patience, encryption)


class Member(msgspec.Struct, frozen=True, eq=False):
    """An endpoint of a configuration, with the live one that it is or will be."""

    live: LiveEndpoint
    endpoint: Endpoint
    spec: EndpointSpec


class Adoption(msgspec.Struct, frozen=True, eq=False):
    """What a configuration makes of the table. `pools` are candidates by pool; it holds until the table changes.
    `passed_over` are those who were found and whose name is another's, with their pools."""

    config: Config
    patience: Patience
    members: tuple[Member, ...]
    pools: Mapping[str, tuple[Candidate, ...]]
    passed_over: tuple[tuple[str, EndpointSpec], ...] = ()

    def serving(self, model: str, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Return the candidates whose engine lists the name."""
        listing = {id(member.live.load) for member in self.members if model in member.live.models}
        return tuple(each for each in candidates if id(each.load) in listing)

    def able(self, model: Model, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Return the candidates that may serve a configured model: those that list it or whose list is not known."""
        lists = {id(member.live.load): member.live.models for member in self.members if member.live.has_list}
        return tuple(
            each
            for each in candidates
            if (names := lists.get(id(each.load))) is None or engine_name(model, each.endpoint) in names
        )

    def listed_names(self, pool: str) -> list[str]:
        """Return the names that endpoints of the pool list, but for endpoints that are reserved for tenants."""
        own = [member.live for member in self.members if member.endpoint.pool == pool and not member.endpoint.tenants]
        return sorted({name for live in own if live.has_list for name in live.models})


class Moves(msgspec.Struct, frozen=True, eq=False):
    """Who came and who left, and the names that nobody has any more."""

    came: tuple[LiveEndpoint, ...]
    left: tuple[LiveEndpoint, ...]
    names: tuple[str, ...]


class Roster:
    """The live endpoints. `by_slot` is always the same list; a slot that is free keeps its last owner's shell.

    found   those that were discovered, by pool; discovery alone writes it
    """

    def __init__(self, outbox: Outbox) -> None:
        self.by_slot: list[LiveEndpoint] = []
        self._free: set[int] = set()
        self._outbox = outbox
        self._first = True
        self._contexts = ClientContexts()
        self._passed_over: frozenset[tuple[str, str]] = frozenset()
        self.found: dict[str, tuple[EndpointSpec, ...]] = {}

    def all(self) -> tuple[LiveEndpoint, ...]:
        """Everybody, those who are leaving included."""
        return tuple(live for live in self.by_slot if live.load.slot not in self._free)

    def plan(self, config: Config) -> Adoption:
        """What `config` would make of the table. Changes nothing."""
        patience = Patience(config.timeouts.connect, config.timeouts.first_byte, config.timeouts.stall)
        known = {(live.endpoint.pool, live.endpoint.url): live for live in self.all()}
        slots = self._slots()
        members = []
        found, passed_over = self._found(config)
        for pool, spec in config.pools.items():
            for each in (*spec.endpoints, *found.get(pool, ())):
                endpoint = described(pool, each)
                live = known.get((pool, endpoint.url))
                if live is None:
                    load = EndpointLoad(next(slots), expected(config, endpoint))
                    live = LiveEndpoint(endpoint, each, load, patience, self._outbox, self._contexts.of(each))
                members.append(Member(live, endpoint, each))
        pools: dict[str, list[Candidate]] = {pool: [] for pool in config.pools}
        for member in members:
            pools[member.endpoint.pool].append(Candidate(member.endpoint, member.live.load))
        candidates = {pool: tuple(each) for pool, each in pools.items()}
        return Adoption(config, patience, tuple(members), candidates, tuple(passed_over))

    def _found(self, config: Config) -> tuple[dict[str, list[EndpointSpec]], list[tuple[str, EndpointSpec]]]:
        """By pool, those that were found besides those that the configuration names; and those whose name is another's,
        in whatever pool. They are in once nobody else is called so: their source would not tell of them again."""
        taken = {each.shown_name for spec in config.pools.values() for each in spec.endpoints}
        found: dict[str, list[EndpointSpec]] = {}
        passed_over = []
        for pool, spec in config.pools.items():
            named = {each.url for each in spec.endpoints}
            for each in self.found.get(pool, ()) if spec.discover is not None else ():
                if each.url in named:
                    continue
                if each.shown_name in taken:
                    passed_over.append((pool, each))
                else:
                    taken.add(each.shown_name)
                    found.setdefault(pool, []).append(each)
        return found, passed_over

    def _slots(self) -> Iterator[int]:
        """Slots to give, in order: the freed ones, then new ones."""
        yield from sorted(self._free)
        yield from count(len(self.by_slot))

    def take(self, adoption: Adoption) -> Moves:
        """Carry it out: newcomers get their slots, everybody the attributes that the configuration says."""
        before = {id(live): live.endpoint.name for live in self.all() if not live.leaving}
        came = [member.live for member in adoption.members if id(member.live) not in before]
        for member in adoption.members:
            live = member.live
            if live.leaving or not self._has(live):
                self._enter(live)
            live.become(member.endpoint, member.spec, adoption.patience, self._contexts.of(member.spec))
        staying = {id(member.live) for member in adoption.members}
        left = [live for live in self.all() if id(live) in before and id(live) not in staying]
        for live in left:
            live.leaving = True
        names = set(before.values()) - {member.endpoint.name for member in adoption.members}
        self._tell(adoption.passed_over)
        self._first = False
        return Moves(tuple(came), tuple(left), tuple(sorted(names)))

    def _tell(self, passed_over: tuple[tuple[str, EndpointSpec], ...]) -> None:
        """Once of each, for as long as it is passed over."""
        before, self._passed_over = self._passed_over, frozenset((pool, each.url) for pool, each in passed_over)
        for pool, each in passed_over:
            if (pool, each.url) not in before:
                name = each.shown_name
                log.warning("pool %s: %s is passed over: another endpoint is called %s", pool, each.url, name)

    def _has(self, live: LiveEndpoint) -> bool:
        slot = live.load.slot
        return slot < len(self.by_slot) and self.by_slot[slot] is live and slot not in self._free

    def _enter(self, live: LiveEndpoint) -> None:
        """One who returns before it was gone stays what it was. A newcomer is asked once a probe has found it well."""
        slot = live.load.slot
        live.leaving = False
        if self._has(live):
            return
        if not self._first:
            now = monotonic()
            live.health = Health(State.EJECTED, now, until=now)
        self._free.discard(slot)
        self.by_slot[slot : slot + 1] = [live]

    def release(self, live: LiveEndpoint) -> None:
        """Nobody can ask for it any more: its slot may be given to another."""
        self._free.add(live.load.slot)


def described(pool: str, spec: EndpointSpec) -> Endpoint:
    """The endpoint as policies see it."""
    layout = spec.layout
    return Endpoint(
        name=spec.shown_name,
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
    )


def _bootstrap(spec: EndpointSpec) -> str | None:
    """A port alone is of the endpoint's own host."""
    if spec.bootstrap is None or not spec.bootstrap.startswith(":"):
        return spec.bootstrap
    host = urlsplit(spec.url).netloc.rpartition(":")[0]
    return host + spec.bootstrap


def expected(config: Config, endpoint: Endpoint) -> Belief:
    """How fast a newcomer is taken to be: by its GPU, its layout, and the largest model of its pool."""
    sized = [model for model in config.models if model.pool == endpoint.pool and model.parameters is not None]
    model = max(sized, key=lambda each: each.parameters or 0.0, default=None)
    params_b = active_b = None
    if model is not None:
        params_b, active_b = model.parameters, model.active_parameters
    elif "gpu" not in endpoint.labels:
        return Belief()
    layout = endpoint.layout
    return Belief(shape_for(endpoint.labels.get("gpu"), layout.tp, layout.pp, params_b, active_b))
