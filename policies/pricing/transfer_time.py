"""Measures the times of KV transfers between endpoints, per token and pair of endpoints.

The price of a split request contains the time of its KV transfer (policies/pricing/split.py). It
depends on the network between two endpoints, so it is learnt from handoffs. A pair without recent
handoffs is expected to be like the pairs with the same prefill or the same decode endpoint, these
without recent handoffs like the whole fleet, and a fleet without any as the rule says.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp
from typing import TypeVar

MEMORY_S = 600.0
"""Time constant, in seconds, with which an old measurement loses its weight."""

PRIOR_TOKENS = 8_192.0
"""Number of tokens with which the expected transfer time is weighted against the measured one."""

MEMORY_TOKENS = 131_072.0
"""Maximum number of tokens that a pair's measurement counts for, so that it adapts to changes."""

LEAST_TOKENS = 256
"""Minimum tokens of a recorded handoff; the time of a smaller one is dominated by messages rather
than KV."""

MOST_PAIRS = 65_536

KeyT = TypeVar("KeyT")
Names = tuple[str, str]
"""The names of a prefill and a decode endpoint, in this order."""


class MeasuredRate:
    """A decaying measurement of the seconds and tokens of past KV transfers."""

    __slots__ = ("_at_s", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._seconds = self._at_s = 0.0

    def add(self, tokens: int, seconds: float, now: float) -> None:
        kept = exp(min(0.0, self._at_s - now) / MEMORY_S)
        kept = min(kept, MEMORY_TOKENS / (self._tokens + tokens))
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds
        self._at_s = now

    def token_s(self, expected_s: float, now: float) -> float:
        """Return the measured seconds per token of KV, or `expected_s` without a measurement."""
        return mean_token_s((self,), expected_s, now)

    def remaining(self, now: float) -> tuple[float, float]:
        """Return the seconds and tokens that still count at the time `now`."""
        kept = exp(min(0.0, self._at_s - now) / MEMORY_S)
        return self._seconds * kept, self._tokens * kept


def mean_token_s(rates: Iterable[MeasuredRate], expected_s: float, now: float) -> float:
    """Return the seconds per token of KV over several measurements, by their tokens.

    `expected_s` counts for PRIOR_TOKENS beside them.
    """
    seconds, tokens = PRIOR_TOKENS * expected_s, PRIOR_TOKENS
    for rate in rates:
        rate_seconds, rate_tokens = rate.remaining(now)
        seconds += rate_seconds
        tokens += rate_tokens
    return seconds / tokens


class TransferTimes:
    """The measured seconds per token of KV transfers between pairs of endpoints.

    The object has one owner at a time, and no lock.
    """

    # _ends: by (0, prefill endpoint) and (1, decode endpoint), over all their pairs
    __slots__ = ("_all", "_ends", "_pairs")

    def __init__(self) -> None:
        self._all = MeasuredRate()
        self._ends: dict[tuple[int, str], MeasuredRate] = {}
        self._pairs: dict[Names, MeasuredRate] = {}

    def record(self, names: Names, tokens: int, seconds: float, now: float) -> None:
        """Record a transfer of `tokens` tokens, without the fixed time of a handoff.

        A negative time, where the decoder was quicker than expected, counts as 0.
        """
        if tokens < LEAST_TOKENS:
            return
        ends = (_rate(self._ends, end) for end in enumerate(names))
        for rate in (_rate(self._pairs, names), *ends, self._all):
            rate.add(tokens, max(0.0, seconds), now)

    def token_s(self, names: Names, expected_s: float, now: float) -> float:
        """Return the expected seconds per token of a KV transfer between two endpoints.

        expected_s  value to use for a fleet without measurements
        """
        usual_s = self._all.token_s(expected_s, now)
        ends = (self._ends.get(end) for end in enumerate(names))
        alike_s = mean_token_s((rate for rate in ends if rate is not None), usual_s, now)
        pair = self._pairs.get(names)
        return alike_s if pair is None else pair.token_s(alike_s, now)

    def forget_endpoint(self, name: str) -> None:
        """Drop the transfer times of an endpoint that has been removed."""
        self._pairs = {names: rate for names, rate in self._pairs.items() if name not in names}
        self._ends = {end: rate for end, rate in self._ends.items() if end[1] != name}


def _rate(rates: dict[KeyT, MeasuredRate], key: KeyT) -> MeasuredRate:
    # Return the measurement of `key`, a new one if it has none.
    rate = rates.get(key)
    if rate is None:
        if len(rates) >= MOST_PAIRS:
            rates.clear()
        rate = rates[key] = MeasuredRate()
    return rate
