"""Charges requests to their tenants' quotas, refuses with 429, and corrects charges at the end.

The arithmetic is in policies.admission.quota. A quota applies however free the endpoints are. The
admission controller protects busy endpoints and divides them between tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from gateway.config import Tenant
from gateway.fleet.peer_updates import OutgoingUpdates
from gateway.protocol.errors import Failure, GatewayError
from policies.admission.quota import Quota, QuotaLimits, QuotaRefusal
from policies.routing_types import Request


class Quotas:
    """The per-minute quotas of all tenants that have configured limits.

    A reload keeps the quota of a tenant whose limits did not change. `updates` collects what is
    used at this gateway, to be sent to other gateways; it is None if gateways share no state.
    """

    __slots__ = ("by_tenant", "updates")

    def __init__(self) -> None:
        self.by_tenant: dict[str, Quota] = {}
        self.updates: OutgoingUpdates | None = None

    def configure(self, tenants: Sequence[Tenant]) -> None:
        """Apply new limits on these tenants' requests and tokens per minute.

        A tenant whose limits changed starts with a full minute's quota.
        """
        limits = {
            tenant.name: QuotaLimits(
                tenant.limits.requests_per_minute, tenant.limits.tokens_per_minute
            )
            for tenant in tenants
        }
        unchanged = {
            name: quota
            for name, quota in self.by_tenant.items()
            if quota.limits == limits.get(name)
        }
        new = {
            name: Quota(limit)
            for name, limit in limits.items()
            if name not in unchanged and limit != QuotaLimits()
        }
        self.by_tenant = unchanged | new

    def take(self, request: Request) -> Quota | None:
        """Charge a request to its tenant's quota, and return that quota.

        Returns None if the tenant has no limits. Raises GatewayError when the quota is used up.
        """
        quota = self.by_tenant.get(request.tenant)
        if quota is not None:
            tokens = request.prompt_tokens + request.output_tokens
            requests = _charged_requests(request)
            refused = quota.take(tokens, monotonic(), requests)
            if refused is not None:
                raise rate_limit_error(refused)
            if self.updates is not None:
                self.updates.add_quota_use(request.tenant, requests, tokens)
        return quota

    def settle(
        self,
        quota: Quota,
        request: Request,
        output_tokens: int | None,
        prompt_tokens: int | None = None,
    ) -> None:
        """Correct the quota charge of a request that has ended.

        output_tokens  number of tokens that the engine generated; None if the request was refused,
                       in which case its whole charge is refunded
        prompt_tokens  number of prompt tokens that the engine counted; None if it reported none
        """
        if output_tokens is None:
            charged = _charged_requests(request)
            requests, tokens = -charged, -(request.prompt_tokens + request.output_tokens)
            quota.refund(-tokens, charged)
        else:
            requests, tokens = 0, output_tokens - request.output_tokens
            if prompt_tokens is not None:
                tokens += prompt_tokens - request.prompt_tokens
            quota.correct(tokens)
        if self.updates is not None:
            self.updates.add_quota_use(request.tenant, requests, tokens)


def _charged_requests(request: Request) -> int:
    # Return how many requests are charged: one per prompt that has its own answer.
    #
    # A batch of texts to embed has one answer.
    return request.prompts if request.choices >= request.prompts else 1


def rate_limit_error(refused: QuotaRefusal) -> GatewayError:
    """Return the error (status 429) for a request above its tenant's quota.

    `refused` says which quota is used up. The error has the x-ratelimit headers that SDKs read.
    """
    what, limit = refused.what, refused.limit
    return GatewayError(
        Failure.TENANT_RATE_LIMITED,
        f"This key is limited to {limit} {what} per minute; {refused.remaining} are left. "
        f"Retry in {refused.retry_after_s:.1f} s.",
        retry_after_s=refused.retry_after_s,
        headers=(
            (f"x-ratelimit-limit-{what}", str(limit)),
            (f"x-ratelimit-remaining-{what}", str(refused.remaining)),
            (f"x-ratelimit-reset-{what}", f"{refused.reset_s:.3f}s"),
        ),
    )
