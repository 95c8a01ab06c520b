"""Quotas: how many requests and tokens a tenant may use per minute.

A Quota consists of two token buckets (Turner 1986, as in most API rate limits). A bucket is full at
first, holds at most one minute's worth, and is refilled evenly. Each gateway has its own buckets
and subtracts the usage that other gateways report. Shares of a contended pool are in fairness.py.
The gateway sends refusals to clients and exchanges usage with other gateways.
"""

from __future__ import annotations

from math import inf
from typing import Annotated

import msgspec

MINUTE_S = 60.0
NOTHING_MISSING = 1e-9  # share of a limit below which a shortage is a rounding error
DRIFT = 0.05
"""Share of the difference between two gateways' bucket levels that one message corrects, 0 to 1.

All levels fall and refill equally. Without this correction, a gateway that started later or was
disconnected would never reach the level of the others. If two gateways send at the same time, each
compares a level that lacks the other's newest usage, so this share of that usage is not counted.
"""

SignedCount = Annotated[int, msgspec.Meta(ge=-(1 << 50), le=1 << 50)]
BucketLevel = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class QuotaLimits(msgspec.Struct, frozen=True):
    """The limits of a tenant's use per minute; None means unlimited.

    requests_per_minute  number of requests
    tokens_per_minute    number of tokens, prompts plus answers
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class QuotaRefusal(msgspec.Struct, frozen=True):
    """The refusal of a request that exceeds a quota.

    what           the exceeded limit, "requests" or "tokens"
    limit          number allowed per minute
    remaining      number left now
    retry_after_s  seconds until the request could be served
    reset_s        seconds until the bucket is full again
    """

    what: str
    limit: int
    remaining: int
    retry_after_s: float
    reset_s: float


class QuotaUsage(msgspec.Struct, frozen=True, array_like=True):
    """A tenant's usage at one gateway since that gateway's previous message.

    A number is negative if more was refunded than used. A level is None if the bucket has no limit.

    requests       requests used
    tokens         tokens used
    requests_left  level of the gateway's bucket of requests before this usage
    tokens_left    level of its bucket of tokens before this usage
    """

    requests: SignedCount
    tokens: SignedCount
    requests_left: BucketLevel | None
    tokens_left: BucketLevel | None


class TokenBucket:
    """A token bucket, which limits an amount (requests or tokens) per minute.

    The level may be negative: usage beyond the estimate must be refilled before more is allowed.
    """

    __slots__ = ("_at", "_level", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = -inf

    def level(self, now: float) -> float:
        """Refill the token bucket for the time that has passed until `now`, and return its level.

        If the clock has gone back, nothing is refilled.
        """
        if now > self._at:
            if self._at > -inf:
                self._level = min(
                    float(self.limit), self._level + (now - self._at) * self.limit / MINUTE_S
                )
            self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Subtract `amount` from the bucket's level.

        A negative amount is a refund: it is added, up to the bucket's limit.
        """
        self._level = min(float(self.limit), self._level - amount)

    def missing_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket's level has reached `amount`; 0 if it has already.

        An amount above the limit counts as available once the bucket is full.
        """
        missing = min(amount, float(self.limit)) - self.level(now)
        return (
            max(0.0, missing * MINUTE_S / self.limit)
            if missing > NOTHING_MISSING * self.limit
            else 0.0
        )


class Quota:
    """The quota of one tenant at one gateway: a token bucket for requests, and one for tokens."""

    __slots__ = ("_requests", "_tokens", "limits")

    def __init__(self, limits: QuotaLimits) -> None:
        self.limits = limits
        self._requests = (
            None if limits.requests_per_minute is None else TokenBucket(limits.requests_per_minute)
        )
        self._tokens = (
            None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute)
        )

    def take(self, tokens: int, now: float, requests: int = 1) -> QuotaRefusal | None:
        """Take requests and tokens (prompt plus expected answer) from the quota.

        Returns None on success, else the refusal; a refused request takes nothing. Each prompt of a
        list counts as one request.
        """
        refusal = None
        for unit, bucket, amount in (
            ("requests", self._requests, requests),
            ("tokens", self._tokens, tokens),
        ):
            wait_s = 0.0 if bucket is None else bucket.missing_s(amount, now)
            if (
                bucket is not None
                and wait_s > 0.0
                and (refusal is None or wait_s > refusal.retry_after_s)
            ):
                left = bucket.level(now)
                reset_s = (bucket.limit - left) * MINUTE_S / bucket.limit
                refusal = QuotaRefusal(unit, bucket.limit, max(0, int(left)), wait_s, reset_s)
        if refusal is None:
            self._count(requests, tokens)
        return refusal

    def correct(self, tokens: int) -> None:
        """Charge the quota for the difference between actual and expected tokens of a finished
        request.

        A negative difference is a refund.
        """
        self._count(0, tokens)

    def refund(self, tokens: int, requests: int = 1) -> None:
        """Return the requests and tokens of a request that was refused for another reason."""
        self._count(-requests, -tokens)

    def usage_message(self, requests: int, tokens: int, now: float) -> QuotaUsage:
        """Return the message that reports a tenant's usage to the other gateways.

        requests  requests used since the previous message
        tokens    tokens used since then
        """
        return QuotaUsage(
            requests, tokens, _left(self._requests, requests, now), _left(self._tokens, tokens, now)
        )

    def apply_peer_usage(self, theirs: QuotaUsage, ours: QuotaUsage) -> None:
        """Take into account the usage of the same tenant at another gateway.

        The reported usage is subtracted. The levels also move a little towards those of the other
        gateway (DRIFT).

        theirs  the other gateway's message
        ours    this gateway's usage that the other gateway has not received yet
        """
        if self._requests is not None:
            self._requests.take(
                theirs.requests + _drift_correction(ours.requests_left, theirs.requests_left)
            )
        if self._tokens is not None:
            self._tokens.take(
                theirs.tokens + _drift_correction(ours.tokens_left, theirs.tokens_left)
            )

    def _count(self, requests: int, tokens: int) -> None:
        if self._requests is not None:
            self._requests.take(requests)
        if self._tokens is not None:
            self._tokens.take(tokens)


def _left(bucket: TokenBucket | None, taken: int, now: float) -> float | None:
    return None if bucket is None else bucket.level(now) + taken


def _drift_correction(ours: float | None, theirs: float | None) -> float:
    # Return the amount to subtract so that the levels of two gateways converge.
    #
    # Return 0 without a limit.
    return 0.0 if ours is None or theirs is None else DRIFT * (ours - theirs)
