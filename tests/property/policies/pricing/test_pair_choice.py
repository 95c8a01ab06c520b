"""Property tests of the choice of a prefill and a decode endpoint for a split request.

A fast method compares all pairs at once. It must choose the same pair as if the cost of each was
computed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import pickers, routing_algorithm
from policies.policy_types import LinkLoad, PhaseShare, Policy, WeightedScorer
from policies.pricing.endpoint_price import PricedPolicy
from policies.pricing.split_decision import (
    DECODERS_TRIED,
    LATEST,
    EndpointPair,
    PairGroup,
    PricedSplitter,
    SplitPools,
    SplitRule,
    build_splitter,
    decode_wait_s,
    transfer_s,
)
from policies.pricing.transfer_time import MEMORY_S, PendingTransfer, TransferTimes
from policies.routing_types import Candidate, Pick, Role, RoutingQuery
from tests.unit.policies.builders import ask, outlook

NOW, SLOTS = 100.0, 6
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
seconds = st.floats(0.0, 3.0)


@st.composite
def endpoints(draw: st.DrawFn, slot: int) -> Candidate:
    # Few different values, so that ties occur.
    made = outlook(
        slot,
        prefill_done_at=NOW + draw(st.sampled_from((0.0, 0.5, 2.0))),
        decode_s_per_token=draw(st.sampled_from((0.01, 0.03))),
        expected_tokens=draw(st.sampled_from((0, 4_000))),
        in_flight=draw(st.sampled_from((0, 0, 2))),
        is_available=draw(st.sampled_from((True, True, True, False))),
        free_kv_tokens=draw(st.sampled_from((0.0, 400_000.0))),
        s_per_freed_kv_token=1e-5,
    )
    cap = draw(st.sampled_from((1, 24)))
    return Candidate(msgspec.structs.replace(made.endpoint, max_concurrency=cap), made.load)


def _in_role(one: Candidate, role: Role) -> Candidate:
    return Candidate(msgspec.structs.replace(one.endpoint, role=role), one.load)


@st.composite
def pools(draw: st.DrawFn) -> SplitPools:
    fleet = [draw(endpoints(slot)) for slot in range(SLOTS)]
    roles = draw(st.lists(st.sampled_from("pdb"), min_size=SLOTS, max_size=SLOTS))
    pairs = [(_in_role(each, ROLES[role]), role) for each, role in zip(fleet, roles, strict=True)]
    group = PairGroup(
        "g",
        tuple(each for each, role in pairs if role != "d"),
        tuple(each for each, role in pairs if role != "p"),
    )
    return SplitPools((group,), tuple(each for each, role in pairs if role == "b"))


@st.composite
def transfers(draw: st.DrawFn) -> TransferTimes:
    # Return what some measured, unfinished, ready and ended transfers have taught.
    times, pending = TransferTimes(), list[tuple[PendingTransfer, float]]()
    slots = st.integers(0, SLOTS - 1).map("tp{}".format)
    for _ in range(draw(st.integers(0, 8))):
        names, at_s = (draw(slots), draw(slots)), NOW - draw(st.floats(0.0, 1.2 * MEMORY_S))
        tokens = draw(st.sampled_from((10, 4_000)))
        kind = draw(st.sampled_from(("measured", "queued", "ready", "ended")))
        if kind == "measured":
            times.record(names, tokens, draw(seconds), at_s)
            continue
        pending.append((times.begin(names, tokens, 1e-5, at_s), at_s))
        if kind != "queued":
            pending[-1][0].on_ready(at_s)
        if kind == "ended":
            transfer, began_s = pending.pop()
            transfer.end(min(NOW, began_s + draw(seconds)))
            times.learn(transfer, began_s, NOW)
    return times


def pairs_alone(
    splitter: PricedSplitter, options: SplitPools, query: RoutingQuery, times: TransferTimes | None
) -> Iterator[EndpointPair]:
    # Yield the pairs of the cheapest decoders, each computed without the others.
    (group,) = options.groups
    cheapest = routing_algorithm.pick(splitter.decode, query, group.decodes)
    if cheapest is None:
        return
    rated = zip(cheapest.scores, cheapest.candidates, strict=True)
    ranked = [each for _, each in sorted(rated, key=lambda pair: pair[0], reverse=True)]
    others = [each for each in ranked if each is not cheapest.candidate]
    for decoder in (cheapest.candidate, *others[: DECODERS_TRIED - 1]):
        decode = routing_algorithm.repick(cheapest, decoder, query.cached_by_slot)
        wait_s = decode_wait_s(query, decode)
        policy = partners_of(splitter, decode, wait_s, times)
        prefills = [each for each in group.prefills if each is not decoder]
        is_general = decoder.endpoint.role is Role.BOTH
        if is_general and decoder.load.free_kv_tokens < query.request.prompt_tokens:
            prefills = [each for each in prefills if each.endpoint.role is Role.PREFILL]
        prefill = routing_algorithm.pick(policy, query, prefills)
        is_alone = any(
            each.load.is_available and each.endpoint.name not in query.failed_endpoints
            for each in options.alone
        )
        if prefill is None and not is_alone:
            crowded = msgspec.structs.replace(policy, filters=splitter.crowded.filters)
            prefill = routing_algorithm.pick(crowded, query, prefills)
        if prefill is not None:
            yield EndpointPair(prefill, decode, wait_s)


def partners_of(
    splitter: PricedSplitter, decode: Pick, wait_s: float, times: TransferTimes | None
) -> Policy:
    # Return a policy that picks the partner of one decoder.
    prices = splitter.prefill.phase_prices
    assert prices is not None

    def score(query: RoutingQuery, candidates: Sequence[Candidate]) -> list[float]:
        most_s = LATEST * query.request.slo.ttft_s
        moved_s = [transfer_s(splitter.rule, query, each, decode, times) for each in candidates]
        after_s = [wait_s + min(most_s, each) for each in moved_s]
        loads = [loads_of(splitter.rule, query, each, decode, times) for each in candidates]
        links = [each for each in loads if each is not None]
        part = PhaseShare(decodes=0.0, transfers_s=after_s, link_loads=links)
        return [-price for price in prices(query, candidates, part)]

    filters, scorers = splitter.prefill.filters, (WeightedScorer(score),)
    return Policy("prefill_price", filters, scorers, pickers.best, reads_prefix=True)


def loads_of(
    rule: SplitRule,
    query: RoutingQuery,
    prefill: Candidate,
    decode: Pick,
    times: TransferTimes | None,
) -> tuple[LinkLoad, LinkLoad] | None:
    # Return the loads of the two links that a pair's KV would use; None: no times are known.
    if times is None:
        return None
    names = prefill.endpoint.name, decode.candidate.endpoint.name
    speed = times.speed(names, rule.kv_token_s, query.now)
    moved = query.request.prompt_tokens - decode.cached_tokens
    service_s = rule.handoff_s + speed.service_s(moved)
    forecast = times.forecast(rule.kv_token_s, query.now)
    sending, receiving = (LinkLoad(*forecast.waits(end), service_s) for end in enumerate(names))
    return sending, receiving


@given(
    pools(),
    st.none() | transfers(),
    st.lists(st.sampled_from((0, 2_000)), max_size=SLOTS),
    st.sampled_from(((), ("tp0",))),
    st.integers(0, 99),
)
def test_the_chosen_pair_is_that_of_pairs_computed_alone(
    options: SplitPools,
    times: TransferTimes | None,
    cached: Sequence[int],
    tried: Sequence[str],
    seed: int,
) -> None:
    splitter = build_splitter(SplitRule(1), PricedPolicy(measured_share=0.0).build())
    assert isinstance(splitter, PricedSplitter)
    questions = [ask(4_000, 200, cached, tried, NOW, seed) for _ in range(2)]
    alone = list(pairs_alone(splitter, options, questions[0], times))
    best = max(alone, key=lambda pair: pair.prefill.score + pair.decode.score, default=None)
    assert splitter.choose_pair(options, questions[1], times) == best
    assert questions[0].rng.random() == questions[1].rng.random()  # as many ties were broken


@given(transfers(), st.sampled_from((NOW, NOW + 2 * MEMORY_S)))
def test_a_forecast_of_many_pairs_equals_that_of_each(times: TransferTimes, now: float) -> None:
    names, forecast = [f"tp{slot}" for slot in range(SLOTS)], times.forecast(1e-5, now)
    for decode in names:
        for prefill, link in zip(names, forecast.links_to(decode, names), strict=True):
            speed = times.speed((prefill, decode), 1e-5, now)
            backlog_s = times.backlog_s((prefill, decode), now)
            assert link == (speed.token_s, speed.fixed_s, backlog_s)


def test_links_that_are_being_tested_are_busy_forever() -> None:
    times = TransferTimes()
    times.begin(("tp0", "tp1"), 4_000, 1e-5, NOW)
    links = times.forecast(1e-5, NOW).links_to("tp2", ["tp0", "tp3"])
    assert [queue_s for _, _, queue_s in links] == [inf, pytest.approx(0.0)]
