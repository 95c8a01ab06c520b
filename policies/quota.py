"""Quotas: how many requests and tokens a tenant may ask for per minute, whatever the fleet could do.

Two token buckets (Turner 1986, as in every API's rate limits): full at first, a minute's worth at most, filling evenly.
Not here: shares of a contended pool (fairness.py), and what a refusal looks like (gateway/).
"""

from __future__ import annotations

from math import inf

import msgspec

MINUTE_S = 60.0
NOTHING_MISSING = 1e-9  # of a limit: what rounding leaves is no reason to wait


class Limits(msgspec.Struct, frozen=True):
    """What a tenant may ask for per minute. None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Refused(msgspec.Struct, frozen=True):
    """Not now. `what` is requests or tokens, `limit` how many per minute, `remaining` how many right now.

    retry_after_s  until as many as the request needs are there
    reset_s        until the minute's worth is whole again
    """

    what: str
    limit: int
    remaining: int
    retry_after_s: float
    reset_s: float


class Bucket:
    """What is left of one limit. `level` may fall below 0: what an answer took beyond its estimate is owed."""

    __slots__ = ("_at", "_level", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = -inf

    def level(self, now: float) -> float:
        """What is left at `now`, seconds on the policy clock; a clock that goes back fills nothing."""
        if now > self._at:
            if self._at > -inf:
                self._level = min(float(self.limit), self._level + (now - self._at) * self.limit / MINUTE_S)
            self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Take so much, negative to give it back. Nothing is gathered beyond a minute's worth."""
        self._level = min(float(self.limit), self._level - amount)

    def missing_s(self, amount: float, now: float) -> float:
        """How long until so much is there; 0 if it is. Who needs more than a minute's worth waits for a full bucket."""
        missing = min(amount, float(self.limit)) - self.level(now)
        return max(0.0, missing * MINUTE_S / self.limit) if missing > NOTHING_MISSING * self.limit else 0.0


class Quota:
    """One tenant's two limits. One owner."""

    __slots__ = ("_requests", "_tokens", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._requests = None if limits.requests_per_minute is None else Bucket(limits.requests_per_minute)
        self._tokens = None if limits.tokens_per_minute is None else Bucket(limits.tokens_per_minute)

    def take(self, tokens: int, now: float) -> Refused | None:
        """Take a request of so many tokens, prompt and expected answer; None when there was enough of both. What is
        refused takes nothing."""
        found = None
        for what, bucket, amount in (("requests", self._requests, 1), ("tokens", self._tokens, tokens)):
            wait_s = 0.0 if bucket is None else bucket.missing_s(amount, now)
            if bucket is not None and wait_s > 0.0 and (found is None or wait_s > found.retry_after_s):
                left = bucket.level(now)
                reset_s = (bucket.limit - left) * MINUTE_S / bucket.limit
                found = Refused(what, bucket.limit, max(0, int(left)), wait_s, reset_s)
        if found is None:
            self._count(1, tokens)
        return found

    def correct(self, tokens: int) -> None:
        """The answer took so many more tokens than were expected; negative: fewer."""
        self._count(0, tokens)

    def give_back(self, tokens: int) -> None:
        """A request of so many tokens was refused for other reasons: it cost nobody anything."""
        self._count(-1, -tokens)

    def _count(self, requests: int, tokens: int) -> None:
        if self._requests is not None:
            self._requests.take(requests)
        if self._tokens is not None:
            self._tokens.take(tokens)
