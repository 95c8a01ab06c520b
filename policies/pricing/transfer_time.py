"""Forecasts KV transfers between endpoints: how fast a pair's network is, and when it is free.

The price of a split request contains the time until its KV has arrived
(policies/pricing/split_decision.py). Two things are known about it, and they are kept apart:

- the rate, seconds per token of KV, which depends on the network and is learnt from handoffs. A
  pair without recent handoffs is expected to be like the pairs with the same prefill or the same
  decode endpoint, these without recent handoffs like the whole fleet, and a fleet without any as
  the rule says;
- the queue: the transfers that were chosen before and have not ended. Each needs the outgoing link
  of its prefill endpoint and the incoming link of its decode endpoint, for as long as its rate is
  known to need now. In a burst many pairs are chosen before the first handoff shows the rate.

A handoff teaches the rate only by the time for which it had its links to itself, because the
transfers before it are in the forecast already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
ValueT = TypeVar("ValueT")
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


class LinkQueue:
    """The transfers over one direction of one endpoint's network link that have not ended.

    ended_at  when the last of them ended
    """

    # _pairs: by pair, the number of its transfers, their tokens, and the forecast of the seconds
    # per token
    # _ready: those whose prompt is computed, in that order
    # _seconds: forecast of the time that all of them take
    __slots__ = ("_pairs", "_ready", "_seconds", "ended_at")

    def __init__(self) -> None:
        self._ready: dict[PendingTransfer, float] = {}
        self._pairs: dict[Names, tuple[int, int, float]] = {}
        self._seconds = self.ended_at = 0.0

    def backlog_s(self, now: float) -> float:
        """Return the seconds for which the link has work, if it does not pause."""
        if not self._ready:
            return self._seconds
        first, ready_at = next(iter(self._ready.items()))
        moved_s = max(0.0, now - max(ready_at, self.ended_at))
        return self._seconds - min(first.tokens * self._pairs[first.names][2], moved_s)

    def pairs(self) -> tuple[Names, ...]:
        """Return the pairs of endpoints whose transfers wait for the link."""
        return tuple(self._pairs)

    def add(self, transfer: PendingTransfer, token_s: float) -> None:
        """Queue a transfer. All of its pair are expected to take `token_s` seconds per token."""
        self._change(transfer.names, 1, transfer.tokens, token_s)

    def set_rate(self, names: Names, token_s: float) -> None:
        """Expect the queued transfers of a pair to take `token_s` seconds per token."""
        self._change(names, 0, 0, token_s)

    def on_ready(self, transfer: PendingTransfer, now: float) -> None:
        self._ready[transfer] = now

    def remove(self, transfer: PendingTransfer) -> None:
        self._ready.pop(transfer, None)
        names = transfer.names
        self._change(names, -1, -transfer.tokens, self._pairs[names][2])

    def _change(self, names: Names, more: int, more_tokens: int, token_s: float) -> None:
        # Add `more` transfers of a pair with `more_tokens` tokens, and set the rate of all of them.
        count, tokens, before_s = self._pairs.get(names, (0, 0, 0.0))
        self._seconds += (tokens + more_tokens) * token_s - tokens * before_s
        if count + more:
            self._pairs[names] = count + more, tokens + more_tokens, token_s
        else:
            del self._pairs[names]
            if not self._pairs:
                self._seconds = 0.0  # no rounding errors are kept


class PendingTransfer:
    """One KV transfer, from the choice of its pair until it ends or is cancelled.

    names, tokens  the pair, and the tokens of KV that it moves
    expected_s     seconds per token that are expected of a fleet without measurements
    links_free_at  when the last transfer before it on either link had ended
    ended_at       when it ended; None before, and if it was cancelled
    """

    __slots__ = ("_links", "ended_at", "expected_s", "links_free_at", "names", "tokens")

    def __init__(
        self, names: Names, tokens: int, expected_s: float, links: tuple[LinkQueue, ...]
    ) -> None:
        self.names, self.tokens, self.expected_s, self._links = names, tokens, expected_s, links
        self.links_free_at = 0.0
        self.ended_at: float | None = None

    def on_ready(self, now: float) -> None:
        """Note that the prompt is computed, so that its KV can be moved from now on."""
        for link in self._links:
            link.on_ready(self, now)

    def end(self, now: float) -> None:
        """Leave the queues, because the KV has arrived. Nothing happens after the first end."""
        links, self._links = self._links, ()
        for link in links:
            link.remove(self)
            self.links_free_at = max(self.links_free_at, link.ended_at)
            self.ended_at = link.ended_at = max(now, link.ended_at)

    def cancel(self) -> None:
        """Leave the queues, because the KV will not be moved. Nothing happens after the end."""
        links, self._links = self._links, ()
        for link in links:
            link.remove(self)


class TransferTimes:
    """The rates of KV transfers between pairs of endpoints, and the transfers in progress.

    The object has one owner at a time, and no lock.
    """

    # _ends, _links: by (0, prefill endpoint) and (1, decode endpoint), over all their pairs
    __slots__ = ("_all", "_ends", "_links", "_pairs")

    def __init__(self) -> None:
        self._all = MeasuredRate()
        self._ends: dict[tuple[int, str], MeasuredRate] = {}
        self._links: dict[tuple[int, str], LinkQueue] = {}
        self._pairs: dict[Names, MeasuredRate] = {}

    def backlog_s(self, names: Names, now: float) -> float:
        """Return the seconds until the links of both endpoints have moved all KV that waits."""
        links = self._links
        return max(links[end].backlog_s(now) if end in links else 0.0 for end in enumerate(names))

    def begin(self, names: Names, tokens: int, expected_s: float, now: float) -> PendingTransfer:
        """Queue a transfer of `tokens` tokens, and return it.

        expected_s  seconds per token, to use for a fleet without measurements
        """
        links = tuple(_get_or_add(self._links, end, LinkQueue) for end in enumerate(names))
        transfer = PendingTransfer(names, tokens, expected_s, links)
        token_s = self.token_s(names, expected_s, now)
        for link in links:
            link.add(transfer, token_s)
        return transfer

    def learn(self, transfer: PendingTransfer, ready_at: float, now: float) -> None:
        """Learn from a transfer that has ended; nothing if it was cancelled.

        It is taken to have begun when its prompt was computed, at `ready_at`, or when the transfer
        before it on either link had ended, if that was later. The transfers that wait for these
        links are expected to take as long as is known from then on.
        """
        if transfer.ended_at is None:
            return
        seconds = transfer.ended_at - max(ready_at, transfer.links_free_at)
        self.record(transfer.names, transfer.tokens, seconds, now)
        for end in enumerate(transfer.names):
            link = self._links.get(end) or LinkQueue()
            for names in link.pairs():
                link.set_rate(names, self.token_s(names, transfer.expected_s, now))

    def record(self, names: Names, tokens: int, seconds: float, now: float) -> None:
        """Record a transfer of `tokens` tokens, without the fixed time of a handoff and the queue.

        A negative time, where the decoder was quicker than expected, counts as 0.
        """
        if tokens < LEAST_TOKENS:
            return
        ends = (_get_or_add(self._ends, end, MeasuredRate) for end in enumerate(names))
        for rate in (_get_or_add(self._pairs, names, MeasuredRate), *ends, self._all):
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
        """Drop the transfer times and the links of an endpoint that has been removed."""
        self._pairs = {names: rate for names, rate in self._pairs.items() if name not in names}
        self._ends = {end: rate for end, rate in self._ends.items() if end[1] != name}
        self._links = {end: link for end, link in self._links.items() if end[1] != name}


def _get_or_add(entries: dict[KeyT, ValueT], key: KeyT, create: Callable[[], ValueT]) -> ValueT:
    # Return the entry of `key`, a new one if it has none.
    entry = entries.get(key)
    if entry is None:
        if len(entries) >= MOST_PAIRS:
            entries.clear()
        entry = entries[key] = create()
    return entry
