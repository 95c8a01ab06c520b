"""What the gateway knows of handoffs, live: who prefill engines are, numbers in use, leases given up, figures per pair.

A reload forgets nothing of it. One owner, the event loop; pair.py is its only writer.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Protocol

from gateway.exchange import SplitRecord
from gateway.meters import Counter
from gateway.metrics import Metrics
from gateway.outbox import Outbox
from gateway.relay import Relay, UpstreamBroke
from gateway.split.bootstrap import Bootstraps
from gateway.split.inbox import Inbox
from gateway.split.leg import Leg
from gateway.split.life import State
from gateway.upstream import Upstream
from kvtransfer.dialects import Identity
from policies.split import Decision, Pair, Reason

LEAST_NUMBER = 2**40  # with 63 bits in all: a room of SGLang's, and an id that TensorRT-LLM takes for a snowflake
SEEN_S = 0.2  # how long a decode request stays open, at least, so that its engine has surely asked for the KV
STEP_S = 0.1  # how long a prefill answer is waited for, at least, that nobody needs any more
MOST_WAIT_S = 5.0  # either, at most: engines that have no core of their own take seconds for a step
TAKEN_S = 10.0  # how long a decoder may take to fetch KV that is only to be freed
WEIGHT = 0.2  # of the newest handoff in a pair's mean
NEWEST = 64  # handoffs of a pair whose times are kept, for its percentile

_DONE, _FAILED = State.DONE, State.FAILED  # before Python 3.12 an Enum finds its members slowly


class PairFigures:
    """How handoffs between two endpoints went, with moving means; None before the first.

    prefill_s  from the prefill request to its answer     handoff_s  from there to the first token
    tokens     of prompts whose KV travelled between them: what was not cached at the decoder, as believed
    counter    of those that were served; None before the first
    """

    __slots__ = ("counter", "failed", "handoff_s", "newest_s", "prefill_s", "served", "tokens", "transport")

    def __init__(self) -> None:
        self.served = self.failed = self.tokens = 0
        self.prefill_s: float | None = None
        self.handoff_s: float | None = None
        self.transport: str | None = None
        self.newest_s: deque[float] = deque(maxlen=NEWEST)
        self.counter: Counter | None = None

    def took(self, prefill_s: float, handoff_s: float) -> None:
        self.prefill_s = _nearer(self.prefill_s, prefill_s)
        self.handoff_s = _nearer(self.handoff_s, handoff_s)
        self.newest_s.append(handoff_s)

    def travelled(self, pair: Pair, prompt_tokens: int) -> None:
        """The KV of a prompt has come from the one to the other, but for what the other had of it."""
        self.tokens += max(0, prompt_tokens - pair.decode.cached_tokens)

    def expected_s(self, prefill_s: float | None) -> float | None:
        """Until the first token, from the pick: the prefill as expected, and what handoffs between the two have taken.
        None while either is unknown."""
        return None if prefill_s is None or self.handoff_s is None else prefill_s + self.handoff_s

    @property
    def step_s(self) -> float:
        """How long a prefill answer may still come that nobody needs. No engine breaks off a step, and a prompt of one
        chunk is one step: told to abort, it finishes the step and then keeps KV that nobody knows of."""
        return _patience(STEP_S, self.prefill_s)

    @property
    def seen_s(self) -> float:
        """Until when a decoder's engine has surely seen a request: it looks between two steps."""
        return _patience(SEEN_S, self.handoff_s)


class Transfer(Protocol):
    """Who fetches KV."""

    def overdue(self) -> None:
        """It has lasted too long."""
        ...


class Handoffs:
    """`splitting` is the mode of each model's rule (policies.split.SplitRule.hysteresis); `pairs` by names, P and D;
    `transfers` are under way, and until when each may last."""

    __slots__ = (
        *("_decisions", "_identities", "_legs", "_numbers", "_rng", "_running"),
        *("bootstraps", "metrics", "outbox", "pairs", "splitting", "transfers"),
    )

    def __init__(self, metrics: Metrics, rng: Random, outbox: Outbox) -> None:
        self.metrics = metrics
        self.outbox = outbox
        self.bootstraps = Bootstraps(outbox)
        self.splitting: dict[str, bool] = {}
        self.pairs: dict[tuple[str, str], PairFigures] = {}
        self.transfers: dict[Transfer, float] = {}
        self._legs: dict[tuple[str, str], Counter] = {}
        self._decisions: dict[Reason, Counter] = {}
        self._rng = rng
        self._numbers: set[int] = set()
        self._identities: dict[str, tuple[Identity, ...]] = {}
        self._running: set[Leg] = set()

    def count(self, end: tuple[str, str]) -> None:
        """A leg has ended: its role, and how."""
        counter = self._legs.get(end)
        if counter is None:
            counter = self._legs[end] = self.metrics.split_legs_total.labels(*end)
        counter.value += 1.0

    def decided(self, decision: Decision) -> None:
        """A request was split, or not; no reason stands for both."""
        counter = self._decisions.get(decision.reason)
        if counter is None:
            labels = "whole" if decision.pair is None else "split", decision.reason
            counter = self._decisions[decision.reason] = self.metrics.split_decisions_total.labels(*labels)
        counter.value += 1.0

    def number(self) -> int:
        """A number that no live handoff has; to be given back."""
        while (number := self._rng.getrandbits(63)) < LEAST_NUMBER or number in self._numbers:
            pass
        self._numbers.add(number)
        return number

    def give_back(self, number: int) -> None:
        self._numbers.discard(number)

    @property
    def under_way(self) -> int:
        """Split requests that are not over: each may hold a lease."""
        return len(self._numbers)

    def sweep(self, now: float) -> None:
        """Tell those whose transfers are overdue, once."""
        for transfer in [transfer for transfer, until in self.transfers.items() if until <= now]:
            if self.transfers.pop(transfer, None) is not None:
                transfer.overdue()

    # Who prefill engines are

    def identity(self, endpoint: str, number: int) -> Identity | None:
        """Who the endpoint said it is; of several ranks one, by the handoff's number."""
        known = self._identities.get(endpoint)
        return known[number % len(known)] if known else None

    def learn(self, endpoint: str, found: tuple[Identity, ...]) -> None:
        self._identities[endpoint] = found

    def removed(self, endpoint: str) -> None:
        """No endpoint has this name any more."""
        self.forget(endpoint)
        self.pairs = {names: figures for names, figures in self.pairs.items() if endpoint not in names}

    def forget(self, endpoint: str) -> None:
        """A leg failed there: engine ids change with a restart."""
        self._identities.pop(endpoint, None)

    # What outlives a request

    def give_up(self, upstream: Upstream, words: tuple[bytes, bytes], reason: str) -> None:
        """Free a prefiller's KV that nobody will read: only a decoder that fetches it, or declines to, can say so."""
        self.metrics.split_leases_given_up_total.labels(reason).inc()
        leg = Leg(upstream, *words, Relay(b""), Inbox(keep=False), self._done_with)
        self._running.add(leg)
        leg.start()
        self.outbox.loop.call_later(TAKEN_S, self._let_go, leg)

    def _done_with(self, leg: Leg, _: UpstreamBroke | None) -> None:
        self._running.discard(leg)

    def _let_go(self, leg: Leg) -> None:
        self._running.discard(leg)
        leg.close()

    def figures(self, pair: Pair) -> PairFigures:
        """How handoffs between these two went so far."""
        names = _names(pair)
        found = self.pairs.get(names)
        if found is None:
            found = self.pairs[names] = PairFigures()
        return found

    def ended(self, pair: Pair, figures: PairFigures, state: State, record: SplitRecord, relay: Relay | None) -> None:
        """A pair's attempt is over."""
        if record.transport is not None:
            figures.transport = record.transport
        if state is _FAILED:
            figures.failed += 1
            self.metrics.split_pairs_total.labels(*_names(pair), "failed").inc()
        elif state is _DONE:
            figures.served += 1
            if figures.counter is None:
                figures.counter = self.metrics.split_pairs_total.labels(*_names(pair), "served")
            figures.counter.value += 1.0
            began, done = record.prefill_sent_at, record.prefilled_at
            if relay is not None and relay.first_token_at is not None and began is not None and done is not None:
                figures.took(done - began, max(0.0, relay.first_token_at - done))

    def close(self) -> None:
        for leg in tuple(self._running):
            leg.close()
        self.bootstraps.close()


def _names(pair: Pair) -> tuple[str, str]:
    return pair.prefill.candidate.endpoint.name, pair.decode.candidate.endpoint.name


def _nearer(mean_s: float | None, newest_s: float) -> float:
    return newest_s if mean_s is None else mean_s + WEIGHT * (newest_s - mean_s)


def _patience(least_s: float, mean_s: float | None) -> float:
    """Twice what is usual; of a pair that nobody has seen at work yet, the most."""
    return MOST_WAIT_S if mean_s is None else min(max(least_s, 2.0 * mean_s), MOST_WAIT_S)
