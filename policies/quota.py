"""Quotas: how many requests and tokens a tenant may ask for per minute, whatever the fleet could do.

Two token buckets (Turner 1986, as in every API's rate limits): full at first, a minute's worth at most, filling evenly.
Several gateways each have the buckets, and take from theirs what they hear that others took. Not here: shares of a
contended pool (fairness.py), what a refusal looks like, and how gateways hear of each other (gateway/).
"""

from __future__ import annotations

from math import inf
from typing import Annotated

import msgspec

MINUTE_S = 60.0
NOTHING_MISSING = 1e-9  # of a limit: what rounding leaves is no reason to wait
DRIFT = 0.05
"""How much of the difference to another gateway's level one word of it makes up for. All levels fall and fill alike, so
that without it one who came later, or was not heard for a while, would never agree. Of what two words say that cross
each other, so much is given back.
"""

Count = Annotated[int, msgspec.Meta(ge=-(1 << 50), le=1 << 50)]
Level = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


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


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant took at one gateway since its last word; negative where more was given back.

    requests_left, tokens_left  what all others know to be left: in the gateway's buckets, had it not been taken. None:
                                there is no such limit
    """

    requests: Count
    tokens: Count
    requests_left: Level | None
    tokens_left: Level | None


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

    def take(self, tokens: int, now: float, requests: int = 1) -> Refused | None:
        """Take so many tokens of prompts and expected answers, and requests: each prompt of a list is one. None when
        there was enough of both. What is refused takes nothing."""
        found = None
        for what, bucket, amount in (("requests", self._requests, requests), ("tokens", self._tokens, tokens)):
            wait_s = 0.0 if bucket is None else bucket.missing_s(amount, now)
            if bucket is not None and wait_s > 0.0 and (found is None or wait_s > found.retry_after_s):
                left = bucket.level(now)
                reset_s = (bucket.limit - left) * MINUTE_S / bucket.limit
                found = Refused(what, bucket.limit, max(0, int(left)), wait_s, reset_s)
        if found is None:
            self._count(requests, tokens)
        return found

    def correct(self, tokens: int) -> None:
        """The answer took so many more tokens than were expected; negative: fewer."""
        self._count(0, tokens)

    def give_back(self, tokens: int, requests: int = 1) -> None:
        """What was taken was refused for other reasons: it cost nobody anything."""
        self._count(-requests, -tokens)

    def spent(self, requests: int, tokens: int, now: float) -> Spent:
        """What other gateways are to hear, so much being taken here since the last word."""
        return Spent(requests, tokens, _left(self._requests, requests, now), _left(self._tokens, tokens, now))

    def elsewhere(self, theirs: Spent, ours: Spent) -> None:
        """The tenant took this at another gateway, while `ours` is what that one has not heard of."""
        if self._requests is not None:
            self._requests.take(theirs.requests + _apart(ours.requests_left, theirs.requests_left))
        if self._tokens is not None:
            self._tokens.take(theirs.tokens + _apart(ours.tokens_left, theirs.tokens_left))

    def _count(self, requests: int, tokens: int) -> None:
        if self._requests is not None:
            self._requests.take(requests)
        if self._tokens is not None:
            self._tokens.take(tokens)


def _left(bucket: Bucket | None, taken: int, now: float) -> float | None:
    return None if bucket is None else bucket.level(now) + taken


def _apart(ours: float | None, theirs: float | None) -> float:
    """How much more is to be left here, or to be taken, for both to agree some time."""
    return 0.0 if ours is None or theirs is None else DRIFT * (ours - theirs)
