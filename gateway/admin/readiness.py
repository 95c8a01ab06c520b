"""Decides whether a load balancer should send requests to this gateway, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from policies.routing_types import Candidate, Role

if TYPE_CHECKING:
    from gateway.routes_and_snapshot import Gateway, Route, Snapshot
    from policies.pricing.split_decision import PairGroup


def not_ready_reason(gateway: Gateway, *, is_draining: bool) -> str | None:
    """Return why load balancers should send no requests to this gateway; None if it is ready.

    A gateway is ready if it can serve at least one of its models. Requests for its other models get
    status 503.
    """
    if is_draining:
        return "draining"
    if not any(live.models_at is not None for live in gateway.endpoints.all()):
        return "no endpoint has answered"
    problems = _all_unserved(gateway.snapshot)
    return None if problems is None else "\n".join(problems)


def _all_unserved(snapshot: Snapshot) -> list[str] | None:
    # Return one line per model if no model can be served, else None.
    missing = dict(snapshot.unlisted) | _missing_endpoints(snapshot)
    if not all(missing.values()):
        return None
    return [f"model '{name}': {text}" for name, text in sorted(missing.items())] or None


def unserved_models(snapshot: Snapshot) -> dict[str, str]:
    """Return a text for each model whose requests get status 503 now, by the model's name.

    The text says what is missing, such as "no prefill endpoint is available".
    """
    return {name: text for name, text in _missing_endpoints(snapshot).items() if text}


def _missing_endpoints(snapshot: Snapshot) -> dict[str, str]:
    return {route.name: _missing_endpoint(route) for route in snapshot.routes.values()}


def _missing_endpoint(route: Route) -> str:
    # Return which kind of endpoint the model lacks, or "" if it can be served.
    if route.split is None:
        return "" if _any_available(route.candidates) else "no endpoint is available"
    pools = route.split.pools
    if _any_available(pools.alone) or any(_has_pair(group) for group in pools.groups):
        return ""
    for role in (Role.PREFILL, Role.DECODE):
        sides = [
            group.prefills if role is Role.PREFILL else group.decodes for group in pools.groups
        ]
        if not any(_any_available(side) for side in sides):
            return f"no {role} endpoint is available"
    return "no prefill endpoint fits a decode endpoint that is available"


def _has_pair(group: PairGroup) -> bool:
    prefills, decodes = _available(group.prefills), _available(group.decodes)
    return bool(prefills and decodes) and len({*prefills, *decodes}) > 1


def _any_available(candidates: Iterable[Candidate]) -> bool:
    return any(candidate.load.is_available for candidate in candidates)


def _available(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.load.is_available]
