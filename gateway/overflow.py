"""Before a request is refused: a smaller model that may serve it, if the configuration names one.

Which one is policies.tiers' to say, whether it may enter there its own room's. Not here: how the answer tells.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gateway.endpoints import EndpointTable
from gateway.openai import Call
from gateway.snapshot import Route
from policies.model import Ask
from policies.tiers import Tier, alternatives


def into(endpoints: EndpointTable, routes: Mapping[str, Route], route: Route, call: Call) -> Route | None:
    """The route to a smaller tier whose room has just given a Permit; None when nobody takes it.

    Nobody waits there: who overflows goes after those who asked for the smaller model.
    """
    if not route.overflow:
        return None
    tiers = [Tier(name, routes[name].candidates, penalty) for name, penalty in route.overflow if name in routes]
    ask = endpoints.ask(call.request, None, ())
    for tier, _ in alternatives(ask, tiers):
        other = routes[tier.name]
        if _fits(other, call) and other.room.enter_now(_lessened(ask, tier)):
            return other
    return None


def _fits(route: Route, call: Call) -> bool:
    request = call.request
    needed = request.prompt_tokens // request.prompts + request.output_tokens // request.choices
    return route.context_tokens is None or needed <= route.context_tokens


def _lessened(ask: Ask, tier: Tier) -> Ask:
    """The question as the tier hears it: the request is worth less there, and hears of no refusal."""
    slo = ask.request.slo
    slo = replace(slo, weight=slo.weight * (1.0 - tier.penalty))
    return replace(ask, request=replace(ask.request, slo=slo), returns=False)
