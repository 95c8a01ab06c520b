"""The quota of one tenant: requests and tokens per minute, and concurrent requests. No I/O.

A Quota has two token buckets (Turner 1986, as in most API rate limits), and a limit on requests in
progress (concurrency_limit.py). A bucket starts full, holds at most the amount of one minute, and
is refilled evenly. Each gateway has its own buckets, and subtracts the usage that other gateways
report (peer_quota_usage.py). Fair shares of a full pool are in fairness.py. The gateway sends
refusals to clients.
"""

from __future__ import annotations

from math import inf

import msgspec

from policies.admission.concurrency_limit import ConcurrencyLimit

MINUTE_S = 60.0
NOTHING_MISSING = 1e-9  # shortages below this share of a limit are rounding errors


class QuotaLimits(msgspec.Struct, frozen=True):
    """The limits of a tenant's usage; None: no limit.

    requests_per_minute  number of requests
    tokens_per_minute    number of tokens, prompts plus answers
    concurrent_requests  number of requests in progress
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class QuotaRefusal(msgspec.Struct, frozen=True):
    """The refusal of a request that exceeds a quota.

    what           the exceeded limit, "requests" or "tokens"
    limit          allowed number per minute
    remaining      number that is left now
    retry_after_s  seconds until the quota suffices for the request
    reset_s        seconds until the bucket is full again
    """

    what: str
    limit: int
    remaining: int
    retry_after_s: float
    reset_s: float


class TokenBucket:
    """A token bucket, which limits an amount (requests or tokens) per minute.

    The level may become negative, because an answer may be longer than expected. It must then be
    refilled before more is allowed.
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
        """Return the seconds until the bucket's level has reached `amount`; 0: it already has.

        For an amount above the limit, the result is the time until the bucket is full.
        """
        missing = min(amount, float(self.limit)) - self.level(now)
        return (
            max(0.0, missing * MINUTE_S / self.limit)
            if missing > NOTHING_MISSING * self.limit
            else 0.0
        )


class Quota:
    """The quota of one tenant at one gateway: a token bucket for requests, and one for tokens.

    concurrency  the limit on the tenant's requests in progress; None: no limit
    """

    __slots__ = ("_requests", "_tokens", "concurrency", "limits")

    def __init__(self, limits: QuotaLimits) -> None:
        self.limits = limits
        self._requests = (
            None if limits.requests_per_minute is None else TokenBucket(limits.requests_per_minute)
        )
        self._tokens = (
            None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute)
        )
        most = limits.concurrent_requests
        self.concurrency = None if most is None else ConcurrencyLimit(most)

    def with_limits(self, limits: QuotaLimits) -> Quota:
        """Return this quota with other limits; the quota itself if they are the same.

        A limit per minute that did not change keeps its level. Requests in progress still count.
        """
        if limits == self.limits:
            return self
        quota = Quota(limits)
        if limits.requests_per_minute == self.limits.requests_per_minute:
            quota._requests = self._requests
        if limits.tokens_per_minute == self.limits.tokens_per_minute:
            quota._tokens = self._tokens
        if limits.concurrent_requests is not None and self.concurrency is not None:
            quota.concurrency = self.concurrency
            quota.concurrency.limit = limits.concurrent_requests
        return quota

    @property
    def has_rate(self) -> bool:
        """Return whether the tenant's requests or tokens per minute are limited."""
        return self._requests is not None or self._tokens is not None

    def take(self, tokens: int, now: float, requests: int = 1) -> QuotaRefusal | None:
        """Take requests and tokens (prompt plus expected answer) from the quota.

        Returns None on success, otherwise the refusal; a refused request takes nothing. Each prompt
        of a list counts as one request.
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
            self.charge(requests, tokens)
        return refusal

    def correct(self, tokens: int) -> None:
        """Charge the quota for a finished request's actual tokens minus its expected ones.

        A negative difference is a refund.
        """
        self.charge(0, tokens)

    def refund(self, tokens: int, requests: int = 1) -> None:
        """Refund all requests and tokens of a request that was refused for another reason."""
        self.charge(-requests, -tokens)

    def levels(self, now: float) -> tuple[float | None, float | None]:
        """Return how many requests and how many tokens are left; None: no limit."""
        return (
            None if self._requests is None else self._requests.level(now),
            None if self._tokens is None else self._tokens.level(now),
        )

    def charge(self, requests: float, tokens: float) -> None:
        """Subtract requests and tokens from the quota, even if fewer are left.

        Negative numbers are refunds.
        """
        if self._requests is not None:
            self._requests.take(requests)
        if self._tokens is not None:
            self._tokens.take(tokens)
