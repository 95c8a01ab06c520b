"""One immutable generation of what the operator asked for: routes by model name, tenants, limits.

build() turns a Config and the live parts into a Plan and changes nothing; carrying it out is reload/swap.py's. Live
state is only referenced, never copied: replacing a snapshot forgets nothing; an exchange keeps the one it began with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from gateway import legs, shadow
from gateway.answer import Failure, GatewayError
from gateway.booking import Booking
from gateway.cache_salts import CacheSalts, cache_salts
from gateway.canary import Chosen, Sides, chosen
from gateway.client import Client
from gateway.config import AdmissionSpec, Config, Model, PolicySpec, Resume, Secret
from gateway.endpoints import EndpointTable
from gateway.exchange import Exchange
from gateway.gate import Gate, Room
from gateway.model_names import common_name, explicit_models, unlisted_message
from gateway.openai import Call
from gateway.resume import going_on
from gateway.roster import Adoption
from gateway.shadow import Shadows
from gateway.slo import Levels
from gateway.split import pairing
from gateway.split.pairing import SplitRoute
from policies import admissions, registry
from policies.admission import Admission
from policies.contract import Policy
from policies.filters import telling
from policies.model import STANDARD, Candidate, EngineKind, Request, Slo


class Route(msgspec.Struct, frozen=True):
    """Where a model name leads. `name` is the canonical one, also for aliases.

    candidates  those who serve whole requests
    fingerprints  whether prompts are fingerprinted: the policy reads prefixes, or the access log has blocks
    watched     somebody reads beliefs of them: only then is there something to note at a pick
    sequences   most prompts x choices of one request
    engine_name what all candidates call the model; "" if each endpoint has its own name for it
    is_partial  some endpoints of its pool do not serve it, so a Permit of the pool may come without room at the others
    slo         the promise to requests that name none
    low_first   whether its engines take a low number in a body's `priority` for urgent
    overflow    names and penalties of the smaller models that may serve in place of a refusal
    split       how requests are split between prefill and decode; None: never
    shadows     policies that are asked the same, for nothing; trial  who serves a part of its requests instead
    resume      whether and how streams that break are continued elsewhere; leg  what serves it from a booked endpoint
    """

    name: str
    pool: str
    context_tokens: int | None
    policy: Policy
    candidates: tuple[Candidate, ...]
    room: Room
    fingerprints: bool = False
    watched: bool = False
    slo: Slo = STANDARD
    low_first: bool = False
    overflow: tuple[tuple[str, float], ...] = ()
    split: SplitRoute | None = None
    shadows: Shadows | None = None
    trial: Trial | None = None
    resume: Resume | None = None
    leg: Leg = legs.single
    sequences: int = 256
    engine_name: str = ""
    is_partial: bool = False

    @property
    def served_model(self) -> str:
        """The model's name in a parsed Request, whatever its engines call it."""
        return self.name


Leg = Callable[[Route, Exchange, Call, Client, Booking], Awaitable[None]]
"""Serves one exchange from the endpoint that was booked for it. Raises UpstreamBroke."""


class Trial(msgspec.Struct, frozen=True):
    """A canary: which requests of a route are served by another that is like it but for its policy."""

    chosen: Chosen
    route: Route
    sides: Sides

    def side(self, x: Exchange, request: Request, primary: Route) -> Route:
        """The route of one request; the exchange is counted on its side."""
        if self.chosen.takes(request):
            x.side = self.sides.canary
            return self.route
        x.side = self.sides.primary
        return primary


class Tried(msgspec.Struct, frozen=True):
    """What a pool tries beside the policy that serves: by shadows, and by a canary with what its sides came to."""

    shadows: Shadows | None = None
    canary: Policy | None = None
    sides: Sides | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        shadows = () if self.shadows is None else tuple(each.policy for each in self.shadows.policies)
        return shadows if self.canary is None else (*shadows, self.canary)

    @property
    def reads_beliefs(self) -> bool:
        """What a shadow would have gained is told in beliefs, whoever made it."""
        return self.shadows is not None or (self.canary is not None and self.canary.reads_beliefs)


class Snapshot(msgspec.Struct, frozen=True, weakref=True):
    """`routes` by every name a client may use, aliases included; `tenants` by SHA-256 of the key, empty when open.

    `unlisted` tells by model name, aliases included, why no route has it: no endpoint of its pool lists it. `able` are
    the slots by model of the endpoints that may serve it, prefill endpoints included.
    `policies` and `tried` by pool. Nothing that outlives a request may hold one: so it is known when it is out of use.
    """

    generation: int
    config: Config
    routes: Mapping[str, Route]
    tenants: Mapping[bytes, str]
    policies: Mapping[str, Policy]
    levels: Levels
    tried: Mapping[str, Tried] = {}
    salts: CacheSalts | None = None
    unlisted: Mapping[str, str] = {}
    able: Mapping[str, tuple[int, ...]] = {}

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """The tenant a request belongs to. Looking up a digest takes the same time for any wrong key."""
        if not self.tenants:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        tenant = self.tenants.get(digest)
        if tenant is None or scheme.lower() != "bearer":
            raise GatewayError(Failure.BAD_KEY, "Incorrect API key provided: send 'Authorization: Bearer <key>'.")
        return tenant


class Opening(msgspec.Struct, frozen=True):
    """What a room becomes: who serves whole requests there, who decides, and the shares of its tenants.

    `believes`: somebody reads beliefs of its pool's endpoints, a policy, an admission, or who may overflow into it.
    """

    room: Room
    serving: tuple[Candidate, ...]
    admission: Admission
    shares: Mapping[str, float]
    believes: bool


class Plan(msgspec.Struct, frozen=True):
    """A snapshot, and what the live parts become with it, rooms by pool. It holds until the next one is carried out."""

    snapshot: Snapshot
    adoption: Adoption
    rooms: Mapping[str, Opening]


def build(
    config: Config,
    endpoints: EndpointTable,
    gate: Gate,
    discovered: Mapping[str, Sequence[str]],
    before: Snapshot | None = None,
) -> Plan:
    """The generation after `before`; changes nothing. A policy that stays as configured stays the one it is.

    `discovered` lists model names per pool as engines report them, for configs that name none.
    Raises policies.registry.PolicyConfigError for a policy that cannot be built.
    """
    policies = _policies(config, before)
    tried = {pool: _tried(pool, config, endpoints, policies[pool], before) for pool in config.pools}
    adoption = endpoints.plan(config)
    candidates = adoption.pools
    serving = {name: pairing.whole(members) for name, members in candidates.items()}  # prefill takes nobody's place
    rooms = _rooms(config, gate, serving, policies, tried, before)
    levels = Levels(config)
    routes: dict[str, Route] = {}
    unlisted: dict[str, str] = {}
    able: dict[str, tuple[int, ...]] = {}
    for model in _models(config, discovered):
        pool = model.pool
        listing = _able(config, adoption, model, candidates[pool])
        able[model.name] = tuple(each.load.slot for each in listing)
        members = pairing.whole(listing)
        if serving[pool] and not members:
            message = unlisted_message(model, serving[pool], adoption.listed_names(pool))
            unlisted.update(dict.fromkeys((model.name, *model.aliases), message))
            continue
        split = pairing.split_route(model, policies[pool], listing)
        route = Route(
            model.name,
            pool,
            model.context_tokens,
            _among(policies[pool], listing),
            members,
            rooms[pool].room,
            policies[pool].reads_prefix or config.observability.access_blocks,
            rooms[pool].believes,
            levels.named(model.slo),
            any(each.endpoint.engine is EngineKind.VLLM for each in members),
            tuple((tier.model, tier.penalty) for tier in model.overflow),
            split,
            tried[pool].shadows,
            resume=model.resume,
            leg=legs.single if model.resume is None else going_on.single,
            sequences=config.limits.sequences,
            engine_name=common_name(model, members),
            is_partial=len(members) < len(serving[pool]),
        )
        route = _with_canary(route, config, model, tried[pool], listing)
        routes.update(dict.fromkeys((model.name, *model.aliases), route))
    tenants = {_digest(key): tenant.name for tenant in config.tenants for key in (tenant.key, *tenant.keys)}
    generation = before.generation + 1 if before is not None else 1
    salts = cache_salts(config)
    snapshot = Snapshot(generation, config, routes, tenants, policies, levels, tried, salts, unlisted, able)
    return Plan(snapshot, adoption, rooms)


def _digest(key: Secret) -> bytes:
    return hashlib.sha256(key.reveal().encode()).digest()


def _policies(config: Config, before: Snapshot | None) -> dict[str, Policy]:
    made = {}
    for name, pool in config.pools.items():
        old = before.config.pools.get(name) if before is not None else None
        canary = before.tried[name].canary if before is not None and old is not None else None
        if before is not None and old is not None and old.policy == pool.policy:
            made[name] = before.policies[name]
        elif canary is not None and old is not None and old.canary is not None and old.canary.policy == pool.policy:
            made[name] = canary  # it is promoted, with all it has learnt
        else:
            made[name] = _policy(pool.policy)
    return made


def _policy(spec: PolicySpec) -> Policy:
    return registry.build(spec.name, spec.params)


def _among(policy: Policy, members: tuple[Candidate, ...]) -> Policy:
    """The policy as requests to these meet it: a filter that can keep out none of them is not asked."""
    return msgspec.structs.replace(policy, filters=telling(policy.filters, members))


def _tried(pool: str, config: Config, endpoints: EndpointTable, policy: Policy, before: Snapshot | None) -> Tried:
    """What a pool tries beside its policy. What stays as configured, beside the same one, goes on as it is."""
    spec, old = config.pools[pool], before.config.pools.get(pool) if before is not None else None
    if before is not None and old is not None and before.policies[pool] is policy:
        had = before.tried[pool]
        if (old.shadow, old.canary) == (spec.shadow, spec.canary):
            return had
        kept = Tried(
            had.shadows if old.shadow == spec.shadow else None,
            *((had.canary, had.sides) if old.canary == spec.canary else (None, None)),
        )
    else:
        kept = Tried()
    shadows, canary, sides = kept.shadows, kept.canary, kept.sides
    if spec.shadow and shadows is None:
        parts = shadow.named([(each.name, each.params, _policy(each)) for each in spec.shadow])
        shadows = Shadows(pool, parts, endpoints, policy)
    if spec.canary is not None and canary is None:
        canary, sides = _policy(spec.canary.policy), Sides(pool, spec.canary, policy.name)
    return Tried(shadows, canary, sides)


def _with_canary(route: Route, config: Config, model: Model, tried: Tried, members: tuple[Candidate, ...]) -> Route:
    """The route, and for a part of its requests one that has the canary's policy; no shadows ask beside that."""
    spec = config.pools[route.pool].canary
    if spec is None or tried.canary is None or tried.sides is None:
        return route
    replace = msgspec.structs.replace
    split = pairing.split_route(model, tried.canary, members)
    other = replace(
        route,
        policy=_among(tried.canary, members),
        fingerprints=tried.canary.reads_prefix or config.observability.access_blocks,
        split=split,
        shadows=None,
    )
    return replace(route, trial=Trial(chosen(route.pool, spec), other, tried.sides))


def _rooms(
    config: Config,
    gate: Gate,
    serving: Mapping[str, tuple[Candidate, ...]],
    policies: Mapping[str, Policy],
    tried: Mapping[str, Tried],
    before: Snapshot | None,
) -> dict[str, Opening]:
    """What becomes of the rooms. An admission that stays as configured stays the one it is, with all it has learnt."""
    shares = {tenant.name: tenant.weight for tenant in config.tenants}
    kept_shares = before is not None and shares == {tenant.name: tenant.weight for tenant in before.config.tenants}
    tiers = {tier.model for model in config.models for tier in model.overflow}
    smaller = {model.pool for model in config.models if not tiers.isdisjoint((model.name, *model.aliases))}
    made = {}
    for name, pool in config.pools.items():
        room, old = gate.room(name), before.config.pools.get(name) if before is not None else None
        kept = kept_shares and old is not None and old.admission == pool.admission
        judge = room.admission if kept else _admission(pool.admission, shares)
        believes = policies[name].reads_beliefs or judge.reads_beliefs or name in smaller or tried[name].reads_beliefs
        made[name] = Opening(room, serving[name], judge, shares, believes)
    return made


def _admission(spec: AdmissionSpec, shares: Mapping[str, float]) -> Admission:
    """A live admission; one that weighs tenants hears their weights unless it has been given others."""
    known = admissions.params_type(spec.name).__struct_fields__
    params = {"weights": shares, **spec.params} if shares and "weights" in known else spec.params
    return admissions.build_admission(spec.name, params)


def _able(config: Config, adoption: Adoption, model: Model, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    if config.models:
        return adoption.able(model, candidates)
    return adoption.serving(model.name, candidates)


def _models(config: Config, discovered: Mapping[str, Sequence[str]]) -> list[Model]:
    """The configured models; without any, what the engines of each pool say they serve."""
    if config.models:
        return explicit_models(config)
    found = [(pool, name) for pool in config.pools for name in discovered.get(pool, ())]
    return [Model(name=name, pool=pool, served_model=name) for pool, name in found]
