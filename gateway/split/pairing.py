"""Who may be paired with whom for a model, and in which dialect: what a Route knows about splitting.

Lives here: groups of endpoints whose KV fits, from configuration. Not here: choosing among them (policies.split).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from gateway.config import Model
from gateway.model_names import engine_name
from kvtransfer import dialects
from kvtransfer.dialects import Bootstrap, Dialect, Needs
from policies.contract import Policy
from policies.filters import telling
from policies.model import Candidate, Role
from policies.split import Group, Pools, SplitRule, Splitter, compat, splitter

NEED_BOOTSTRAP = (Needs.ADDRESS, Needs.QUERY)


class Facts(msgspec.Struct, frozen=True):
    """What the configuration says of a prefill endpoint: its host, and its bootstrap server if it has one. `header` is
    the line that names it to a client."""

    host: str
    bootstrap: Bootstrap | None
    header: bytes


class SplitRoute(msgspec.Struct, frozen=True):
    """How a model's requests are split. `facts` by name of the prefill endpoint."""

    dialect: Dialect
    splitter: Splitter
    pools: Pools
    facts: Mapping[str, Facts]
    transfer_timeout_s: float


def whole(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those who may be asked for whole requests."""
    return tuple(each for each in candidates if each.endpoint.role is not Role.PREFILL)


def split_route(model: Model, policy: Policy, candidates: Sequence[Candidate]) -> SplitRoute | None:
    """How to split the model's requests; None when it says nothing of it, or nobody can prefill for another."""
    if model.split is None:
        return None
    dialect = dialects.named(model.split.dialect)
    groups = _groups(model, dialect, candidates)
    if not groups:
        return None
    rule = SplitRule(model.split.threshold_tokens, model.split.hysteresis)
    return SplitRoute(
        dialect,
        _among(splitter(rule, policy), candidates),
        Pools(groups, tuple(each for each in candidates if _serves_alone(dialect, each))),
        {each.endpoint.name: _facts(each) for group in groups for each in group.prefills},
        model.split.transfer_timeout,
    )


def _among(made: Splitter, candidates: Sequence[Candidate]) -> Splitter:
    """The splitter as requests to these meet it: its policies without the filters that can keep out none of them."""

    def told(policy: Policy) -> Policy:
        return msgspec.structs.replace(policy, filters=telling(policy.filters, candidates))

    return msgspec.structs.replace(
        made, prefill=told(made.prefill), decode=told(made.decode), crowded=told(made.crowded)
    )


def _groups(model: Model, dialect: Dialect, candidates: Sequence[Candidate]) -> tuple[Group, ...]:
    by_compat: dict[str, list[Candidate]] = {}
    for each in candidates:
        endpoint = each.endpoint
        if endpoint.engine == dialect.engine:
            key = compat(endpoint.engine, engine_name(model, endpoint), endpoint.labels)
            by_compat.setdefault(key, []).append(each)
    groups = []
    for key, members in by_compat.items():
        prefills = tuple(each for each in members if _prefills(dialect, each))
        decodes = tuple(each for each in members if each.endpoint.role is not Role.PREFILL)
        if prefills and decodes and len({*prefills, *decodes}) > 1:
            groups.append(Group(key, prefills, decodes))
    return tuple(groups)


def _prefills(dialect: Dialect, candidate: Candidate) -> bool:
    endpoint = candidate.endpoint
    introduced = dialect.needs not in NEED_BOOTSTRAP or endpoint.bootstrap is not None
    return endpoint.role is not Role.DECODE and introduced


def _serves_alone(dialect: Dialect, candidate: Candidate) -> bool:
    role = candidate.endpoint.role
    return role is Role.BOTH or (role is Role.DECODE and dialect.decode_alone)


def _facts(candidate: Candidate) -> Facts:
    endpoint = candidate.endpoint
    at = urlsplit(f"//{endpoint.bootstrap}") if endpoint.bootstrap is not None else None
    bootstrap = Bootstrap(at.hostname or "", at.port or 0) if at is not None else None
    header = b"x-penstock-prefill: %b\r\n" % endpoint.name.encode()
    return Facts(urlsplit(endpoint.url).hostname or "", bootstrap, header)
