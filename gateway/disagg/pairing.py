"""Finds out which endpoints of a model can serve split requests together, and which serve alone.

A prefill and a decode endpoint fit together if their KV caches are compatible. For each request,
policies.pricing.split_decision chooses among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from gateway.config import Model
from gateway.fleet.served_models import engine_name
from kvtransfer import dialects
from kvtransfer.dialects import BootstrapAddress, Dialect, Prerequisite
from policies.filters import applicable
from policies.policy_types import Policy
from policies.pricing.pull_decision import PullPricer
from policies.pricing.split_decision import (
    PairGroup,
    SplitPools,
    SplitRule,
    Splitter,
    build_splitter,
    kv_compatibility_key,
)
from policies.routing_types import Candidate, Role

NEED_BOOTSTRAP = (Prerequisite.ADDRESS, Prerequisite.QUERY)


class PrefillFacts(msgspec.Struct, frozen=True):
    """What decode engines and clients need to know of a prefill endpoint, from its configuration.

    host       the host in the endpoint's URL
    bootstrap  address of the endpoint's bootstrap server; None if it has none
    header     the response header line that names the endpoint to clients
    """

    host: str
    bootstrap: BootstrapAddress | None
    header: bytes


class SplitRoute(msgspec.Struct, frozen=True):
    """How a model's requests are split between prefill and decode endpoints.

    dialect             the protocol by which the engines hand over the KV cache
    splitter            decides whether to split a request, and chooses the endpoints
    pools               the endpoints to choose from: groups for split requests, and single
                        endpoints for whole ones
    facts               configured facts of each prefill endpoint, by its name
    transfer_timeout_s  maximum seconds that the KV transfer of a request may take
    pull_pricer         decides whether an endpoint first fetches the cached beginning of a prompt;
                        None: never
    """

    dialect: Dialect
    splitter: Splitter
    pools: SplitPools
    facts: Mapping[str, PrefillFacts]
    transfer_timeout_s: float
    pull_pricer: PullPricer | None = None


def serving_whole(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the endpoints that can serve whole requests: all except prefill endpoints."""
    return tuple(
        candidate for candidate in candidates if candidate.endpoint.role is not Role.PREFILL
    )


def split_route(model: Model, policy: Policy, candidates: Sequence[Candidate]) -> SplitRoute | None:
    """Return how to split a model's requests, or None if they are never split.

    They are never split if the model has no `split` section, or no two of its endpoints can serve a
    request together.
    """
    if model.split is None:
        return None
    dialect = dialects.get_dialect(model.split.dialect)
    groups = _groups(model, dialect, candidates)
    if not groups:
        return None
    rule = SplitRule(model.split.threshold_tokens, model.split.hysteresis)
    splitter = _with_applicable_filters(build_splitter(rule, policy), candidates)
    return SplitRoute(
        dialect,
        splitter,
        SplitPools(
            groups,
            tuple(candidate for candidate in candidates if _serves_alone(dialect, candidate)),
        ),
        {prefill.endpoint.name: _facts(prefill) for group in groups for prefill in group.prefills},
        model.split.transfer_timeout,
        _pull_pricer(splitter, dialect) if model.split.pull else None,
    )


def _pull_pricer(splitter: Splitter, dialect: Dialect) -> PullPricer | None:
    policy = splitter.prefill
    if dialect.pulls is None or policy.phase_prices is None:
        return None
    return PullPricer(policy, splitter.rule, by_request=True)


def _with_applicable_filters(splitter: Splitter, candidates: Sequence[Candidate]) -> Splitter:
    # Return the splitter without the filters that can reject none of the endpoints.
    def reduced(policy: Policy) -> Policy:
        return msgspec.structs.replace(policy, filters=applicable(policy.filters, candidates))

    return msgspec.structs.replace(
        splitter,
        prefill=reduced(splitter.prefill),
        decode=reduced(splitter.decode),
        crowded=reduced(splitter.crowded),
    )


def _groups(
    model: Model, dialect: Dialect, candidates: Sequence[Candidate]
) -> tuple[PairGroup, ...]:
    by_compat: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        endpoint = candidate.endpoint
        if endpoint.engine == dialect.engine:
            key = kv_compatibility_key(
                endpoint.engine, engine_name(model, endpoint), endpoint.labels
            )
            by_compat.setdefault(key, []).append(candidate)
    groups = []
    for key, members in by_compat.items():
        prefills = tuple(member for member in members if _can_prefill(dialect, member))
        decodes = serving_whole(members)
        if prefills and decodes and len({*prefills, *decodes}) > 1:
            groups.append(PairGroup(key, prefills, decodes))
    return tuple(groups)


def _can_prefill(dialect: Dialect, candidate: Candidate) -> bool:
    endpoint = candidate.endpoint
    if dialect.needs in NEED_BOOTSTRAP and endpoint.bootstrap is None:
        return False
    return endpoint.role is not Role.DECODE


def _serves_alone(dialect: Dialect, candidate: Candidate) -> bool:
    role = candidate.endpoint.role
    return role is Role.BOTH or (role is Role.DECODE and dialect.can_decode_alone)


def _facts(candidate: Candidate) -> PrefillFacts:
    endpoint = candidate.endpoint
    bootstrap = None
    if endpoint.bootstrap is not None:
        address = urlsplit(f"//{endpoint.bootstrap}")
        bootstrap = BootstrapAddress(address.hostname or "", address.port or 0)
    header = b"x-penstock-prefill: %b\r\n" % endpoint.name.encode()
    return PrefillFacts(urlsplit(endpoint.url).hostname or "", bootstrap, header)
