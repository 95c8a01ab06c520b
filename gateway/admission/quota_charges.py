"""Charges requests to their tenants' quotas, refuses with 429, and corrects charges at the end.

The arithmetic is in policies.admission.quota. A quota applies however free the endpoints are. The
admission controller protects busy endpoints and divides them between tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

import msgspec

from gateway.config import Tenant
from gateway.fleet.updates_for_peers import OutgoingUpdates
from gateway.protocol.errors import Failure, GatewayError
from policies.admission.concurrency_limit import ConcurrencyLimit
from policies.admission.quota import Quota, QuotaLimits, QuotaRefusal
from policies.routing_types import Request


class BackgroundResponse(NamedTuple):
    """A response that an engine generates in the background, after it has answered the request.

    `id` is the response's id, and `endpoint` the name of the engine's endpoint.
    """

    response_id: str
    endpoint: str


class QuotaCharge(msgspec.Struct):
    """What one request was charged to its tenant's quota. At its end, settle() corrects the charge.

    requests     number of requests that the request counts as: one per prompt
    concurrency  the tenant's limit of concurrent requests, if the request counts against it; else
                 None
    began_at     monotonic time at which the request was charged
    background   the response that the engine still generates when the request has ended; usually
                 None
    """

    quota: Quota
    requests: int
    concurrency: ConcurrencyLimit | None
    began_at: float
    background: BackgroundResponse | None = None


class Quotas:
    """The quotas (requests and tokens per minute, concurrent requests) of tenants that have limits.

    A reload keeps the quota of a tenant whose limits did not change. `updates` collects the quota
    use at this gateway, to be sent to other gateways; it is None if gateways share no state.
    """

    __slots__ = ("by_tenant", "updates")

    def __init__(self) -> None:
        self.by_tenant: dict[str, Quota] = {}
        self.updates: OutgoingUpdates | None = None

    def configure(self, tenants: Sequence[Tenant]) -> None:
        """Apply new limits on these tenants' requests and tokens.

        A limit per minute that changed starts with a full minute's quota.
        """
        by_tenant: dict[str, Quota] = {}
        for tenant in tenants:
            section = tenant.limits
            limits = QuotaLimits(
                section.requests_per_minute, section.tokens_per_minute, section.concurrent_requests
            )
            if limits != QuotaLimits():
                quota = self.by_tenant.get(tenant.name)
                by_tenant[tenant.name] = (
                    Quota(limits) if quota is None else quota.with_limits(limits)
                )
        self.by_tenant = by_tenant

    def take(self, request: Request, *, is_concurrent: bool = True) -> QuotaCharge | None:
        """Charge a request to its tenant's quota, and return the charge.

        Returns None if the tenant has no limits. Raises GatewayError when the quota is used up.

        is_concurrent  whether the request counts against the tenant's limit of concurrent requests.
                       Batch requests do not, because another setting limits their number
        """
        quota = self.by_tenant.get(request.tenant)
        if quota is None:
            return None
        now, requests = monotonic(), _charged_requests(request)
        concurrency = quota.concurrency if is_concurrent else None
        if concurrency is not None and not concurrency.has_place(requests):
            raise concurrency_error(concurrency, requests)
        if quota.has_rate:
            tokens = request.prompt_tokens + request.output_tokens
            refused = quota.take(tokens, now, requests)
            if refused is not None:
                raise rate_limit_error(refused)
            if self.updates is not None:
                self.updates.add_quota_use(request.tenant, requests, tokens)
        if concurrency is not None:
            concurrency.take(requests)
        return QuotaCharge(quota, requests, concurrency, now)

    def settle(
        self,
        charge: QuotaCharge,
        request: Request,
        output_tokens: int | None,
        prompt_tokens: int | None = None,
    ) -> None:
        """Correct the quota charge of a request that has ended. Call it once per charge.

        output_tokens  number of tokens that the engine generated; None if the request was refused,
                       in which case its whole charge is refunded
        prompt_tokens  number of prompt tokens that the engine counted; None if it reported none
        """
        quota = charge.quota
        if charge.concurrency is not None:
            held_s = None if output_tokens is None else monotonic() - charge.began_at
            charge.concurrency.release(charge.requests, held_s)
        if not quota.has_rate:
            return
        if output_tokens is None:
            requests = -charge.requests
            tokens = -(request.prompt_tokens + request.output_tokens)
            quota.refund(-tokens, charge.requests)
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


def concurrency_error(concurrency: ConcurrencyLimit, requests: int) -> GatewayError:
    """Return the error (status 429) for a request above its tenant's limit of concurrent requests.

    `requests` is the number of requests that it counts as.
    """
    wait_s = concurrency.wait_s(requests)
    asked = "" if requests == 1 else f"The request counts as {requests}, one per prompt. "
    return GatewayError(
        Failure.TENANT_CONCURRENCY_LIMITED,
        f"This key is limited to {concurrency.limit} concurrent requests; "
        f"{concurrency.in_progress} are in progress. {asked}Retry in {wait_s:.1f} s.",
        retry_after_s=wait_s,
    )
