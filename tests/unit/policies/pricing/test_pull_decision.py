"""Tests of the decision whether an endpoint fetches the beginning of a prompt, and from where."""

from __future__ import annotations

from collections.abc import Container, Sequence
from random import Random

import msgspec
import pytest

from policies import routing_algorithm
from policies.prefix.prefix_match import PrefixMatch
from policies.pricing.endpoint_price import PricedPolicy
from policies.pricing.pull_decision import (
    LEAST_PATIENCE_S,
    LEAST_PULL,
    MOST_PRICED,
    NO_STORE,
    PullDecision,
    PullPricer,
    StoredTokens,
    StoreTimes,
    cheaper_pull,
    patience_s,
)
from policies.pricing.split_decision import (
    PairGroup,
    SplitDecision,
    SplitPools,
    SplitReason,
    SplitRule,
)
from policies.pricing.transfer_time import TransferTimes
from policies.routing_types import Candidate
from tests.unit.policies.builders import ask, outlook

POLICY = PricedPolicy(measured_share=0.0).build()
PROMPT, HELD = 20_000, 19_456


def decided(
    candidates: Sequence[Candidate],
    cached: Sequence[int],
    rule: SplitRule | None = None,
    transfers: TransferTimes | None = None,
    stored: StoredTokens | None = None,
    store: StoreTimes = NO_STORE,
) -> PullDecision | None:
    query = ask(PROMPT, cached=cached)
    whole = routing_algorithm.pick(POLICY, query, candidates)
    assert whole is not None
    pricer = PullPricer(POLICY, rule or SplitRule(1), store)
    return pricer.decide(query, candidates, whole.score, transfers, stored or StoredTokens())


def busy(slot: int, seconds: float) -> Candidate:
    return outlook(slot, prefill_done_at=100.0 + seconds)


def test_a_prompt_is_pulled_from_a_busy_endpoint_and_not_from_an_idle_one() -> None:
    pull = decided([busy(0, 2.0), outlook(1)], (HELD, 0), transfers=TransferTimes())
    assert pull is not None
    assert pull.is_remote
    assert (pull.source.load.slot, pull.pick.candidate.load.slot) == (0, 1)
    assert (pull.pulled_tokens, pull.pick.cached_tokens) == (HELD, HELD)

    assert decided([outlook(0), outlook(1)], (HELD, 0), transfers=TransferTimes()) is None


@pytest.mark.parametrize(("kv_token_s", "is_pulled"), [(6.5e-6, True), (2e-3, False)])
def test_a_slow_link_is_not_used(kv_token_s: float, is_pulled: bool) -> None:
    rule = SplitRule(1, kv_token_s=kv_token_s)
    pull = decided([busy(0, 2.0), outlook(1)], (HELD, 0), rule, TransferTimes())
    assert (pull is not None) == is_pulled


def test_a_queue_on_the_link_of_the_source_leads_to_another_source() -> None:
    transfers = TransferTimes()
    transfers.record(("tp0", "tp2"), 10_000, 0.1, 99.0)
    for _ in range(5):
        transfers.begin(("tp0", "tp3"), 20_000, 6.5e-6, 99.9)
    endpoints = [busy(0, 2.0), busy(1, 2.0), outlook(2)]
    pull = decided(endpoints, (HELD, HELD, 0), transfers=transfers)
    assert pull is not None
    assert pull.source.load.slot == 1


def test_a_few_tokens_are_not_pulled() -> None:
    cached = (HELD, HELD - LEAST_PULL + 1)
    assert decided([busy(0, 5.0), outlook(1)], cached, transfers=TransferTimes()) is None


def test_the_store_of_an_endpoints_own_host_is_read_without_links() -> None:
    stored = StoredTokens(in_memory=(0, HELD))
    quick = StoreTimes(memory_token_s=6.5e-6)
    pull = decided([outlook(0), outlook(1)], (), stored=stored, store=quick)
    assert pull is not None
    assert not pull.is_remote
    assert pull.pick.candidate.load.slot == 1

    slow = StoreTimes(memory_token_s=2e-3)
    assert decided([outlook(0), outlook(1)], (), stored=stored, store=slow) is None


def test_a_disk_delays_what_is_on_it_alone() -> None:
    times = StoreTimes(memory_token_s=6.5e-6, disk_token_s=2e-3)
    on_disk = StoredTokens(in_memory=(), in_all=(0, HELD))
    assert decided([outlook(0), outlook(1)], (), stored=on_disk, store=times) is None
    in_both = StoredTokens(in_memory=(0, HELD), in_all=(0, HELD))
    assert decided([outlook(0), outlook(1)], (), stored=in_both, store=times) is not None


def test_a_transfer_teaches_its_time_and_occupies_its_links_until_the_first_token() -> None:
    transfers = TransferTimes()
    pricer = PullPricer(POLICY, SplitRule(1))
    query, candidates = ask(PROMPT, cached=(HELD, 0)), [busy(0, 2.0), outlook(1)]
    whole = routing_algorithm.pick(POLICY, query, candidates)
    assert whole is not None
    pull = pricer.decide(query, candidates, whole.score, transfers)
    assert pull is not None

    transfer = pricer.begin(pull, transfers, 100.0)
    assert transfer is not None
    names = ("tp0", "tp1")
    assert transfers.backlog_s(names, 100.0) > 0.0
    pricer.end(pull, transfers, transfer, 100.0, 102.0 + pull.own_s)
    assert transfers.backlog_s(names, 102.0 + pull.own_s) == 0.0
    assert transfers.speed(names, 6.5e-6, 102.0).token_s > 5e-5


# Decisions of the gateway, where the source sends KV after a request for the beginning


def gateway_decision(
    candidates: Sequence[Candidate],
    cached: Sequence[int],
    score: float | None = None,
    paused: Container[str] = (),
) -> SplitDecision:
    query = ask(PROMPT, cached=cached)
    pools = SplitPools((PairGroup("", tuple(candidates), tuple(candidates)),), tuple(candidates))
    whole = routing_algorithm.pick(POLICY, query, candidates)
    assert whole is not None
    pricer = PullPricer(POLICY, SplitRule(1), by_request=True)
    decision = SplitDecision(
        None, SplitReason.WHOLE_CHEAPER, False, whole.score if score is None else score, whole
    )
    return cheaper_pull(pricer, decision, pools, query, TransferTimes(), paused)


def generating(slot: int, backlog_s: float = 0.0) -> Candidate:
    # Return an endpoint with many answers that a prefill would delay.
    answers: dict[str, object] = dict.fromkeys(("decoding", "answers", "in_flight"), 200)
    return outlook(slot, prefill_done_at=100.0 + backlog_s, **answers)


def test_the_gateway_pulls_from_a_holder_whose_answers_a_prefill_would_delay() -> None:
    decision = gateway_decision([generating(0), outlook(1)], (HELD, 0))
    pair = decision.pair
    assert decision.reason is SplitReason.PULL_CHEAPER
    assert pair is not None
    assert pair.is_pull
    assert [pair.prefill.candidate.load.slot, pair.decode.candidate.load.slot] == [0, 1]
    assert (pair.pulled_tokens, pair.decode.cached_tokens) == (HELD, HELD)
    assert pair.moved_tokens(PROMPT) == HELD
    assert decision.score == pair.decode.score


def test_the_queue_of_the_holder_counts_as_the_request_for_the_beginning_waits_in_it() -> None:
    # The other endpoint would compute the prompt in 1.4 s.
    assert gateway_decision([generating(0, 0.5), outlook(1)], (HELD, 0)).pair is not None
    assert gateway_decision([generating(0, 5.0), outlook(1)], (HELD, 0)).pair is None


def test_the_gateway_pulls_only_from_endpoints_that_may_get_the_request() -> None:
    full = generating(0)
    full.load.in_flight = full.endpoint.max_concurrency
    assert gateway_decision([full, outlook(1)], (HELD, 0)).pair is None
    # Another endpoint that has less of the prompt is a source then.
    decision = gateway_decision([full, outlook(1), generating(2)], (HELD, 0, HELD - 100))
    assert decision.pair is not None
    assert decision.pair.prefill.candidate.load.slot == 2


def test_the_gateway_prices_no_pull_from_an_idle_endpoint_that_has_nearly_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced: list[object] = []
    monkeypatch.setattr(PullPricer, "decide", lambda *args, **_: priced.append(args))
    gateway_decision([outlook(0), outlook(1)], (HELD, 0))
    gateway_decision([outlook(0), busy(1, 2.0)], (HELD - LEAST_PULL + 1, HELD))
    assert not priced
    gateway_decision([outlook(0), busy(1, 2.0)], (HELD - LEAST_PULL, HELD))
    gateway_decision([generating(0), outlook(1)], (HELD, 0))
    assert len(priced) == 2


def fleet(rng: Random, size: int) -> list[Candidate]:
    # Return endpoints with different numbers of answers and prompts.
    return [
        generating(slot, rng.random()) if rng.random() < 0.3 else busy(slot, 2.0 * rng.random())
        for slot in range(size)
    ]


def test_the_gateway_prices_a_few_endpoints_of_a_large_fleet_and_finds_a_cheap_pull() -> None:
    rng, found = Random(3), 0
    for _ in range(20):
        endpoints = [generating(0, 0.1), *fleet(rng, 40)[1:]]
        cached = [HELD, *[rng.choice((0, 0, 4096)) for _ in endpoints[1:]]]
        decision = gateway_decision(endpoints, cached)
        query = ask(PROMPT, cached=cached)
        whole = routing_algorithm.pick(POLICY, query, endpoints)
        assert whole is not None
        every = PullPricer(POLICY, SplitRule(1), by_request=True).decide(
            query, endpoints, whole.score, TransferTimes(), sources=endpoints[:1]
        )
        assert (decision.pair is None) == (every is None)
        if decision.pair is not None and every is not None:
            found += 1
            assert len(decision.pair.decode.candidates) == MOST_PRICED
            gain = every.pick.score - whole.score
            assert decision.score is not None
            assert decision.score - whole.score > 0.95 * gain
    assert found > 5


def test_of_many_endpoints_with_the_same_beginning_one_without_a_queue_sends_it() -> None:
    endpoints = [generating(slot, 0.1 * (20 - slot)) for slot in range(20)]
    decision = gateway_decision([*endpoints, outlook(20)], [*[HELD] * 20, 0])
    assert decision.pair is not None
    assert decision.pair.prefill.candidate.load.slot == 19


def test_the_gateway_reads_the_cached_tokens_of_a_large_pool() -> None:
    match = PrefixMatch(2, {0: HELD}, (), HELD)
    decision = gateway_decision([generating(0), outlook(1)], match)
    assert decision.pair is not None
    assert decision.pair.pulled_tokens == HELD


def test_an_endpoint_that_is_paused_is_no_source() -> None:
    endpoints = [generating(0), outlook(1), generating(2)]
    decision = gateway_decision(endpoints, (HELD, 0, HELD - 100), paused={"tp0"})
    assert decision.pair is not None
    assert decision.pair.prefill.candidate.load.slot == 2
    assert gateway_decision(endpoints[:2], (HELD, 0), paused={"tp0"}).pair is None


@pytest.mark.parametrize(
    ("cached", "score"), [((), None), ((LEAST_PULL - 1, 0), None), ((HELD, 0), 0.0)]
)
def test_the_gateway_keeps_a_choice_that_no_pull_improves(
    cached: tuple[int, ...], score: float | None
) -> None:
    decision = gateway_decision([generating(0), outlook(1)], cached, score)
    assert (decision.pair, decision.reason) == (None, SplitReason.WHOLE_CHEAPER)


def test_a_choice_without_a_price_is_kept() -> None:
    decision = SplitDecision(None, SplitReason.NO_PAIR, False)
    pools, query = SplitPools((), ()), ask(PROMPT, cached=(HELD, 0))
    pricer = PullPricer(POLICY, SplitRule(1), by_request=True)
    assert cheaper_pull(pricer, decision, pools, query, TransferTimes()) is decision


def test_the_request_for_a_beginning_may_take_as_long_as_an_answer_without_a_pull() -> None:
    decision = gateway_decision([generating(0), outlook(1)], (HELD, 0))
    assert decision.pair is not None
    ttft = 0.03 + PROMPT * (6e-5 + 0.5 * PROMPT * 1e-9)
    assert patience_s(decision.pair, PROMPT, 100.0) == pytest.approx(ttft)
    short = msgspec.structs.replace(decision.pair, pulled_tokens=1)
    assert patience_s(short, HELD, 100.0) == LEAST_PATIENCE_S
