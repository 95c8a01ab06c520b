"""One immutable generation of what the operator asked for: routes by model name, tenants, limits.

build() turns a Config and the live parts into a Snapshot. Live state is only referenced, never copied: replacing a
snapshot forgets nothing, and an exchange keeps the one it began with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from gateway.answer import Failure, GatewayError
from gateway.config import Config, Model
from gateway.endpoints import EndpointTable
from gateway.gate import Gate, Room
from gateway.split import pairing
from gateway.split.pairing import SplitRoute
from policies import registry
from policies.contract import Policy
from policies.model import Candidate


class Route(msgspec.Struct, frozen=True):
    """Where a model name leads. `name` is the canonical one, also for aliases.

    candidates  those who serve whole requests
    split       how requests are split between prefill and decode; None: never
    """

    name: str
    pool: str
    context_tokens: int | None
    policy: Policy
    candidates: tuple[Candidate, ...]
    room: Room
    split: SplitRoute | None = None

    @property
    def served_model(self) -> str:
        """The name the request carries upstream unless the endpoint has its own."""
        return self.name


class Snapshot(msgspec.Struct, frozen=True):
    """`routes` by every name a client may use, aliases included; `tenants` by SHA-256 of the key, empty when open."""

    generation: int
    config: Config
    routes: Mapping[str, Route]
    tenants: Mapping[bytes, str]

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


def build(
    config: Config, generation: int, endpoints: EndpointTable, gate: Gate, discovered: Mapping[str, Sequence[str]]
) -> Snapshot:
    """A new generation. `discovered` lists model names per pool as engines report them, for configs that name none.

    Raises policies.registry.PolicyConfigError for a policy that cannot be built; nothing live has changed then.
    """
    policies = {name: registry.build(pool.policy.name, pool.policy.params) for name, pool in config.pools.items()}
    candidates = endpoints.adopt(config)
    serving = {name: pairing.whole(members) for name, members in candidates.items()}  # prefill takes nobody's place
    rooms = {name: gate.room(name, pool.waiting_room, serving[name]) for name, pool in config.pools.items()}
    routes: dict[str, Route] = {}
    for model in _models(config, discovered):
        pool = model.pool
        members = serving[pool] if config.models else endpoints.serving(model.name, serving[pool])
        split = pairing.split_route(model, policies[pool], candidates[pool])
        route = Route(model.name, pool, model.context_tokens, policies[pool], members, rooms[pool], split)
        routes.update(dict.fromkeys((model.name, *model.aliases), route))
    tenants = {hashlib.sha256(tenant.key.reveal().encode()).digest(): tenant.name for tenant in config.tenants}
    return Snapshot(generation, config, routes, tenants)


def _models(config: Config, discovered: Mapping[str, Sequence[str]]) -> list[Model]:
    """The configured models; without any, what the engines of each pool say they serve."""
    if config.models:
        return list(config.models)
    return [Model(name=name, pool=pool) for pool, names in discovered.items() for name in names]
