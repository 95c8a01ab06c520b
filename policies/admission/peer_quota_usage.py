"""The quota usage that gateways report to each other, and subtract from their own quotas.

A tenant's quota (quota.py) is one limit for all gateways together. Each gateway regularly sends the
others the usage of each tenant, and the levels of its token buckets. gateway/peers/usage_sync.py
sends and receives these messages.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from policies.admission.quota import Quota

DRIFT = 0.05
"""Share of the difference between two gateways' bucket levels that one message corrects, 0 to 1.

All levels fall and refill equally. Without this correction, a gateway that started later or was
disconnected would never reach the level of the others. If two gateways send at the same time, each
compares a level that lacks the other's newest usage, so this share of that usage is not counted.
"""

SignedCount = Annotated[int, msgspec.Meta(ge=-(1 << 50), le=1 << 50)]
BucketLevel = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class QuotaUsage(msgspec.Struct, frozen=True, array_like=True):
    """A tenant's usage at one gateway since that gateway's previous message.

    requests       requests used; negative: more were refunded than used
    tokens         tokens used; negative: more were refunded than used
    requests_left  level of the gateway's bucket of requests before this usage; None: no limit
    tokens_left    level of its bucket of tokens before this usage; None: no limit
    """

    requests: SignedCount
    tokens: SignedCount
    requests_left: BucketLevel | None
    tokens_left: BucketLevel | None


def quota_usage(quota: Quota, requests: int, tokens: int, now: float) -> QuotaUsage:
    """Return the message that reports a tenant's usage to the other gateways.

    requests  requests used since the previous message
    tokens    tokens used since then
    """
    requests_left, tokens_left = quota.levels(now)
    return QuotaUsage(
        requests,
        tokens,
        None if requests_left is None else requests_left + requests,
        None if tokens_left is None else tokens_left + tokens,
    )


def apply_peer_usage(quota: Quota, theirs: QuotaUsage, ours: QuotaUsage) -> None:
    """Subtract what a tenant has used at another gateway from this gateway's copy of the quota.

    All gateways together enforce one quota per tenant, and each has its own token buckets. The
    bucket levels also move a little towards those of the other gateway (DRIFT), so that differences
    vanish.

    quota   this gateway's quota of the tenant
    theirs  the other gateway's message
    ours    this gateway's usage that the other gateway has not received yet
    """
    quota.charge(
        theirs.requests + _drift_correction(ours.requests_left, theirs.requests_left),
        theirs.tokens + _drift_correction(ours.tokens_left, theirs.tokens_left),
    )


def _drift_correction(ours: float | None, theirs: float | None) -> float:
    # Return the amount to subtract so that the levels of two gateways converge; 0 without a limit.
    return 0.0 if ours is None or theirs is None else DRIFT * (ours - theirs)
