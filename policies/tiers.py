"""Alternatives to refusing: smaller tiers that may serve what its own pool would not, in the order of what that costs.

Lives here: who may be asked next, and at which price. Not here: how a request is admitted anywhere (admission.py), or
how the answer says where it came from (gateway/).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from policies.appraisal import appraise, left_s
from policies.filters import fits_context, serves_tenant
from policies.model import Ask, Candidate


class Tier(msgspec.Struct, frozen=True):
    """Another model that may serve a request. `penalty`: the share of the request's worth that it loses by that."""

    name: str
    candidates: tuple[Candidate, ...]
    penalty: float = 0.3


def alternatives(ask: Ask, tiers: Sequence[Tier]) -> list[tuple[Tier, float]]:
    """The tiers that could take the request, each with its price in lost worth, the cheapest first.

    The price is the penalty and, of the worth that is left, the share of the TTFT budget that its queue and prefill
    would use up; a tier beyond the budget, or that nobody serves, or that takes no prompt so long, is left out.
    """
    budget_s, found = left_s(ask), []
    for tier in tiers:
        look = appraise(ask, fits_context(ask, serves_tenant(ask, tier.candidates)))
        if look.count and 0.0 < budget_s >= look.ttft_s:
            found.append((tier, tier.penalty + (1.0 - tier.penalty) * look.ttft_s / budget_s))
    return sorted(found, key=lambda item: item[1])
