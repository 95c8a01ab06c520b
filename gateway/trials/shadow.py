"""Shadow policies: routing policies on trial whose picks are recorded but have no effect.

They get the same input as the policy that serves requests. No request waits for a shadow policy: it
computes its pick in a later iteration of the event loop, after the request was sent. Canaries,
which serve part of the requests, are in canary.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from time import perf_counter
from typing import Protocol

import msgspec

from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.metrics.catalogue import Metrics
from gateway.protocol.request.api_call import Call
from gateway.request_record import Exchange
from policies import routing_algorithm
from policies.latency.expected_latency import ttft_s
from policies.load_snapshot import LoadSnapshot
from policies.policy_types import Policy
from policies.routing_types import Candidate, Pick, RoutingQuery

log = logging.getLogger("penstock")

CPU_SHARE = 0.1
"""CPU time that a pool's shadows may use, as a multiple of the CPU time of the pool's own picks.

With 0.1, shadows may take 0.1 s for each second of picks. Picks over budget are not evaluated.
Recording picks may take as much time again.
"""

RESULTS = ("agreed", "differed", "no_endpoint", "failed")
FIRST_COST_S = 0.0005  # assumed cost of an evaluation until one has been measured
MAX_RECORDS = 64  # recorded picks that may wait for their evaluation
MIN_COMPARED = 100  # picks; with this many the agreement is accurate to about ten percentage points
BUDGET_CAP_S = 0.01  # cap of the unused CPU budget, so that an idle hour is not spent in one second


class PickedRoute(Protocol):
    """The interface of a request's route, for shadow policies: its model and the candidates."""

    @property
    def name(self) -> str: ...
    @property
    def candidates(self) -> Sequence[Candidate]: ...


class NamedPolicy(msgspec.Struct, frozen=True):
    """A shadow policy with its name in the pool. The picks of a shadow policy have no effect."""

    name: str
    policy: Policy


class PickRecord(msgspec.Struct, frozen=True):
    """A pick of the serving policy, recorded for a later comparison with shadow policies.

    query        the policy's input: the request and its cached tokens at each endpoint
    pick         the pick of the serving policy
    candidates   the endpoints that it could pick
    call         the request
    model        the name of the request's model
    load         the picked endpoint's load before its capacity was reserved (no other endpoint's
                 load changes). None: the pick is not compared and only updates the prefix index
    """

    query: RoutingQuery
    pick: Pick
    candidates: Sequence[Candidate]
    call: Call
    model: str
    load: LoadSnapshot | None


class ShadowResult(msgspec.Struct, frozen=True):
    """How the pick of a shadow policy, which has no effect, compares with the actual pick.

    ttft_gain_s          by how many seconds the shadow expects the first token earlier; None
                         without latency models
    extra_cached_tokens  cached prompt tokens at the shadow's pick, minus those at the actual pick
    """

    result: str
    ttft_gain_s: float | None = None
    extra_cached_tokens: int = 0


def evaluate(
    policy: Policy, query: RoutingQuery, pick: Pick, candidates: Sequence[Candidate]
) -> ShadowResult:
    """Compare what `policy` would pick with the actual `pick`.

    `candidates` must have the load from before the capacity was reserved.
    """
    other = routing_algorithm.pick(policy, query, candidates)
    if other is None:
        return ShadowResult("no_endpoint")
    choice, actual = other.candidate, pick.candidate
    if choice.endpoint.name == actual.endpoint.name:
        return ShadowResult("agreed", 0.0 if choice.load.is_modelled else None)
    actual = next(candidate for candidate in candidates if candidate.load.slot == actual.load.slot)
    actual_cached, choice_cached = _cached(query, actual), _cached(query, choice)
    sooner_s = None
    if actual.load.is_modelled and choice.load.is_modelled:
        sooner_s = _ttft_s(query, actual, actual_cached) - _ttft_s(query, choice, choice_cached)
    return ShadowResult("differed", sooner_s, choice_cached - actual_cached)


def _cached(query: RoutingQuery, candidate: Candidate) -> int:
    slot = candidate.load.slot
    if slot >= len(query.cached_by_slot):
        return 0
    return min(query.request.prompt_tokens, query.cached_by_slot[slot])


def _ttft_s(query: RoutingQuery, candidate: Candidate, cached_tokens: int) -> float:
    prompt = query.request.prompt_tokens
    return ttft_s(candidate.load, prompt - cached_tokens, cached_tokens, query.now)


class Shadows:
    """The shadow policies of one pool: they compute picks that have no effect, for comparison.

    Each has its own state, and is kept while its configuration is unchanged.
    """

    def __init__(
        self, pool: str, policies: Sequence[NamedPolicy], endpoints: EndpointTable, primary: Policy
    ) -> None:
        self.pool = pool
        self.policies = tuple(policies)
        self._endpoints = endpoints
        # If the serving policy takes no fingerprints, the shadows have to feed the prefix index.
        reads_prefix = any(shadow.policy.reads_prefix for shadow in policies)
        self._feeds_prefix_index = not primary.reads_prefix and reads_prefix
        self._rng = Random(endpoints.rng.random())
        self._records: deque[PickRecord] = deque(maxlen=MAX_RECORDS)
        self._is_scheduled = False
        self._budget_s = self._picks_s = self._cost_s = 0.0
        self._mean_cost_s = FIRST_COST_S
        self._picks = self._evaluated = 0
        self._metrics: Metrics | None = None

    def count_in(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def remove_series(self, metrics: Metrics) -> None:
        """Remove the metric series of ended shadow policies. Later results are not counted."""
        self._metrics = None
        trials = metrics.trial_metrics
        for family in (trials.picks, trials.cost, trials.ttft, trials.tokens):
            family.remove_children("pool", self.pool)

    def on_pick(
        self, exchange: Exchange, route: PickedRoute, query: RoutingQuery, pick: Pick
    ) -> None:
        """Record a pick for the shadow policies, if their CPU budget permits.

        Call this before capacity is reserved for the pick.
        """
        if exchange.call is None or exchange.picked_at is None:
            return
        took_s = exchange.picked_at - query.now
        self._picks += 1
        self._picks_s += took_s
        budget_s = self._budget_s = self._budget_s + CPU_SHARE * took_s
        waiting = len(self._records)
        is_sampled = budget_s > self._mean_cost_s * (1 + waiting) and waiting < MAX_RECORDS
        feeds_index = self._feeds_prefix_index and query.fingerprint is None
        if not (is_sampled or feeds_index):
            return
        load = LoadSnapshot(pick.candidate.load) if is_sampled else None
        record = PickRecord(query, pick, route.candidates, exchange.call, route.name, load)
        self._records.append(record)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop = asyncio.get_running_loop()
            # Two turns later, so that this turn's requests are sent first.
            loop.call_soon(loop.call_soon, self._evaluate_all)

    def _evaluate_all(self) -> None:
        self._is_scheduled = False
        records, self._records = self._records, deque(maxlen=MAX_RECORDS)
        for record in records:
            began = perf_counter()
            try:
                self._evaluate(record)
            except Exception:
                log.exception("evaluating the shadow policies of pool %s failed", self.pool)
            took_s = perf_counter() - began
            self._cost_s += took_s
            if record.load is not None:
                self._mean_cost_s += 0.1 * (took_s - self._mean_cost_s)
                self._budget_s = min(BUDGET_CAP_S, self._budget_s) - took_s

    def _evaluate(self, record: PickRecord) -> None:
        query = record.query
        if self._feeds_prefix_index and query.fingerprint is None:
            query = self._feed_prefix_index(record)
        if record.load is None:
            return
        self._evaluated += 1
        picked = record.pick.candidate
        before = Candidate(picked.endpoint, record.load.restore(picked.load))
        candidates = tuple(
            before if candidate.load is picked.load else candidate
            for candidate in record.candidates
        )
        query = msgspec.structs.replace(query, rng=self._rng)
        for shadow in self.policies:
            began = perf_counter()
            try:
                result = evaluate(shadow.policy, query, record.pick, candidates)
            except Exception:  # a policy may be third-party code, and this one serves no request
                log.exception("shadow policy %s of pool %s failed", shadow.name, self.pool)
                result = ShadowResult("failed")
            self._count(shadow.name, result, perf_counter() - began)

    def _feed_prefix_index(self, record: PickRecord) -> RoutingQuery:
        # Record the prompt in the prefix index; return the query with its fingerprint.
        call, prompt_tokens = record.call, record.call.request.prompt_tokens
        if not call.prompt:  # the request has ended and its prompt has been freed
            return record.query
        prefixes = self._endpoints.prefixes
        fingerprint = prefixes.fingerprint(call, record.model)
        cached = tuple(prefixes.cached_tokens(fingerprint, prompt_tokens))
        prefixes.learn_prompt(fingerprint, record.pick.candidate.load, prompt_tokens)
        return msgspec.structs.replace(record.query, cached_by_slot=cached, fingerprint=fingerprint)

    def _count(self, name: str, result: ShadowResult, took_s: float) -> None:
        metrics = self._metrics
        if metrics is None:
            return
        pool, trials, sooner_s = self.pool, metrics.trial_metrics, result.ttft_gain_s
        trials.picks.labels(pool, name, result.result).value += 1.0
        trials.cost.labels(pool, name).value += took_s
        if sooner_s:
            way = "sooner" if sooner_s > 0 else "later"
            trials.ttft.labels(pool, name, way).value += abs(sooner_s)
        if result.extra_cached_tokens:
            way = "more" if result.extra_cached_tokens > 0 else "fewer"
            trials.tokens.labels(pool, name, way).value += abs(result.extra_cached_tokens)

    def as_json(self) -> dict[str, object]:
        """Return the results of the shadow policies as plain values.

        They include the CPU cost relative to that of the pool's own picks.
        """
        pick_us = round(1e6 * self._picks_s / self._picks, 2) if self._picks else None
        return {
            "pool": self.pool,
            "picks": self._picks,
            "scored": self._evaluated,
            "pick_us": pick_us,
            "cost_share": round(self._cost_s / self._picks_s, 4) if self._picks_s else None,
            "policies": [self._policy_as_json(shadow.name) for shadow in self.policies],
        }

    def _policy_as_json(self, name: str) -> dict[str, object]:
        if self._metrics is None:
            return {"policy": name}
        pool, trials = self.pool, self._metrics.trial_metrics
        counts = {result: trials.picks.labels(pool, name, result).value for result in RESULTS}
        evaluated, compared = sum(counts.values()), counts["agreed"] + counts["differed"]
        sooner_s = trials.ttft.labels(pool, name, "sooner").value
        later_s = trials.ttft.labels(pool, name, "later").value
        more = trials.tokens.labels(pool, name, "more").value
        fewer = trials.tokens.labels(pool, name, "fewer").value
        cost_s = trials.cost.labels(pool, name).value
        return {
            "policy": name,
            **{result: int(count) for result, count in counts.items()},
            "conclusive": compared >= MIN_COMPARED,
            "agreement": round(counts["agreed"] / compared, 4) if compared else None,
            "ttft_gain_s": round((sooner_s - later_s) / compared, 6) if compared else None,
            "cached_tokens_gain": round((more - fewer) / compared, 1) if compared else None,
            "cost_us": round(1e6 * cost_s / evaluated, 2) if evaluated else None,
        }


def name_policies(
    specs: Sequence[tuple[str, Mapping[str, object], Policy]],
) -> tuple[NamedPolicy, ...]:
    """Give each shadow policy of a pool a unique name.

    That is the policy's name. Where several shadows use the same policy, parameters are appended.
    """
    names = [name for name, _, _ in specs]
    return tuple(
        NamedPolicy(name if names.count(name) == 1 else f"{name}({_format(params)})", policy)
        for name, params, policy in specs
    )


def _format(params: Mapping[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in params.items())
