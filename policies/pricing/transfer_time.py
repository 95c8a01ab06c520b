"""Forecasts KV transfers between endpoints: how fast a pair's network is, and when it is free.

The price of a split request contains the time until its KV has arrived
(policies/pricing/split_decision.py). The forecast of that time has two parts:

- The rate, in seconds per token of KV, depends on the network and is learnt from handoffs. For a
  pair without recent handoffs, the rate of pairs with the same prefill or decode endpoint is used.
  Without those, it is the rate of the whole fleet, and finally that of the configured rule. Small
  handoffs show nothing about the rate, but the fixed time of a handoff is learnt from them.
- The queue contains the transfers that were chosen before and have not ended. Each occupies the
  outgoing link of its prefill endpoint and the incoming link of its decode endpoint, for a time
  computed from the newest rate. In a burst, many pairs are chosen before the first handoff ends.

To learn the rate, only the time for which a handoff had its links to itself counts, because the
transfers before it are in the forecast already.

Until the first handoff has ended, and again after MEMORY_S without one, a link with a transfer in
progress is expected to be busy forever. So the first transfer over each link is a test of its
speed. Otherwise a burst would be sent over links that may be a hundred times slower than assumed.

If a transfer is given up, its time so far counts as measured. It counts for the whole fleet if
nothing else is known, else only for its pair, because the cause may be an engine that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, inf
from typing import TypeVar

import msgspec

MEMORY_S = 600.0
"""Time constant, in seconds, with which an old measurement loses its weight."""

PRIOR_TOKENS = 8_192.0
"""Number of tokens with which the expected transfer time is weighted against the measured one."""

MEMORY_TOKENS = 131_072.0
"""Maximum number of tokens that a pair's measurement counts for, so that it adapts to changes."""

LEAST_TOKENS = 256
"""Minimum tokens of a handoff that teaches the rate; the time of a smaller one is dominated by
messages rather than KV, and teaches the fixed time of handoffs."""

PRIOR_HANDOFFS = 1.0
"""Number of handoffs with which the expected fixed time is weighted against the measured one."""

MEMORY_HANDOFFS = 32.0
"""Maximum number of small handoffs that a measurement counts for, so that it adapts to changes."""

MOST_PAIRS = 65_536

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
Names = tuple[str, str]
"""The names of a prefill and a decode endpoint, in this order."""


class DecayingMean:
    """A weighted mean of a quantity, in which old measurements count less and less.

    most  maximum weight of the measurements
    """

    # _remaining: the last result of remaining(), which one decision reads for many pairs
    __slots__ = ("_at_s", "_most", "_read_at", "_remaining", "_total", "_weight")

    def __init__(self, most: float) -> None:
        self._most = most
        self._weight = self._total = self._at_s = 0.0
        self._read_at: float | None = None
        self._remaining = (0.0, 0.0)

    def add(self, weight: float, total: float, now: float) -> None:
        kept = exp(min(0.0, self._at_s - now) / MEMORY_S)
        kept = min(kept, self._most / (self._weight + weight))
        self._weight = self._weight * kept + weight
        self._total = self._total * kept + total
        self._at_s = now
        self._read_at = None

    def remaining(self, now: float) -> tuple[float, float]:
        """Return the weighted sum and the weight of the measurements that still count."""
        if now != self._read_at:
            kept = exp(min(0.0, self._at_s - now) / MEMORY_S)
            self._read_at, self._remaining = now, (self._total * kept, self._weight * kept)
        return self._remaining


class PairMeans:
    """Averages of measured KV transfers, such as seconds per token, for each pair of endpoints.

    A pair without recent measurements is assumed to be like the pairs with the same prefill or the
    same decode endpoint. If these have none either, it is assumed to be like the whole fleet.

    is_empty  whether nothing has been measured
    """

    # _most, _prior: the maximum weight of measurements, and the weight of what is expected
    # _ends: by (0, prefill endpoint) and (1, decode endpoint), over all their pairs
    __slots__ = ("_all", "_ends", "_most", "_pairs", "_prior", "is_empty")

    def __init__(self, prior: float, most: float) -> None:
        self._prior, self._most, self.is_empty = prior, most, True
        self._all = self._new_mean()
        self._ends: dict[tuple[int, str], DecayingMean] = {}
        self._pairs: dict[Names, DecayingMean] = {}

    def _new_mean(self) -> DecayingMean:
        return DecayingMean(self._most)

    def add(self, names: Names, weight: float, total: float, now: float) -> None:
        self.add_to_pair(names, weight, total, now)
        ends = (_get_or_add(self._ends, end, self._new_mean) for end in enumerate(names))
        for mean in (*ends, self._all):
            mean.add(weight, total, now)

    def add_to_pair(self, names: Names, weight: float, total: float, now: float) -> None:
        """Add a measured transfer to the mean of its own pair, not to those of similar pairs."""
        self.is_empty = False
        _get_or_add(self._pairs, names, self._new_mean).add(weight, total, now)

    def at(self, expected: float, now: float) -> MeansAtOnce:
        """Return an object that reads the means of many pairs faster than `mean` does.

        expected  the value to assume in a fleet without measurements
        now       the time of these means
        """
        usual = self._merge(expected, now, self._all)
        return MeansAtOnce(self._prior, usual, self._ends, self._pairs, now)

    def mean(self, names: Names, expected: float, now: float) -> float:
        """Return the mean for a pair of endpoints at the time `now`.

        names     the prefill and the decode endpoint
        expected  the value to assume in a fleet without measurements
        """
        ends, (prefill, decode) = self._ends, names
        usual = self._merge(expected, now, self._all)
        usual = self._merge(usual, now, ends.get((0, prefill)), ends.get((1, decode)))
        pair = self._pairs.get(names)
        return usual if pair is None else self._merge(usual, now, pair)

    def _merge(self, expected: float, now: float, *means: DecayingMean | None) -> float:
        total, weight = self._prior * expected, self._prior
        for mean in means:
            if mean is not None:
                own_total, own_weight = mean.remaining(now)
                total += own_total
                weight += own_weight
        return total / weight

    def forget_endpoint(self, name: str) -> None:
        self._pairs = {names: mean for names, mean in self._pairs.items() if name not in names}
        self._ends = {end: mean for end, mean in self._ends.items() if end[1] != name}


class MeansAtOnce:
    """The means of many pairs of endpoints at one moment, read faster than one by one.

    They equal the results of PairMeans.mean, and are valid until a measurement is added.
    """

    # _prefills: by prefill endpoint, the sum and the weight of its measurements and of the usual
    __slots__ = ("_ends", "_now", "_pairs", "_prefills", "_prior", "_usual")

    def __init__(
        self,
        prior: float,
        usual: float,
        ends: Mapping[tuple[int, str], DecayingMean],
        pairs: Mapping[Names, DecayingMean],
        now: float,
    ) -> None:
        self._prior, self._usual, self._ends, self._pairs = prior, usual, ends, pairs
        self._now = now
        self._prefills: dict[str, tuple[float, float]] = {}

    def means_to(self, decode: str, prefills: Sequence[str]) -> list[float]:
        """Return the mean of each of these prefill endpoints with one decode endpoint."""
        prior, now, known, means = self._prior, self._now, self._prefills, list[float]()
        end = self._ends.get((1, decode))
        own_total, own_weight = (0.0, 0.0) if end is None else end.remaining(now)
        for prefill in prefills:
            total, weight = known.get(prefill) or self._read(prefill)
            mean = (total + own_total) / (weight + own_weight)
            pair = self._pairs.get((prefill, decode))
            if pair is not None:
                total, weight = pair.remaining(now)
                mean = (prior * mean + total) / (prior + weight)
            means.append(mean)
        return means

    def _read(self, prefill: str) -> tuple[float, float]:
        total, weight = self._prior * self._usual, self._prior
        end = self._ends.get((0, prefill))
        if end is not None:
            own_total, own_weight = end.remaining(self._now)
            total, weight = total + own_total, weight + own_weight
        self._prefills[prefill] = total, weight
        return total, weight


class PairSpeed(msgspec.Struct, frozen=True):
    """How long KV transfers between two endpoints are expected to take.

    token_s  seconds per token
    fixed_s  seconds per transfer, in addition to the configured fixed time (SplitRule.handoff_s)
    """

    token_s: float
    fixed_s: float

    def service_s(self, tokens: int, count: int = 1) -> float:
        """Return for how many seconds `count` transfers of `tokens` tokens in all occupy a link."""
        return tokens * self.token_s + count * self.fixed_s


class LinkQueue:
    """The unfinished KV transfers over one direction of an endpoint's network link.

    ended_at  when the last of them ended
    waiting   number of transfers that have not ended
    """

    # _pairs: by pair, the number of its transfers, their tokens, and their expected speed
    # _ready: those whose prompt is computed, in that order
    # _seconds: forecast of the time that all of them take
    __slots__ = ("_pairs", "_ready", "_seconds", "ended_at", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._ready: dict[PendingTransfer, float] = {}
        self._pairs: dict[Names, tuple[int, int, PairSpeed]] = {}
        self._seconds = self.ended_at = 0.0

    def backlog_s(self, now: float) -> float:
        """Return how many seconds the link still needs for its queued transfers."""
        if not self._ready:
            return self._seconds
        first, ready_at = next(iter(self._ready.items()))
        moved_s = max(0.0, now - max(ready_at, self.ended_at))
        first_s = self._pairs[first.names][2].service_s(first.tokens)
        return max(0.0, self._seconds - min(first_s, moved_s))

    @property
    def is_busy(self) -> bool:
        """Return whether the link has a transfer that has not ended."""
        return bool(self._pairs)

    def pairs(self) -> tuple[Names, ...]:
        """Return the pairs of endpoints whose transfers wait for the link."""
        return tuple(self._pairs)

    def add(self, transfer: PendingTransfer, speed: PairSpeed) -> None:
        """Add a transfer to the link's queue.

        speed  expected speed of this transfer, and from now on of all queued ones of the same pair
        """
        self._change(transfer.names, 1, transfer.tokens, speed)

    def set_speed(self, names: Names, speed: PairSpeed) -> None:
        """Set the expected speed of all queued transfers of a pair."""
        self._change(names, 0, 0, speed)

    def on_ready(self, transfer: PendingTransfer, now: float) -> None:
        self._ready[transfer] = now

    def remove(self, transfer: PendingTransfer) -> None:
        self._ready.pop(transfer, None)
        names = transfer.names
        self._change(names, -1, -transfer.tokens, self._pairs[names][2])

    def _change(self, names: Names, more: int, more_tokens: int, speed: PairSpeed) -> None:
        # Add `more` transfers of a pair with `more_tokens` tokens, and set the speed of all.
        count, tokens, before = self._pairs.get(names, (0, 0, speed))
        after_s = speed.service_s(tokens + more_tokens, count + more)
        self.waiting += more
        self._seconds += after_s - before.service_s(tokens, count)
        if count + more:
            self._pairs[names] = count + more, tokens + more_tokens, speed
        else:
            del self._pairs[names]
            if not self._pairs:
                self._seconds = 0.0  # no rounding errors are kept


class PendingTransfer:
    """One transfer of a prompt's KV cache, from the choice of its two endpoints to its end.

    names, tokens  the two endpoints, and the number of tokens whose KV is moved
    expected_s     seconds per token that are expected of a fleet without measurements
    links_free_at  when the previous transfer on either link had ended
    ended_at       when this transfer ended; None: not yet, or it was cancelled
    """

    __slots__ = ("_links", "ended_at", "expected_s", "links_free_at", "names", "tokens")

    def __init__(
        self, names: Names, tokens: int, expected_s: float, links: tuple[LinkQueue, ...]
    ) -> None:
        self.names, self.tokens, self.expected_s, self._links = names, tokens, expected_s, links
        self.links_free_at = 0.0
        self.ended_at: float | None = None

    @property
    def is_pending(self) -> bool:
        """Return whether the KV transfer has neither ended nor been cancelled."""
        return bool(self._links)

    def on_ready(self, now: float) -> None:
        """Record that the prompt is computed, so that its KV can be transferred from now on."""
        for link in self._links:
            link.on_ready(self, now)

    def end(self, now: float) -> None:
        """Remove the transfer from the queues of both links, because the KV has arrived."""
        links, self._links = self._links, ()
        for link in links:
            link.remove(self)
            self.links_free_at = max(self.links_free_at, link.ended_at)
            self.ended_at = link.ended_at = max(now, link.ended_at)

    def cancel(self) -> None:
        """Remove the transfer from the queues of both links, because the KV will not be sent."""
        links, self._links = self._links, ()
        for link in links:
            link.remove(self)


class TransferForecast:
    """How long KV transfers would take now between many pairs of endpoints, to choose one pair.

    Each endpoint's measurements and queue are read only once. The forecast is valid until a
    transfer begins, becomes ready or ends.
    """

    # _waits: what waits() has returned
    __slots__ = ("_fixed", "_is_measured", "_links", "_now", "_rates", "_waits")

    def __init__(
        self,
        links: Mapping[tuple[int, str], LinkQueue],
        rates: MeansAtOnce,
        fixed: MeansAtOnce | None,
        is_measured: bool,
        now: float,
    ) -> None:
        self._links, self._rates, self._fixed = links, rates, fixed
        self._is_measured, self._now = is_measured, now
        self._waits: dict[tuple[int, str], tuple[int, float]] = {}

    def waits(self, end: tuple[int, str]) -> tuple[int, float]:
        """Return the number of transfers that wait for a link, and the seconds until they end.

        end  (0, name of a prefill endpoint) or (1, name of a decode endpoint)
        """
        found = self._waits.get(end)
        if found is None:
            link = self._links.get(end)
            found = (link.waiting, link.backlog_s(self._now)) if link is not None else (0, 0.0)
            self._waits[end] = found
        return found

    def links_to(self, decode: str, prefills: Sequence[str]) -> list[tuple[float, float, float]]:
        """Forecast a transfer from each of these prefill endpoints to the endpoint `decode`.

        Returns three numbers per prefill endpoint, in seconds: the time per token, the additional
        fixed time of a transfer, and the time until the links of both endpoints are free.
        """
        rates = self._rates.means_to(decode, prefills)
        fixed = [0.0] * len(rates)
        if self._fixed is not None:
            fixed = self._fixed.means_to(decode, prefills)
        return list(zip(rates, fixed, self._backlogs_s(decode, prefills), strict=True))

    def _backlogs_s(self, decode: str, prefills: Sequence[str]) -> list[float]:
        receiving_s = self._backlog_s((1, decode))
        sending_s = [self._backlog_s((0, prefill)) for prefill in prefills]
        return [receiving_s if receiving_s > each else each for each in sending_s]

    def _backlog_s(self, end: tuple[int, str]) -> float:
        waiting, wait_s = self.waits(end)
        return inf if waiting and not self._is_measured else wait_s


class TransferTimes:
    """What is known about KV transfers between endpoints: measured speeds, and those in progress.

    The object has one owner at a time, and no lock.
    """

    # _links: by (0, prefill endpoint) and (1, decode endpoint), over all their pairs
    # _tested_at: when the last transfer ended, measured or not
    __slots__ = ("_fixed", "_links", "_rates", "_tested_at")

    def __init__(self) -> None:
        self._rates = PairMeans(PRIOR_TOKENS, MEMORY_TOKENS)
        self._fixed = PairMeans(PRIOR_HANDOFFS, MEMORY_HANDOFFS)
        self._links: dict[tuple[int, str], LinkQueue] = {}
        self._tested_at = -inf

    def is_measured(self, now: float) -> bool:
        """Return whether any transfer has ended in the last MEMORY_S seconds."""
        return now - self._tested_at <= MEMORY_S

    def backlog_s(self, names: Names, now: float) -> float:
        """Return the seconds until the links of both endpoints are free for another KV transfer.

        The result is inf if one of them has a transfer in progress while the speed of the fleet's
        links is not known: that transfer is then a test.
        """
        sending, receiving = self._links.get((0, names[0])), self._links.get((1, names[1]))
        links = [link for link in (sending, receiving) if link is not None]
        if not self.is_measured(now) and any(link.is_busy for link in links):
            return inf
        return max([link.backlog_s(now) for link in links], default=0.0)

    def begin(self, names: Names, tokens: int, expected_s: float, now: float) -> PendingTransfer:
        """Queue a transfer of `tokens` tokens on the links of a pair, and return it.

        expected_s  seconds per token, to use for a fleet without measurements
        """
        links = tuple(_get_or_add(self._links, end, LinkQueue) for end in enumerate(names))
        transfer = PendingTransfer(names, tokens, expected_s, links)
        speed = self.speed(names, expected_s, now)
        for link in links:
            link.add(transfer, speed)
        return transfer

    def learn(self, transfer: PendingTransfer, ready_at: float | None, now: float) -> None:
        """Learn the speed of a pair from a transfer that has ended, unless it was cancelled.

        `ready_at` is when its prompt was computed; None: the begin or the end of the transfer is
        unknown. No speed is learned then, but the test of the links ends.

        The transfer is assumed to begin at `ready_at`, or later when the previous transfer on
        either link has ended. The forecast of the transfers that wait for these links is updated.
        """
        if transfer.ended_at is None:
            return
        if ready_at is None:
            self._tested_at = now
            return
        seconds = transfer.ended_at - max(ready_at, transfer.links_free_at)
        self.record(transfer.names, transfer.tokens, seconds, now)
        self._update_queues(transfer, now)

    def give_up(self, transfer: PendingTransfer, ready_at: float, now: float) -> None:
        """End a transfer that has taken too long, and learn that its pair takes at least so long.

        The time counts for this pair only, because the cause may be an engine that hangs. If
        nothing was measured before, it counts for the whole fleet, because all links may be slow.
        Nothing happens if the transfer has ended already.

        ready_at  when its prompt was computed
        """
        if not transfer.is_pending:
            return
        transfer.end(now)
        seconds = max(0.0, now - max(ready_at, transfer.links_free_at))
        if self._rates.is_empty and self._fixed.is_empty:
            self.record(transfer.names, transfer.tokens, seconds, now)
        elif transfer.tokens < LEAST_TOKENS:
            self._fixed.add_to_pair(transfer.names, 1, seconds, now)
        else:
            self._rates.add_to_pair(transfer.names, transfer.tokens, seconds, now)
        self._update_queues(transfer, now)

    def _update_queues(self, transfer: PendingTransfer, now: float) -> None:
        # Expect the transfers that wait for the same links to take as long as is known now.
        for end in enumerate(transfer.names):
            link = self._links.get(end) or LinkQueue()
            for names in link.pairs():
                link.set_speed(names, self.speed(names, transfer.expected_s, now))

    def record(self, names: Names, tokens: int, seconds: float, now: float) -> None:
        """Record the `seconds` of a transfer of `tokens` tokens.

        `seconds` excludes the wait in the queue and the configured fixed time. From the time of a
        large transfer, the fixed time learned from small ones is subtracted. A negative time counts
        as 0: the decoder was quicker than expected.
        """
        self._tested_at = now
        if tokens < LEAST_TOKENS:
            self._fixed.add(names, 1, max(0.0, seconds), now)
            return
        seconds -= self._fixed_s(names, now)
        self._rates.add(names, tokens, max(0.0, seconds), now)

    def _fixed_s(self, names: Names, now: float) -> float:
        return 0.0 if self._fixed.is_empty else self._fixed.mean(names, 0.0, now)

    def speed(self, names: Names, expected_s: float, now: float) -> PairSpeed:
        """Return how long KV transfers between two endpoints are expected to take.

        expected_s  seconds per token, to use for a fleet without measurements
        """
        return PairSpeed(self._rates.mean(names, expected_s, now), self._fixed_s(names, now))

    def forecast(self, expected_s: float, now: float) -> TransferForecast:
        """Return a forecast with which many pairs of endpoints can be compared at this moment.

        expected_s  seconds per token, to use for a fleet without measurements
        """
        fixed = None if self._fixed.is_empty else self._fixed.at(0.0, now)
        rates = self._rates.at(expected_s, now)
        return TransferForecast(self._links, rates, fixed, self.is_measured(now), now)

    def forget_endpoint(self, name: str) -> None:
        """Drop the transfer times and the links of an endpoint that has been removed."""
        self._rates.forget_endpoint(name)
        self._fixed.forget_endpoint(name)
        self._links = {end: link for end, link in self._links.items() if end[1] != name}


def _get_or_add(entries: dict[KeyT, ValueT], key: KeyT, create: Callable[[], ValueT]) -> ValueT:
    # Return the entry of `key`, a new one if it has none.
    entry = entries.get(key)
    if entry is None:
        if len(entries) >= MOST_PAIRS:
            entries.clear()
        entry = entries[key] = create()
    return entry
