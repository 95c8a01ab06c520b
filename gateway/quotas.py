"""Tenants' quotas: taken once a request is understood, put right when it is over, told in x-ratelimit headers.

The arithmetic is policies.quota's. Not here: shares of a contended pool, or refusals for the fleet's sake (gate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from gateway.answer import Failure, GatewayError
from gateway.config import Tenant
from gateway.shared.news import News
from policies.model import Request
from policies.quota import Limits, Quota, Refused


class Quotas:
    """Quotas by tenant; those without limits have none. Live: a reload that keeps a tenant's limits keeps its quota.

    news  where other gateways hear of what is taken here; None: there are none
    """

    __slots__ = ("by_tenant", "news")

    def __init__(self) -> None:
        self.by_tenant: dict[str, Quota] = {}
        self.news: News | None = None

    def configure(self, tenants: Sequence[Tenant]) -> None:
        """From now on these limits; whose change begins with a full minute's worth."""
        limits = {each.name: Limits(each.limits.requests_per_minute, each.limits.tokens_per_minute) for each in tenants}
        kept = {name: quota for name, quota in self.by_tenant.items() if quota.limits == limits.get(name)}
        fresh = {name: Quota(each) for name, each in limits.items() if name not in kept and each != Limits()}
        self.by_tenant = kept | fresh

    def take(self, request: Request) -> Quota | None:
        """What the request was taken from, for settle(). Raises GatewayError when its tenant has asked for too much."""
        quota = self.by_tenant.get(request.tenant)
        if quota is not None:
            tokens = request.prompt_tokens + request.output_tokens
            refused = quota.take(tokens, monotonic(), request.prompts)
            if refused is not None:
                raise refusal(refused)
            if self.news is not None:
                self.news.take(request.tenant, request.prompts, tokens)
        return quota

    def settle(
        self, quota: Quota, request: Request, output_tokens: int | None, prompt_tokens: int | None = None
    ) -> None:
        """Correct what an ended request took: at first its tokens were estimated.

        output_tokens  of its answer; None when it was refused, and took nothing
        prompt_tokens  as its engine counted them; None if it did not say
        """
        if output_tokens is None:
            requests, tokens = -request.prompts, -(request.prompt_tokens + request.output_tokens)
            quota.give_back(-tokens, request.prompts)
        else:
            requests, tokens = 0, output_tokens - request.output_tokens
            if prompt_tokens is not None:
                tokens += prompt_tokens - request.prompt_tokens
            quota.correct(tokens)
        if self.news is not None:
            self.news.take(request.tenant, requests, tokens)


def refusal(refused: Refused) -> GatewayError:
    """As the client hears it, in the words that OpenAI's SDKs know."""
    what, limit = refused.what, refused.limit
    return GatewayError(
        Failure.TENANT_RATE_LIMITED,
        f"This key may ask for {limit} {what} per minute, and {refused.remaining} are left; "
        f"enough are in {refused.retry_after_s:.1f} s.",
        retry_after_s=refused.retry_after_s,
        headers=(
            (f"x-ratelimit-limit-{what}", str(limit)),
            (f"x-ratelimit-remaining-{what}", str(refused.remaining)),
            (f"x-ratelimit-reset-{what}", f"{refused.reset_s:.3f}s"),
        ),
    )
