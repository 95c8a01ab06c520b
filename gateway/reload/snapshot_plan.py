"""Plans a configuration's snapshot: routes, policies, tenants' keys, queues, trials, translations.

plan_steps() makes a SnapshotPlan from a Config and the live objects, without changing them. Then
reload/dry_run_and_swap.py applies the plan. A snapshot only refers to live objects, so replacing it
loses no state. Each request uses one snapshot from its start to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from random import Random
from time import monotonic

import msgspec

from gateway.admission.admission_controller import AdmissionController
from gateway.admission.pool_queue import PoolQueue
from gateway.config import AdmissionSpec, Config, Model, PolicySpec
from gateway.disagg import pairing
from gateway.fleet.endpoint_load_and_health import EndpointTable, set_beliefs_steps
from gateway.fleet.endpoint_registry import RegistryPlan
from gateway.fleet.model_alias_lookup import NameTable
from gateway.fleet.served_models import (
    common_name,
    explicit_models,
    listed_models,
    public_names,
    serving_endpoints,
    unlisted_message,
)
from gateway.forwarding import forward
from gateway.protocol.request.api_keys import key_digest
from gateway.protocol.request.cache_salts import new_cache_salts
from gateway.protocol.request.service_level_headers import ServiceClasses
from gateway.protocol.stored_response_ids import new_response_ids
from gateway.protocol.translate.translation_table import TRANSLATIONS, translated_paths
from gateway.proxy.resume import prepare_recorded
from gateway.routes_and_snapshot import CanaryRoute, ModelScope, PoolTrials, Route, Snapshot
from gateway.trials import shadow
from gateway.trials.canary import CanaryArms, create_sampler
from gateway.trials.shadow import Shadows
from gateway.util.work_in_turns import Steps, WorkMeter, run_at_once
from policies import admission_registry, policy_registry
from policies.admission.admission_policy import Admission
from policies.candidate_order import create_order
from policies.endpoint_load import LoadChanges
from policies.engine_kinds import ENGINE_TRAITS
from policies.filters import applicable
from policies.policy_types import Policy
from policies.routing_types import Candidate, Request, Role, RoutingQuery

NO_REQUEST = Request("", "", "", 1, 1)
"""The request of a query that only has the time and a random number generator."""

PASSED_PER_ITEM = 8
"""How many endpoints a simple pass over all of them handles in the time of an item of a WorkMeter.
"""


class PoolAdmissionPlan(msgspec.Struct, frozen=True):
    """What a new configuration changes for the wait queue of one pool.

    serving           the endpoints that serve whole requests
    uses_predictions  whether the pool's endpoints need latency predictions. They do if its routing
                      or its admission policy uses them, or if a larger model may send requests to
                      this pool
    """

    queue: PoolQueue
    serving: tuple[Candidate, ...]
    admission: Admission
    shares: Mapping[str, float]
    uses_predictions: bool


class SnapshotPlan(msgspec.Struct, frozen=True):
    """A new snapshot of the configuration, and the changes of live objects that belong to it.

    Applying another plan makes this one invalid.

    adoption    the changes of the endpoint registry
    admissions  the changes of the wait queues, by pool
    """

    snapshot: Snapshot
    adoption: RegistryPlan
    admissions: Mapping[str, PoolAdmissionPlan]


class _RouteParts(msgspec.Struct, frozen=True):
    # The parts from which the routes of a snapshot are built.
    #
    # They are by pool, except `config`, `adoption` and `classes`.
    config: Config
    adoption: RegistryPlan
    serving: Mapping[str, tuple[Candidate, ...]]
    policies: Mapping[str, Policy]
    trials: Mapping[str, PoolTrials]
    admissions: Mapping[str, PoolAdmissionPlan]
    classes: ServiceClasses
    rng: Random


class _RouteTable(msgspec.Struct, frozen=True):
    # The routes by model name or alias, the error messages of models without a route, and the slots
    # of the endpoints that list each model.
    routes: dict[str, Route] = {}
    unlisted: dict[str, str] = {}
    slots_by_model: dict[str, tuple[int, ...]] = {}


def build_plan(
    config: Config,
    endpoints: EndpointTable,
    gate: AdmissionController,
    before: Snapshot | None = None,
) -> SnapshotPlan:
    """Return the plan of the snapshot that follows `before`, without changing live objects.

    config     the new configuration
    endpoints  the table of live endpoints
    gate       the admission controller
    before     the current snapshot; None at the start. A policy whose configuration is unchanged
               is taken from it with its state

    A model that no endpoint of its pool lists gets no route. Raises
    policies.policy_registry.PolicyConfigError for a policy that cannot be built.
    """
    return run_at_once(plan_steps(config, endpoints, gate, before))


def plan_steps(
    config: Config,
    endpoints: EndpointTable,
    gate: AdmissionController,
    before: Snapshot | None = None,
) -> Steps[SnapshotPlan]:
    """Do the work of build_plan() in parts.

    The endpoints and the configuration must not change meanwhile. What is known of the engines,
    such as their lists of models, may change: then another plan must follow.
    """
    policies = _policies(config, before)
    trials = {
        pool: _pool_trials(pool, config, endpoints, policies[pool], before) for pool in config.pools
    }
    adoption = yield from endpoints.plan_steps(config)
    # Prefill endpoints have no part in the capacity of a wait queue.
    serving = {name: pairing.serving_whole(members) for name, members in adoption.pools.items()}
    admissions = _plan_admissions(config, gate, serving, policies, trials, before)
    yield from _set_beliefs_of_new(adoption, admissions)
    classes = ServiceClasses(config)
    parts = _RouteParts(
        config, adoption, serving, policies, trials, admissions, classes, endpoints.rng
    )
    models = yield from _models(adoption, before)
    table = yield from _route_table(models, parts)
    tenants, limits = _keys(config)
    yield
    scope = _scope(table)
    snapshot = Snapshot(
        before.generation + 1 if before is not None else 1,
        config,
        scope.routes,
        tenants,
        policies,
        classes,
        trials,
        new_cache_salts(config),
        scope.unlisted,
        table.slots_by_model,
        {digest: _scope(table, names) for digest, names in limits.items()},
        new_response_ids(config),
        {route.name: route.translated for route in table.routes.values() if route.translated},
    )
    return SnapshotPlan(snapshot, adoption, admissions)


def _set_beliefs_of_new(
    adoption: RegistryPlan, admissions: Mapping[str, PoolAdmissionPlan]
) -> Steps[None]:
    # Turn latency predictions of new endpoints on or off, while no request uses them.
    for pool, admission_plan in admissions.items():
        new = [
            Candidate(member.endpoint, member.live.load)
            for member in adoption.entering
            if member.endpoint.pool == pool and not member.live.is_leaving
        ]
        yield from set_beliefs_steps(new, admission_plan.uses_predictions)


def _route_table(models: Iterable[Model], parts: _RouteParts) -> Steps[_RouteTable]:
    table, adoption, meter = _RouteTable(), parts.adoption, WorkMeter()
    for model in models:
        pool = model.pool
        candidates = adoption.pools[pool]
        if meter.is_part_over(len(candidates) // PASSED_PER_ITEM + 1):
            yield
        listing = serving_endpoints(adoption, model, candidates)
        table.slots_by_model[model.name] = tuple(candidate.load.slot for candidate in listing)
        serving, names = parts.serving[pool], (model.name, *model.aliases)
        if serving and not pairing.serving_whole(listing):
            message = unlisted_message(model, serving, public_names(adoption, pool))
            table.unlisted.update(dict.fromkeys(names, message))
            continue
        if meter.is_part_over(len(candidates) // PASSED_PER_ITEM + 1):
            yield
        route = _route(model, listing, parts)
        if meter.is_part_over(len(candidates) // PASSED_PER_ITEM + 1):
            yield
        route = _with_translations(route, parts.config, adoption, listing)
        route = yield from _with_order(route, adoption.changes, parts.rng, meter)
        table.routes.update(dict.fromkeys(names, route))
    return table


def _route(model: Model, listing: tuple[Candidate, ...], parts: _RouteParts) -> Route:
    # Return the route of a model; `listing` are the endpoints that may serve it.
    config, policy, trials = parts.config, parts.policies[model.pool], parts.trials[model.pool]
    admission_plan, members = parts.admissions[model.pool], pairing.serving_whole(listing)
    route = Route(
        model.name,
        model.pool,
        model.context_tokens,
        _with_applicable_filters(policy, listing),
        members,
        admission_plan.queue,
        forward.prepare if model.resume is None else partial(prepare_recorded, model.resume),
        policy.reads_prefix or _logs_blocks(config, model.pool),
        admission_plan.uses_predictions,
        parts.classes.get_class(model.slo),
        any(ENGINE_TRAITS[candidate.endpoint.engine].is_low_first for candidate in members),
        tuple((tier.model, tier.penalty) for tier in model.overflow),
        pairing.split_route(model, policy, listing),
        trials.shadows,
        resume=model.resume,
        sequences=config.limits.sequences,
        engine_name=common_name(model, members),
    )
    return _with_canary(route, config, model, trials, listing)


def _logs_blocks(config: Config, pool: str) -> bool:
    # Return whether the block ids of prompts are recorded although no policy may read them.
    #
    # A pool that chooses its policy by replays needs them, to judge policies that read prefixes;
    # one with `sized_for` to know which share of its prompts is new.
    has_auto = config.pools[pool].auto is not None
    return bool(config.observability.access_blocks) or has_auto or pool in config.sized_for


def _with_translations(
    route: Route, config: Config, adoption: RegistryPlan, listing: tuple[Candidate, ...]
) -> Route:
    # Return the route with two sets of API paths: those that must be translated for its engines,
    # and those that it cannot serve.
    native, facts = config.pools[route.pool].native_apis, adoption.api_facts(listing)
    paths = translated_paths(native, lambda path: any(fact.lacks(path) for fact in facts))
    lacked = [ENGINE_TRAITS[fact.engine].lacked_paths for fact in facts]
    unserved = frozenset[str]().union(*lacked) - TRANSLATIONS.keys()
    if not paths and not unserved:
        return route
    replace, canary = msgspec.structs.replace, route.canary
    if canary is not None:
        canary = replace(canary, route=replace(canary.route, translated=paths, unserved=unserved))
    return replace(route, translated=paths, unserved=unserved, canary=canary)


def _scope(table: _RouteTable, names: Sequence[str] | None = None) -> ModelScope:
    # Return the models that an API key may use: all of them, or only those in `names`.
    routes, unlisted = table.routes, table.unlisted
    return ModelScope(
        NameTable(routes, unlisted.keys(), names), NameTable(unlisted, routes.keys(), names)
    )


def _keys(config: Config) -> tuple[dict[bytes, str], dict[bytes, tuple[str, ...]]]:
    tenants: dict[bytes, str] = {}
    limits: dict[bytes, tuple[str, ...]] = {}
    for tenant in config.tenants:
        keys = [(key, tenant.models) for key in (tenant.key, *tenant.keys)]
        keys += [(scoped.key, scoped.models) for scoped in tenant.scoped_keys]
        for key, models in keys:
            digest = key_digest(key.reveal())
            tenants[digest] = tenant.name
            if models:
                limits[digest] = models
    return tenants, limits


def _with_order(route: Route, changes: LoadChanges, rng: Random, meter: WorkMeter) -> Steps[Route]:
    # Return the route with its candidates kept in sorted order, if they are many.
    #
    # Shadows compare scans of all candidates, so a route that has shadows scans them as well.
    canary = route.canary
    if canary is not None:
        second = yield from _with_order(canary.route, changes, rng, meter)
        canary = msgspec.structs.replace(canary, route=second)
    order = None
    if route.shadows is None:
        order = create_order(route.policy, route.candidates, changes)
    if order is not None:
        for _ in order.build(RoutingQuery(NO_REQUEST, monotonic(), rng)):
            if meter.is_part_over():
                yield
    return msgspec.structs.replace(route, canary=canary, order=order)


def _policies(config: Config, before: Snapshot | None) -> dict[str, Policy]:
    # Return every pool's policy; the one in force is kept if its configuration has not changed.
    policies = {}
    for name, pool in config.pools.items():
        old = before.config.pools.get(name) if before is not None else None
        canary = before.trials[name].canary if before is not None and old is not None else None
        if before is not None and old is not None and old.policy == pool.policy:
            policies[name] = before.policies[name]
        elif (
            canary is not None
            and old is not None
            and old.canary is not None
            and old.canary.policy == pool.policy
        ):
            policies[name] = canary  # promoted, with everything it has learned
        else:
            policies[name] = _policy(pool.policy)
    return policies


def _policy(spec: PolicySpec) -> Policy:
    return policy_registry.build(spec.name, spec.params)


def _with_applicable_filters(policy: Policy, members: tuple[Candidate, ...]) -> Policy:
    # Return the policy without the filters that can reject none of these endpoints.
    return msgspec.structs.replace(policy, filters=applicable(policy.filters, members))


def _pool_trials(
    pool: str, config: Config, endpoints: EndpointTable, policy: Policy, before: Snapshot | None
) -> PoolTrials:
    # Return the shadows and the canary of a pool.
    #
    # A shadow or canary whose configuration has not changed keeps its results, unless the pool's
    # policy has changed.
    spec, old = config.pools[pool], None
    current_trials = PoolTrials()
    if before is not None:
        old = before.config.pools.get(pool)
    if before is not None and old is not None and before.policies[pool] is policy:
        current = before.trials[pool]
        if (old.shadow, old.canary) == (spec.shadow, spec.canary):
            return current
        is_same_canary = old.canary == spec.canary
        current_trials = PoolTrials(
            current.shadows if old.shadow == spec.shadow else None,
            current.canary if is_same_canary else None,
            current.arms if is_same_canary else None,
        )
    shadows, canary, arms = current_trials.shadows, current_trials.canary, current_trials.arms
    if spec.shadow and shadows is None:
        parts = shadow.name_policies(
            [(part.name, part.params, _policy(part)) for part in spec.shadow]
        )
        shadows = Shadows(pool, parts, endpoints, policy)
    if spec.canary is not None and canary is None:
        canary, arms = _policy(spec.canary.policy), CanaryArms(pool, spec.canary, policy.name)
    return PoolTrials(shadows, canary, arms)


def _with_canary(
    route: Route,
    config: Config,
    model: Model,
    trials: PoolTrials,
    members: tuple[Candidate, ...],
) -> Route:
    # Return the route with a canary route for a part of its requests, if one is configured.
    #
    # The canary route has the canary's policy and no shadows.
    spec = config.pools[route.pool].canary
    if spec is None or trials.canary is None or trials.arms is None:
        return route
    replace = msgspec.structs.replace
    split = pairing.split_route(model, trials.canary, members)
    second = replace(
        route,
        policy=_with_applicable_filters(trials.canary, members),
        fingerprints=trials.canary.reads_prefix or _logs_blocks(config, route.pool),
        split=split,
        shadows=None,
    )
    return replace(route, canary=CanaryRoute(create_sampler(route.pool, spec), second, trials.arms))


def _plan_admissions(
    config: Config,
    gate: AdmissionController,
    serving: Mapping[str, tuple[Candidate, ...]],
    policies: Mapping[str, Policy],
    trials: Mapping[str, PoolTrials],
    before: Snapshot | None,
) -> dict[str, PoolAdmissionPlan]:
    # Return the plan of every pool's wait queue.
    #
    # An admission policy is kept with its state if neither its configuration nor the tenants'
    # shares have changed.
    shares = {tenant.name: tenant.weight for tenant in config.tenants}
    has_same_shares = before is not None and shares == {
        tenant.name: tenant.weight for tenant in before.config.tenants
    }
    tiers = {tier.model for model in config.models for tier in model.overflow}
    tier_pools = {
        model.pool for model in config.models if not tiers.isdisjoint((model.name, *model.aliases))
    }
    split_pools = {model.pool for model in config.models if model.split is not None}
    plans = {}
    for name, pool in config.pools.items():
        queue, old = gate.pool_queue(name), None
        if before is not None:
            old = before.config.pools.get(name)
        is_same = has_same_shares and old is not None and old.admission == pool.admission
        admission = queue.admission if is_same else _admission(pool.admission, shares)
        uses_predictions = (
            policies[name].reads_forecast
            or admission.reads_forecast
            or name in tier_pools
            or (name in split_pools and any(map(_serves_both_phases, serving[name])))
            or trials[name].reads_predictions
        )
        plans[name] = PoolAdmissionPlan(queue, serving[name], admission, shares, uses_predictions)
    return plans


def _serves_both_phases(candidate: Candidate) -> bool:
    return candidate.endpoint.role is Role.BOTH


def _admission(spec: AdmissionSpec, shares: Mapping[str, float]) -> Admission:
    # Build the admission policy that a configuration names.
    #
    # A policy that takes weights gets the tenants' shares, unless its parameters give others.
    known = admission_registry.params_type(spec.name).__struct_fields__
    params = {"weights": shares, **spec.params} if shares and "weights" in known else spec.params
    return admission_registry.build_admission(spec.name, params)


def _models(plan: RegistryPlan, before: Snapshot | None) -> Steps[list[Model]]:
    # Return the configured models; without any, those that the engines of each pool list.
    if plan.config.models:
        return explicit_models(plan.config)
    served: list[tuple[str, str]] = []
    if before is not None and not before.config.models:
        served = [(route.pool, route.name) for route in before.routes.values()]
    yield
    names = listed_models(plan, served)
    return [Model(name=name, pool=pool, served_model=name) for pool, name in names]
