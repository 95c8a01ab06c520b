"""Live data about KV handoffs: engine identities, handoff numbers, and times per pair of engines.

A handoff moves the KV cache of a prompt from a prefill engine to a decode engine. A reload of the
configuration keeps this data. Only gateway/disagg/pair_attempt.py changes it, on the event loop.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections import deque
from random import Random
from typing import Protocol

from gateway.disagg.bootstrap_client import BootstrapClient
from gateway.disagg.leg import Leg
from gateway.disagg.pull_pauses import PullPauses
from gateway.disagg.state_machine import State
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.forwarding.internal_answer import InternalAnswer
from gateway.http.engine_connections import ConnectionPool
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics
from gateway.metrics.metric_types import Counter
from gateway.protocol.response.relay import Relay, UpstreamError
from gateway.request_record import SplitRecord
from kvtransfer.dialects import PrefillIdentity
from policies.pricing.split_decision import (
    EndpointPair,
    SplitDecision,
    SplitReason,
)
from policies.pricing.transfer_time import TransferTimes

# Numbers have 63 bits: SGLang's room, and an id that TensorRT-LLM accepts as a snowflake id.
LEAST_NUMBER = 2**40
MIN_SEEN_S = 0.2  # minimum time for which a decode request stays open, for its engine to get the KV
MIN_STEP_S = 0.1  # minimum time for which a prefill answer is awaited after the client has left
MAX_WAIT_S = 5.0  # maximum of both times: an engine that shares a core takes seconds per step
RELEASE_TIMEOUT_S = 10.0  # time for a decoder to fetch KV that is only to be freed
MEAN_WEIGHT = 0.2  # weight of the newest handoff in a pair's moving mean
KEPT_TIMES = 64  # handoffs of a pair whose times are kept for a percentile

_DONE, _FAILED = State.DONE, State.FAILED  # local names: Enum access is slow before Python 3.12


class PairFigures:
    """Statistics of the KV handoffs from one prefill endpoint to one decode endpoint.

    served     number of handoffs whose request was served
    failed     number of handoffs whose attempt failed
    prefill_s  moving mean of the seconds from the prefill request to its answer; None before the
               first handoff
    handoff_s  moving mean of the seconds from that answer to the first token; None before the first
               handoff
    newest_s   durations of the newest handoffs in seconds, measured like handoff_s
    tokens     total prompt tokens whose KV was transferred; tokens that the decode engine probably
               had in its cache are left out
    counter    the metric that counts served handoffs; None before the first one
    """

    __slots__ = (
        *("counter", "failed", "handoff_s", "newest_s", "prefill_s", "served", "tokens"),
        "transport",
    )

    def __init__(self) -> None:
        self.served = self.failed = self.tokens = 0
        self.prefill_s: float | None = None
        self.handoff_s: float | None = None
        self.transport: str | None = None
        self.newest_s: deque[float] = deque(maxlen=KEPT_TIMES)
        self.counter: Counter | None = None

    def add_times(self, prefill_s: float, handoff_s: float) -> None:
        """Update the mean times of this pair of endpoints with those of one request.

        prefill_s  seconds from the prefill request to its answer
        handoff_s  seconds from that answer to the first token
        """
        self.prefill_s = _update_mean(self.prefill_s, prefill_s)
        self.handoff_s = _update_mean(self.handoff_s, handoff_s)
        self.newest_s.append(handoff_s)

    def add_transferred(self, pair: EndpointPair, prompt_tokens: int) -> None:
        """Count the transferred prompt tokens: those that the decode engine had not cached."""
        self.tokens += max(0, pair.moved_tokens(prompt_tokens))

    def expected_s(self, prefill_s: float | None) -> float | None:
        """Return the expected seconds from the choice of the endpoints to the first token.

        `prefill_s` is the expected time of the prefill. Returns None if `prefill_s` is None, or
        before the first handoff between these endpoints.
        """
        if prefill_s is None or self.handoff_s is None:
            return None
        return prefill_s + self.handoff_s

    @property
    def step_s(self) -> float:
        """Return how many seconds to wait for a prefill answer that is no longer needed.

        An aborted engine finishes its current step first, and only its answer tells how to free the
        KV. A short prompt is computed in one step. Therefore the result is twice the mean duration
        of a prefill, within limits.
        """
        return _wait_s(MIN_STEP_S, self.prefill_s)

    @property
    def seen_s(self) -> float:
        """Return an estimate of the longest time until a decode engine reads a request, in seconds.

        Engines read requests between two steps. The estimate is twice the mean duration of a KV
        transfer, within limits.
        """
        return _wait_s(MIN_SEEN_S, self.handoff_s)


class Transfer(Protocol):
    """The interface of a KV transfer in progress: on_overdue() is called if it takes too long."""

    def on_overdue(self) -> None:
        """Fail the KV transfer because it has exceeded its time limit."""
        ...


class Handoffs:
    """The live state of all split requests and of their KV transfers (handoffs).

    splitting       by model: whether its last request was split. A rule with hysteresis needs it,
                    so that requests near the threshold do not alternate
                    (policies.pricing.split_decision.SplitRule.hysteresis)
    pairs           statistics by the names of a prefill and a decode endpoint
    pulls           the same for pulls, by the names of the endpoints that send and that fetch KV
    pull_pauses     the endpoints that are not asked for beginnings, because pulls have failed
    transfers       transfers in progress, with the monotonic time by which each must end
    transfer_times  measured speeds of KV transfers and their queues, for rules that price splits
    """

    __slots__ = (
        *("_decisions", "_identities", "_legs", "_numbers", "_releases", "_rng", "_running"),
        *("bootstraps", "metrics", "outbox", "pairs", "pull_pauses", "pulls", "splitting"),
        *("transfer_times", "transfers"),
    )

    def __init__(self, metrics: Metrics, rng: Random, outbox: WriteQueue) -> None:
        self.metrics = metrics
        self.outbox = outbox
        self.bootstraps = BootstrapClient(outbox)
        self.splitting: dict[str, bool] = {}
        self.pairs: dict[tuple[str, str], PairFigures] = {}
        self.pulls: dict[tuple[str, str], PairFigures] = {}
        self.pull_pauses = PullPauses()
        self.transfers: dict[Transfer, float] = {}
        self.transfer_times = TransferTimes()
        self._legs: dict[tuple[str, str], Counter] = {}
        self._decisions: dict[SplitReason, Counter] = {}
        self._rng = rng
        self._numbers: set[int] = set()
        self._identities: dict[str, tuple[PrefillIdentity, ...]] = {}
        self._running: set[Leg] = set()
        self._releases: Counted[ConnectionPool] = Counted()

    def count_leg(self, end: tuple[str, str]) -> None:
        """Count the end of one of the two HTTP requests (legs) of a split request.

        `end` has the leg's role and result, for example ("prefill", "closed").
        """
        counter = self._legs.get(end)
        if counter is None:
            counter = self._legs[end] = self.metrics.split_legs_total.labels(*end)
        counter.value += 1.0

    def count_decision(self, decision: SplitDecision) -> None:
        """Count a decision to split or not to split a request, by its reason."""
        counter = self._decisions.get(decision.reason)
        if counter is None:
            labels = _decision_label(decision), decision.reason
            counter = self.metrics.split_decisions_total.labels(*labels)
            self._decisions[decision.reason] = counter
        counter.value += 1.0

    def take_number(self) -> int:
        """Return a random number that identifies a new KV transfer among those in progress."""
        while True:
            number = self._rng.getrandbits(63)
            if number >= LEAST_NUMBER and number not in self._numbers:
                self._numbers.add(number)
                return number

    def give_back_number(self, number: int) -> None:
        """Release the number of a KV transfer that has ended, so that a new one may get it."""
        self._numbers.discard(number)

    @property
    def live_count(self) -> int:
        """Return the number of split requests in progress; each may hold KV at a prefill engine."""
        return len(self._numbers)

    def sweep(self, now: float) -> None:
        """Fail the KV transfers that have exceeded their time limit since the last call."""
        overdue = [transfer for transfer, until in self.transfers.items() if until <= now]
        for transfer in overdue:
            if self.transfers.pop(transfer, None) is not None:
                transfer.on_overdue()

    # Identities of prefill engines

    def identity(self, endpoint: str, number: int) -> PrefillIdentity | None:
        """Return the identity by which decode engines find a prefill engine; None if it is unknown.

        If the engine has several ranks, the number of the handoff selects one of the ranks.
        """
        identities = self._identities.get(endpoint)
        return identities[number % len(identities)] if identities else None

    def set_identity(self, endpoint: str, found: tuple[PrefillIdentity, ...]) -> None:
        """Store the identities by which decode engines find a prefill engine's ranks."""
        self._identities[endpoint] = found

    def forget_endpoint(self, endpoint: str) -> None:
        """Drop the identity and the statistics of an endpoint that is no longer configured."""
        self.forget_identity(endpoint)
        self.transfer_times.forget_endpoint(endpoint)
        self.pull_pauses.forget(endpoint)
        self.pairs, self.pulls = (
            {names: figures for names, figures in known.items() if endpoint not in names}
            for known in (self.pairs, self.pulls)
        )

    def forget_identity(self, endpoint: str) -> None:
        """Drop the stored identity of a prefill engine after a failure, as a restart changes it."""
        self._identities.pop(endpoint, None)

    # Release requests, which outlive the split requests that caused them

    def send_release_request(
        self, upstream: ConnectionPool, words: tuple[bytes, bytes], reason: str
    ) -> None:
        """Send a release request to a decode engine, so that a prefill engine frees its KV.

        It is for KV that no request needs any more. A prefill engine frees KV only when a decode
        engine fetches or declines it.
        """
        self.metrics.split_leases_given_up_total.labels(reason).inc()
        leg = Leg(upstream, *words, Relay(b""), InternalAnswer(is_kept=False), self._on_released)
        self._running.add(leg)
        self._releases[upstream] += 1
        leg.start()
        self.outbox.loop.call_later(RELEASE_TIMEOUT_S, self._close_release, leg)

    def release_load(self, live: LiveEndpoint) -> float:
        """Return an endpoint's load: all its running requests, divided by its concurrency limit.

        Release requests, which only make prefill engines free KV (send_release_request), count too.
        """
        busy = live.load.in_flight + self._releases[live.upstream]
        return busy / live.endpoint.max_concurrency

    def _on_released(self, leg: Leg, _: UpstreamError | None) -> None:
        if leg in self._running:
            self._running.remove(leg)
            self._releases[leg.upstream] -= 1
            if not self._releases[leg.upstream]:
                del self._releases[leg.upstream]

    def _close_release(self, leg: Leg) -> None:
        self._on_released(leg, None)
        leg.close()

    def figures(self, pair: EndpointPair) -> PairFigures:
        """Return the statistics of KV transfers between two endpoints, creating them if needed."""
        names, known = _names(pair), self.pulls if pair.is_pull else self.pairs
        figures = known.get(names)
        if figures is None:
            figures = known[names] = PairFigures()
        return figures

    def count_attempt(
        self,
        pair: EndpointPair,
        figures: PairFigures,
        state: State,
        record: SplitRecord,
        relay: Relay | None,
    ) -> None:
        """Count a finished attempt at a split request; if it succeeded, record its times.

        figures  the statistics of the two endpoints, which are updated
        state    the end state of the attempt
        record   the times of its stages
        relay    the relay of the decode engine's answer; None if there was none
        """
        if record.transport is not None:
            figures.transport = record.transport
        if pair.is_pull:
            self._count_pull(figures, state, record, relay)
        elif state is _FAILED:
            figures.failed += 1
            self.metrics.split_pairs_total.labels(*_names(pair), "failed").inc()
        elif state is _DONE:
            self._count_served(pair, figures)
            _add_times(figures, record, relay)

    def _count_served(self, pair: EndpointPair, figures: PairFigures) -> None:
        figures.served += 1
        if figures.counter is None:
            labels = (*_names(pair), "served")
            figures.counter = self.metrics.split_pairs_total.labels(*labels)
        figures.counter.value += 1.0

    def _count_pull(
        self, figures: PairFigures, state: State, record: SplitRecord, relay: Relay | None
    ) -> None:
        began, done = record.prefill_sent_at, record.prefilled_at
        if state is _DONE and record.pulled_tokens and began is not None and done is not None:
            figures.served += 1
            self.metrics.pulls_total.labels("pulled").inc()
            self.metrics.pulled_tokens_total.value += record.pulled_tokens
            self.metrics.pull_seconds.observe(done - began)
            _add_times(figures, record, relay)
        elif state in (_DONE, _FAILED):
            figures.failed += 1
            self.metrics.pulls_total.labels("computed" if state is _DONE else "failed").inc()

    def close(self) -> None:
        """Close the connections of release requests and of queries to bootstrap servers."""
        for leg in tuple(self._running):
            leg.close()
        self.bootstraps.close()


def _names(pair: EndpointPair) -> tuple[str, str]:
    return pair.prefill.candidate.endpoint.name, pair.decode.candidate.endpoint.name


def _decision_label(decision: SplitDecision) -> str:
    if decision.pair is None:
        return "whole"
    return "pull" if decision.pair.is_pull else "split"


def _add_times(figures: PairFigures, record: SplitRecord, relay: Relay | None) -> None:
    began, done = record.prefill_sent_at, record.prefilled_at
    if relay is None or began is None or done is None:
        return
    if relay.first_token_at is not None:
        figures.add_times(done - began, max(0.0, relay.first_token_at - done))


def _update_mean(mean_s: float | None, newest_s: float) -> float:
    return newest_s if mean_s is None else mean_s + MEAN_WEIGHT * (newest_s - mean_s)


def _wait_s(least_s: float, mean_s: float | None) -> float:
    # Return the seconds to wait: twice the mean duration `mean_s`, within limits.
    #
    # If no duration is known (None), return the upper limit.
    return MAX_WAIT_S if mean_s is None else min(max(least_s, 2.0 * mean_s), MAX_WAIT_S)
