"""One immutable generation of what the operator asked for: routes by model name, tenants, limits.

build() turns a Config and the live parts into a Plan and changes nothing; carrying it out is reload/swap.py's. Live
state is only referenced, never copied: replacing a snapshot forgets nothing; an exchange keeps the one it began with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from gateway import legs, shadow
from gateway.cache_salts import cache_salts
from gateway.canary import Sides, chosen
from gateway.config import AdmissionSpec, Config, Model, PolicySpec, Secret
from gateway.endpoints import EndpointTable
from gateway.gate import Gate, Room
from gateway.resume.going_on import prepare_recorded
from gateway.roster import Adoption
from gateway.route import CanaryRoute, PoolTrials, Route, Snapshot
from gateway.shadow import Shadows
from gateway.slo import Levels
from gateway.split import pairing
from policies import admissions, registry
from policies.admission import Admission
from policies.contract import Policy
from policies.filters import telling
from policies.model import Candidate, EngineKind


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
    for model in _models(config, discovered):
        pool = model.pool
        members = serving[pool] if config.models else adoption.serving(model.name, serving[pool])
        split = pairing.split_route(model, policies[pool], candidates[pool])
        route = Route(
            model.name,
            pool,
            model.context_tokens,
            _among(policies[pool], candidates[pool]),
            members,
            rooms[pool].room,
            legs.prepare if model.resume is None else partial(prepare_recorded, model.resume),
            policies[pool].reads_prefix or config.observability.access_blocks,
            rooms[pool].believes,
            levels.named(model.slo),
            any(each.endpoint.engine is EngineKind.VLLM for each in members),
            tuple((tier.model, tier.penalty) for tier in model.overflow),
            split,
            tried[pool].shadows,
            resume=model.resume,
            sequences=config.limits.sequences,
        )
        route = _with_canary(route, config, model, tried[pool], candidates[pool])
        routes.update(dict.fromkeys((model.name, *model.aliases), route))
    tenants = {_digest(key): tenant.name for tenant in config.tenants for key in (tenant.key, *tenant.keys)}
    generation = before.generation + 1 if before is not None else 1
    snapshot = Snapshot(generation, config, routes, tenants, policies, levels, tried, cache_salts(config))
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


def _tried(pool: str, config: Config, endpoints: EndpointTable, policy: Policy, before: Snapshot | None) -> PoolTrials:
    """What a pool tries beside its policy. What stays as configured, beside the same one, goes on as it is."""
    spec, old = config.pools[pool], before.config.pools.get(pool) if before is not None else None
    if before is not None and old is not None and before.policies[pool] is policy:
        had = before.tried[pool]
        if (old.shadow, old.canary) == (spec.shadow, spec.canary):
            return had
        kept = PoolTrials(
            had.shadows if old.shadow == spec.shadow else None,
            *((had.canary, had.sides) if old.canary == spec.canary else (None, None)),
        )
    else:
        kept = PoolTrials()
    shadows, canary, sides = kept.shadows, kept.canary, kept.sides
    if spec.shadow and shadows is None:
        parts = shadow.named([(each.name, each.params, _policy(each)) for each in spec.shadow])
        shadows = Shadows(pool, parts, endpoints, policy)
    if spec.canary is not None and canary is None:
        canary, sides = _policy(spec.canary.policy), Sides(pool, spec.canary, policy.name)
    return PoolTrials(shadows, canary, sides)


def _with_canary(
    route: Route, config: Config, model: Model, tried: PoolTrials, members: tuple[Candidate, ...]
) -> Route:
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
    return replace(route, canary=CanaryRoute(chosen(route.pool, spec), other, tried.sides))


def _rooms(
    config: Config,
    gate: Gate,
    serving: Mapping[str, tuple[Candidate, ...]],
    policies: Mapping[str, Policy],
    tried: Mapping[str, PoolTrials],
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


def _models(config: Config, discovered: Mapping[str, Sequence[str]]) -> list[Model]:
    """The configured models; without any, what the engines of each pool say they serve."""
    if config.models:
        return list(config.models)
    return [Model(name=name, pool=pool) for pool in config.pools for name in discovered.get(pool, ())]
