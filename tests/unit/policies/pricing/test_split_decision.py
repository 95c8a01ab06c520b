"""Tests of the decision to split a request, and of the choice of its two engines."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec
import pytest

from policies.builtin_policies import LeastLoaded, PrefixAware
from policies.pricing.endpoint_price import PricedPolicy
from policies.pricing.split_decision import (
    PairGroup,
    SplitPools,
    SplitReason,
    SplitRule,
    SplitShape,
    begin_transfer,
    build_splitter,
    computed_s,
    decode_wait_s,
    end_transfer,
    kv_compatibility_key,
    transfer_s,
    unsplittable_reason,
)
from policies.pricing.transfer_time import TransferTimes
from policies.routing_types import Candidate, Pick, Role, Slo
from tests.unit.policies.builders import ask, candidate, outlook

SPLITTER = build_splitter(SplitRule(2000, 0.25), PrefixAware().build())


def pools(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    alone: Sequence[Candidate] | None = None,
) -> SplitPools:
    group = PairGroup("g", tuple(prefills), tuple(decodes))
    return SplitPools((group,), tuple(decodes if alone is None else alone))


FOUR = pools([candidate(0), candidate(1)], [candidate(2), candidate(3)])


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (SplitShape(), None),
        (SplitShape(max_tokens=1), None),
        (SplitShape(choices=2), SplitReason.CHOICES),
        (SplitShape(prompts=2), SplitReason.PROMPTS),
        (SplitShape(scores_prompt=True), SplitReason.PROMPT_SCORES),
    ],
)
def test_what_a_handoff_would_break_is_not_split_however_long(
    shape: SplitShape, why: SplitReason | None
) -> None:
    assert unsplittable_reason(shape) is why
    decision = SPLITTER.decide(FOUR, ask(100_000), shape, splitting=True)
    assert (decision.pair is None) == (why is not None or shape.max_tokens == 1)


@pytest.mark.parametrize(
    ("prompt", "cached", "splitting", "reason", "after"),
    [
        (1499, (), True, SplitReason.SHORT, False),
        (1500, (), True, SplitReason.LONG, True),
        (2499, (), False, SplitReason.SHORT, False),
        (2500, (), False, SplitReason.LONG, True),
        (9000, (0, 0, 8000, 8000), True, SplitReason.CACHED, False),
        (9000, (0, 0, 8000, 0), True, SplitReason.CACHED, False),
    ],
)
def test_the_uncached_tokens_at_the_decoder_decide_within_a_band(
    prompt: int, cached: Sequence[int], splitting: bool, reason: SplitReason, after: bool
) -> None:
    decision = SPLITTER.decide(FOUR, ask(prompt, cached=cached), SplitShape(), splitting)
    assert (decision.reason, decision.splitting) == (reason, after)


def test_one_token_is_not_worth_a_handoff() -> None:
    assert (
        SPLITTER.decide(FOUR, ask(9000), SplitShape(max_tokens=1), False).reason
        is SplitReason.ONE_TOKEN
    )


def test_a_short_request_without_a_whole_endpoint_is_split() -> None:
    nobody = msgspec.structs.replace(FOUR, alone=())
    decision = SPLITTER.decide(nobody, ask(10), SplitShape(max_tokens=1), False)
    assert decision.pair is not None
    assert decision.reason is SplitReason.NO_SINGLE_ENDPOINT


def test_the_least_loaded_decodes_and_the_prefix_holder_prefills() -> None:
    choice = pools([candidate(0), candidate(1)], [candidate(2, decode_tokens=50_000), candidate(3)])
    decision = SPLITTER.decide(choice, ask(8000, cached=(0, 6000)), SplitShape(), False)
    assert decision.pair is not None
    assert decision.pair.prefill.candidate.load.slot == 1
    assert decision.pair.prefill.cached_tokens == 6000
    assert decision.pair.decode.candidate.load.slot == 3


def test_an_endpoint_is_never_paired_with_itself() -> None:
    both = [candidate(0), candidate(1)]
    decision = SPLITTER.decide(pools(both, both), ask(8000), SplitShape(), False)
    assert decision.pair is not None
    assert decision.pair.prefill.candidate is not decision.pair.decode.candidate


@pytest.mark.parametrize("policy", [PrefixAware(), PricedPolicy(measured_share=0.0)])
def test_an_endpoint_of_both_phases_decodes_only_what_it_has_free_memory_for(
    policy: PrefixAware | PricedPolicy,
) -> None:
    splitter = build_splitter(SplitRule(2000, 0.25), policy.build())
    full, room = outlook(0, free_kv_tokens=7999.0), outlook(1, free_kv_tokens=8000.0)
    full.load.is_available = room.load.is_available = True
    pair = splitter.choose_pair(pools([full, room], [full, room]), ask(8000))
    assert pair is not None
    assert pair.decode.candidate is room
    room.load.free_kv_tokens = 7999.0
    assert splitter.choose_pair(pools([full, room], [full, room]), ask(8000)) is None

    def only(role: Role) -> Candidate:
        endpoint = msgspec.structs.replace(full.endpoint, role=role)
        return msgspec.structs.replace(full, endpoint=endpoint)

    pair = splitter.choose_pair(pools([room], [only(Role.DECODE)]), ask(8000))
    assert pair is not None, "what only decodes keeps no KV for others"
    pair = splitter.choose_pair(pools([room, only(Role.PREFILL)], [room]), ask(8000))
    assert pair is not None, "what only prefills takes no KV of others"
    assert pair.prefill.candidate.endpoint.role is Role.PREFILL


def test_pairs_are_formed_inside_one_group() -> None:
    old = PairGroup("old", (candidate(0),), (candidate(1),))
    new = PairGroup("new", (candidate(2),), (candidate(3, decode_tokens=10**6),))
    decision = SPLITTER.decide(SplitPools((old, new), ()), ask(8000), SplitShape(), False)
    assert decision.pair is not None
    assert [
        decision.pair.prefill.candidate.load.slot,
        decision.pair.decode.candidate.load.slot,
    ] == [0, 1]


def test_a_decoder_whose_prefillers_are_all_away_is_not_chosen() -> None:
    old = PairGroup("old", (candidate(0, is_available=False),), (candidate(1),))
    new = PairGroup("new", (candidate(2),), (candidate(3, decode_tokens=10**6),))
    decision = SPLITTER.decide(SplitPools((old, new), ()), ask(8000), SplitShape(), False)
    assert decision.pair is not None
    assert decision.pair.decode.candidate.load.slot == 3


@pytest.mark.parametrize("tried", [("tp0", "tp1"), ("tp2", "tp3")])
def test_without_a_pair_the_request_is_served_whole(tried: Sequence[str]) -> None:
    decision = SPLITTER.decide(FOUR, ask(8000, tried=tried), SplitShape(), True)
    assert (decision.pair, decision.reason, decision.splitting) == (None, SplitReason.NO_PAIR, True)


def test_full_prefillers_lead_to_whole_requests_or_a_queue() -> None:
    full = [candidate(0, cap=1, in_flight=1), candidate(1, cap=1, in_flight=2)]
    assert (
        SPLITTER.decide(pools(full, [candidate(2)]), ask(8000), SplitShape(), False).reason
        is SplitReason.NO_PAIR
    )
    queued = SPLITTER.decide(pools(full, [candidate(2)], alone=()), ask(8000), SplitShape(), False)
    assert queued.pair is not None
    full_decoder = pools([candidate(0)], [candidate(2, cap=1, in_flight=1)], alone=())
    assert SPLITTER.decide(full_decoder, ask(8000), SplitShape(), False).pair is None


def test_endpoints_fit_by_engine_model_version_and_dtype() -> None:
    assert kv_compatibility_key("vllm", "m", {"zone": "a"}) == kv_compatibility_key(
        "vllm", "m", {"zone": "b"}
    )
    groups = {
        kv_compatibility_key("vllm", "m", {}),
        kv_compatibility_key("sglang", "m", {}),
        kv_compatibility_key("vllm", "n", {}),
        kv_compatibility_key("vllm", "m", {"version": "0.33"}),
        kv_compatibility_key("vllm", "m", {"kv_dtype": "0.33"}),
    }
    assert len(groups) == 5


def test_the_pools_policy_chooses_the_prefill_endpoint() -> None:
    least = build_splitter(SplitRule(), LeastLoaded().build())
    assert (least.prefill.name, least.decode.name) == ("least_loaded", "decode_load")


@pytest.mark.parametrize(
    "rule", [{"threshold_tokens": 0}, {"hysteresis": 1.0}, {"hysteresis": -0.1}]
)
def test_a_rule_that_makes_no_sense_is_refused(rule: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="threshold"):
        SplitRule(**rule)  # type: ignore[arg-type]


def busy(slot: int, **load: object) -> Candidate:
    # Return a candidate with about 15 ms per step and 60 us per prompt token.
    #
    # Keyword arguments set further numbers of its load.
    usual: dict[str, object] = {
        "prefill_done_at": 0.0,
        "prefill_s_per_token": 6e-5,
        "attention_s_per_pair": 1e-9,
        "decode_s_per_token": 0.015,
        "kv_tokens": 6e5,
    }
    return candidate(slot, 1000, **(usual | load))


PRICED = build_splitter(SplitRule(), PricedPolicy(measured_share=0.0).build())
ANSWERING = {
    "decoding": 40,
    "in_flight": 40,
    "answers": 40,
    "expected_tokens": 14_000,
    "kv_reserved": 300_000,
}


def test_a_price_splits_a_long_prompt_off_from_many_answers_and_not_from_an_idle_endpoint() -> None:
    spare = busy(1)
    busy_here, idle_here = busy(0, **ANSWERING), busy(0)
    split = PRICED.decide(
        pools([spare], [busy_here]), ask(30_000, 300), SplitShape(), splitting=False
    )
    assert (split.reason, split.pair is not None) == (SplitReason.PAIR_CHEAPER, True)
    whole = PRICED.decide(
        pools([spare], [idle_here]), ask(30_000, 300), SplitShape(), splitting=True
    )
    assert (whole.reason, whole.pair) == (SplitReason.WHOLE_CHEAPER, None)


def test_a_price_stops_splitting_when_the_prefiller_is_the_one_with_the_queue() -> None:
    decides = [
        PRICED.decide(
            pools([busy(1, prefill_done_at=100.0 + queue_s)], [busy(0, **ANSWERING)]),
            ask(8000, 300),
            SplitShape(),
            False,
        )
        for queue_s in (0.0, 8.0)
    ]
    assert [decide.reason for decide in decides] == [
        SplitReason.PAIR_CHEAPER,
        SplitReason.WHOLE_CHEAPER,
    ]


def test_a_price_keeps_whole_what_would_wait_for_memory_at_its_decoder() -> None:
    decides = [
        PRICED.decide(
            pools(
                [busy(1)],
                [busy(0, free_kv_tokens=free, s_per_freed_kv_token=1e-4, **ANSWERING)],
                alone=[busy(2, **ANSWERING)],
            ),
            *(ask(30_000, 300), SplitShape(), False),
        )
        for free in (50_000.0, -20_000.0)
    ]
    assert [decide.reason for decide in decides] == [
        SplitReason.PAIR_CHEAPER,
        SplitReason.WHOLE_CHEAPER,
    ]


def test_the_time_after_prefill_is_the_transfer_plus_the_longer_of_queue_and_memory_wait() -> None:
    rule, question = SplitRule(handoff_s=0.5, kv_token_s=1e-3), ask(4000, 300)

    def takes_s(cached: int, **load: object) -> float:
        decode = Pick(busy(0, fixed_ttft_s=0.03, **load), cached, 0.0, 1, "")
        moved_s = transfer_s(rule, question, candidate(9), decode)
        return moved_s + decode_wait_s(question, decode)

    assert takes_s(1000) == pytest.approx(0.5 + 3.0 + 0.03)
    assert takes_s(1000, prefill_done_at=102.0) == pytest.approx(5.53)
    assert takes_s(
        1000, prefill_done_at=102.0, free_kv_tokens=0.0, s_per_freed_kv_token=1e-3
    ) == pytest.approx(7.53)


def test_a_priced_pair_is_of_two_endpoints_and_inside_one_group() -> None:
    one, other, apart = busy(0), busy(1), busy(2)
    both = PairGroup("g", (one, other), (one, other))
    alone = PairGroup("h", (apart,), (apart,))
    pair = PRICED.choose_pair(SplitPools((alone, both), ()), ask(8000, 300))
    assert pair is not None
    assert {pair.prefill.candidate.endpoint.name, pair.decode.candidate.endpoint.name} == {
        "tp0",
        "tp1",
    }


def test_a_priced_request_without_a_whole_endpoint_is_split_and_queues_at_full_prefillers() -> None:
    full = candidate(0, 1, in_flight=1)
    decision = PRICED.decide(pools([full], [busy(1)], alone=[]), ask(100, 300), SplitShape(), False)
    assert decision.reason is SplitReason.NO_SINGLE_ENDPOINT
    assert decision.pair is not None
    assert decision.pair.prefill.candidate is full


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (SplitShape(choices=2), SplitReason.CHOICES),
        (SplitShape(max_tokens=1), SplitReason.ONE_TOKEN),
    ],
)
def test_what_cannot_or_need_not_be_split_is_not_priced(
    shape: SplitShape, why: SplitReason
) -> None:
    decision = PRICED.decide(
        pools([busy(1)], [busy(0, **ANSWERING)]), ask(30_000, 300), shape, splitting=False
    )
    assert (decision.reason, decision.pair) == (why, None)


def test_endpoints_that_answer_go_on_answering_and_the_others_go_on_prefilling() -> None:
    # Four endpoints may prefill and decode. The next pair uses them as they are used already, so
    # that roles form by themselves.
    fleet = [busy(0, **ANSWERING), busy(1, **ANSWERING), busy(2), busy(3)]
    tight = msgspec.structs.replace(ask(20_000, 300).request, slo=Slo("tight", 5.0, 0.03))
    pair = PRICED.choose_pair(
        pools(fleet, fleet), msgspec.structs.replace(ask(20_000, 300), request=tight)
    )
    assert pair is not None
    assert pair.prefill.candidate in fleet[2:]


def measured_links(**token_s: float) -> TransferTimes:
    # Return measured transfers from every prefill endpoint; keywords are seconds per token.
    transfers = TransferTimes()
    for _ in range(40):
        for prefill in ("tp0", "tp1"):
            for decode, seconds in token_s.items():
                transfers.record((prefill, decode), 8_000, 8_000 * seconds, 100.0)
    return transfers


def test_a_request_is_not_split_over_a_link_that_was_measured_to_be_slow() -> None:
    two = pools([busy(0)], [busy(1, **ANSWERING)], alone=[busy(2, **ANSWERING)])
    quick, slow = measured_links(tp1=1e-6), measured_links(tp1=2e-3)
    decisions = [
        PRICED.decide(two, ask(30_000, 300), SplitShape(), False, transfers)
        for transfers in (None, quick, slow)
    ]
    assert [decision.reason for decision in decisions] == [
        SplitReason.PAIR_CHEAPER,
        SplitReason.PAIR_CHEAPER,
        SplitReason.WHOLE_CHEAPER,
    ]


def test_the_pair_with_the_quick_link_is_chosen_though_its_decoder_is_busier() -> None:
    decoders = [busy(2, **ANSWERING), busy(3, **{**ANSWERING, "expected_tokens": 40_500.0})]
    question = ask(30_000, 300)
    greedy = PRICED.choose_pair(pools([busy(0)], decoders, alone=[]), question)
    joint = PRICED.choose_pair(
        pools([busy(0)], decoders, alone=[]), question, measured_links(tp2=2e-4, tp3=1e-6)
    )
    assert greedy is not None
    assert joint is not None
    assert greedy.decode.candidate.endpoint.name == "tp2"
    assert joint.decode.candidate.endpoint.name == "tp3"


def test_a_handoff_teaches_the_time_without_the_wait_at_the_decoder() -> None:
    pair = PRICED.choose_pair(pools([busy(0)], [busy(1)], alone=[]), ask(8000, 300))
    assert pair is not None
    assert pair.decode_wait_s is not None
    transfers, rule = TransferTimes(), SplitRule(handoff_s=0.5, kv_token_s=1e-6)
    for number in range(60):
        now = 100.0 + 10.0 * number
        transfer = begin_transfer(transfers, rule, pair, 8000, now)
        assert transfer is not None
        end_transfer(transfer, pair, now + 1.0 + 0.5 + 8.0 + pair.decode_wait_s)
        transfers.learn(transfer, now + 1.0 + 0.5, now + 9.5)
    question = ask(8000, 300, now=700.0)
    seconds = transfer_s(rule, question, pair.prefill.candidate, pair.decode, transfers)
    assert seconds == pytest.approx(8.5, rel=0.1)


def test_only_one_transfer_per_link_tests_the_speed_of_a_fleet_without_handoffs() -> None:
    prefills, decodes = [busy(0)], [busy(1)]
    pair = PRICED.choose_pair(pools(prefills, decodes, alone=[]), ask(8000, 300))
    assert pair is not None
    transfers, rule = TransferTimes(), SplitRule()
    assert transfer_s(rule, ask(8000, 300), pair.prefill.candidate, pair.decode, transfers) < 0.1
    assert begin_transfer(transfers, rule, pair, 8000, 0.0) is not None
    assert transfer_s(rule, ask(8000, 300), pair.prefill.candidate, pair.decode, transfers) == inf
    # If no endpoint can serve the request whole, it is split nevertheless.
    assert PRICED.choose_pair(pools(prefills, decodes, alone=[]), ask(8000, 300), transfers)


def test_a_transfer_waits_for_earlier_ones_unless_its_prefill_takes_longer() -> None:
    pair = PRICED.choose_pair(pools([busy(0)], [busy(1)], alone=[]), ask(8000, 300))
    assert pair is not None
    transfers, rule = TransferTimes(), SplitRule(handoff_s=0.0, kv_token_s=1e-3)
    transfers.record(("measured", "before"), 1_000, 1.0, 0.0)
    question = ask(8000, 300)
    prefill = pair.prefill.candidate
    alone_s = transfer_s(rule, question, prefill, pair.decode, transfers)
    assert alone_s == pytest.approx(8.0)
    first = begin_transfer(transfers, rule, pair, 8000, question.now)
    assert first is not None
    queued_s = transfer_s(rule, question, prefill, pair.decode, transfers)
    assert queued_s == pytest.approx(16.0 - computed_s(question, prefill))
    assert computed_s(question, prefill) < 8.0
    long = ask(300_000, 300)
    assert computed_s(long, prefill) > 8.0
    assert transfer_s(rule, long, prefill, pair.decode, transfers) == pytest.approx(300.0)


def test_a_pair_with_free_links_is_chosen_before_one_whose_links_are_in_use() -> None:
    four = pools([busy(0), busy(1)], [busy(2), busy(3)], alone=[])
    question, transfers = ask(8000, 300), measured_links(tp2=1e-4, tp3=1e-4)
    chosen = []
    for _ in range(2):
        pair = PRICED.choose_pair(four, question, transfers)
        assert pair is not None
        begin_transfer(transfers, PRICED.rule, pair, 8000, question.now)
        chosen.append((pair.prefill.candidate, pair.decode.candidate))
    (first_prefill, first_decode), (next_prefill, next_decode) = chosen
    assert next_prefill is not first_prefill
    assert next_decode is not first_decode
