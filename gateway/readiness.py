"""Readiness: whether a load balancer should send requests to this gateway, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from policies.model import Candidate, Role

if TYPE_CHECKING:
    from gateway.serve import Gateway
    from gateway.snapshot import Route, Snapshot
    from policies.split import Group


def obstacle(gateway: Gateway, *, draining: bool) -> str | None:
    """Return why requests should not come here, or None.

    A gateway that can serve one of its models is ready: requests for the others get a 503.
    """
    if draining:
        return "draining"
    if not any(live.models_at is not None for live in gateway.endpoints.all()):
        return "no endpoint has answered"
    out = _unserved(gateway.snapshot)
    return None if out is None else "\n".join(out)


def _unserved(snapshot: Snapshot) -> list[str] | None:
    """What each model lacks; None if there is no model, or one that lacks nothing."""
    lacks = dict(snapshot.unlisted) | {route.name: _lack(route) for route in snapshot.routes.values()}
    if not all(lacks.values()):
        return None
    return [f"model '{name}': {lack}" for name, lack in sorted(lacks.items())] or None


def _lack(route: Route) -> str:
    """What a model needs and none of its endpoints offers; "" if it can be served."""
    if route.split is None:
        return "" if _any_available(route.candidates) else "no endpoint is available"
    pools = route.split.pools
    if _any_available(pools.alone) or any(_has_pair(group) for group in pools.groups):
        return ""
    for role in (Role.PREFILL, Role.DECODE):
        sides = (group.prefills if role is Role.PREFILL else group.decodes for group in pools.groups)
        if not any(_any_available(side) for side in sides):
            return f"no {role} endpoint is available"
    return "no prefill endpoint fits a decode endpoint that is available"


def _has_pair(group: Group) -> bool:
    """Whether two different endpoints of the group can prefill and decode."""
    prefills, decodes = _available(group.prefills), _available(group.decodes)
    return bool(prefills and decodes) and len({*prefills, *decodes}) > 1


def _any_available(candidates: Iterable[Candidate]) -> bool:
    return any(each.load.available for each in candidates)


def _available(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [each for each in candidates if each.load.available]
