"""Routes of models to pools, the configuration snapshot, and the live objects that requests use.

reload/snapshot_plan.py builds snapshots from a configuration, reload/dry_run_and_swap.py makes one
the current one, and serve_request.py serves a request by its route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gateway.admission.admission_controller import AdmissionController
from gateway.admission.pool_queue import PoolQueue
from gateway.config import Config, Resume
from gateway.disagg.handoffs import Handoffs
from gateway.disagg.pairing import SplitRoute
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.fleet.reservation import Reservation
from gateway.forwarding.background_responses import BackgroundResponses
from gateway.forwarding.hedge import Hedger
from gateway.http.client_interface import Client
from gateway.protocol.request.api_call import Call
from gateway.protocol.request.api_keys import digest_of_headers, wrong_key
from gateway.protocol.request.cache_salts import CacheSalts
from gateway.protocol.request.request_body import CallShapes
from gateway.protocol.request.service_level_headers import ServiceClasses
from gateway.protocol.response.relay import Relay
from gateway.protocol.stored_response_ids import ResponseIds
from gateway.protocol.upstream_error import UpstreamError
from gateway.request_record import Exchange
from gateway.telemetry.accounting import Accounting
from gateway.trials.canary import CanaryArms, CanarySampler
from gateway.trials.mirror import Mirrors
from gateway.trials.shadow import Shadows
from policies.candidate_order import CandidateOrder
from policies.policy_types import Policy
from policies.routing_types import STANDARD, Candidate, Endpoint, Request, Slo

Prepare = Callable[
    [Exchange, Call, Client, Reservation, Callable[[], None], str], tuple[bytes, Call, Relay]
]
"""A function that builds the head, the body and the answer's relay of one attempt at a reserved
endpoint.

The callback among its arguments is called once, at the first generated token. The last argument is
the endpoint's name of the model.
"""


class Route(msgspec.Struct, frozen=True):
    """How the requests for one model are served.

    name          the canonical model name, also for aliases
    candidates    the endpoints that serve whole requests
    pool_queue    the admission queue of the model's pool
    prepare       function that builds an attempt at a whole request
    fingerprints  whether prompts are hashed block by block, because the policy uses cached prefixes
                  or requests are recorded with their block ids
    notes_picks   whether every choice of an endpoint is recorded, as latency predictions are in use
    slo           the service class of requests that name none
    is_low_first  whether the engines treat a low number in a body's `priority` as urgent
    overflow      smaller models that may serve a request that this model would refuse, each with
                  the penalty for choosing it
    split         how requests are split between prefill and decode; None: they are never split
    shadows       policies on trial that only compute what they would pick; None without a trial
    canary        the route on trial, which serves a share of the requests; None without a trial
    resume        how broken streams are continued on another endpoint; None: they are not
    sequences     maximum number of sequences in one request: its prompts times its choices (`n`)
    engine_name   the engines' name of the model; "" if each endpoint has its own
    translated    paths of the APIs that are served through another API, which its engines have
    unserved      paths of APIs that at least one of its engines does not serve, even in translation
    """

    name: str
    pool: str
    context_tokens: int | None
    policy: Policy
    candidates: tuple[Candidate, ...]
    pool_queue: PoolQueue
    prepare: Prepare
    fingerprints: bool = False
    notes_picks: bool = False
    slo: Slo = STANDARD
    is_low_first: bool = False
    overflow: tuple[tuple[str, float], ...] = ()
    split: SplitRoute | None = None
    shadows: Shadows | None = None
    canary: CanaryRoute | None = None
    resume: Resume | None = None
    sequences: int = 256
    engine_name: str = ""
    order: CandidateOrder | None = None
    translated: frozenset[str] = frozenset()
    unserved: frozenset[str] = frozenset()

    @property
    def served_model(self) -> str:
        """Return the model name that the client used, which may differ from the engines' name."""
        return self.name

    def resolve_name(self, endpoint: Endpoint) -> str:
        """Return the name by which the endpoint's engine knows the model of this route."""
        return self.engine_name or endpoint.served_model or self.name


class CanaryRoute(msgspec.Struct, frozen=True):
    """A policy on trial (canary) for a model, and the selection of the requests that it routes."""

    sampler: CanarySampler
    route: Route
    arms: CanaryArms

    def choose(self, exchange: Exchange, request: Request, primary: Route) -> Route:
        """Return the route on trial or `primary`; record in the exchange which one was chosen."""
        if self.sampler.selects(request):
            exchange.canary_arm = self.arms.canary
            return self.route
        exchange.canary_arm = self.arms.primary
        return primary


class PoolTrials(msgspec.Struct, frozen=True):
    """A pool's policies on trial.

    Shadow policies only compute what they would pick. A canary routes a share of the requests.
    """

    shadows: Shadows | None = None
    canary: Policy | None = None
    arms: CanaryArms | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        shadows = (
            () if self.shadows is None else tuple(part.policy for part in self.shadows.policies)
        )
        return shadows if self.canary is None else (*shadows, self.canary)

    @property
    def reads_predictions(self) -> bool:
        """Return whether a policy on trial needs latency predictions. Shadow policies always do."""
        return self.shadows is not None or (self.canary is not None and self.canary.reads_forecast)


class ModelScope(msgspec.Struct, frozen=True):
    """The models that certain API keys may use.

    routes    routes by every name or pattern of names that a client may use
    unlisted  error message for each permitted model name that no endpoint lists
    shapes    cache of parsed options (all but the prompt) of earlier requests for these models
    """

    routes: Mapping[str, Route]
    unlisted: Mapping[str, str]
    shapes: CallShapes = msgspec.field(default_factory=CallShapes)


class Snapshot(msgspec.Struct, frozen=True, weakref=True):
    """One immutable version of the configuration, with its routes, tenants and policies.

    routes            routes by every name that a client may use, including aliases; routes[name]
                      also matches patterns of names
    tenants           tenants by SHA-256 of the API key; empty if no key is required
    policies          routing policies by pool
    trials            policies on trial by pool
    unlisted          error message for each model name that no endpoint of its pool lists, so that
                      it has no route
    scopes            permitted models by SHA-256 of the API key, for keys that are not valid for
                      all models
    translated        by model, paths of the APIs that are served through another API
    shapes            cache of parsed options (all but the prompt) of recent chat requests
    slots_by_model    by model, the slot numbers (indices in the endpoint table) of the endpoints
                      that may serve it, including prefill endpoints

    Only requests may keep a reference to a replaced snapshot. Therefore a replaced snapshot without
    references is no longer in use.
    """

    generation: int
    config: Config
    routes: Mapping[str, Route]
    tenants: Mapping[bytes, str]
    policies: Mapping[str, Policy]
    service_classes: ServiceClasses
    trials: Mapping[str, PoolTrials] = {}
    salts: CacheSalts | None = None
    unlisted: Mapping[str, str] = {}
    slots_by_model: Mapping[str, tuple[int, ...]] = {}
    scopes: Mapping[bytes, ModelScope] = {}
    response_ids: ResponseIds | None = None
    translated: Mapping[str, frozenset[str]] = {}
    shapes: CallShapes = msgspec.field(default_factory=CallShapes)

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Return the tenant of a request; "" if no API key is required.

        The key is looked up by its digest, which takes the same time for any wrong key. Raises
        GatewayError for a missing or wrong key.
        """
        if not self.tenants:
            return ""
        tenant = self.tenants.get(digest_of_headers(headers))
        if tenant is None:
            raise wrong_key()
        return tenant

    def scope(self, headers: Mapping[str, str]) -> Snapshot | ModelScope:
        """Return the models that the API key of an authenticated request may use."""
        if not self.scopes:
            return self
        return self.scopes.get(digest_of_headers(headers), self)


class Gateway:
    """The live objects of the gateway that requests use. A reload only replaces `snapshot`."""

    __slots__ = (
        *("accounts", "background", "endpoints", "gate", "handoffs", "hedger", "mirrors"),
        "snapshot",
    )

    def __init__(
        self,
        snapshot: Snapshot,
        endpoints: EndpointTable,
        gate: AdmissionController,
        accounts: Accounting,
        handoffs: Handoffs,
    ) -> None:
        self.snapshot = snapshot
        self.endpoints = endpoints
        self.gate = gate
        self.accounts = accounts
        self.handoffs = handoffs
        self.background = BackgroundResponses(endpoints, gate.quotas)
        self.mirrors: Mirrors | None = None  # None while no pool has a mirror
        self.hedger = Hedger(endpoints, gate, accounts, snapshot.config.retries.hedge)

    def count_unsent(self, exchange: Exchange, problem: UpstreamError) -> bool:
        """Count a failed attempt as unsent, if its request was never sent; return whether it was.

        Also returns False, without counting, while the gateway is shutting down.
        """
        if problem.was_sent or self.gate.retries.is_stopping:
            return False
        exchange.unsent_attempts += 1
        self.accounts.count_retry(problem.kind)
        return True
