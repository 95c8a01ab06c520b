"""Tests that load forecasts do not affect policies which declare that they do not read them."""

from __future__ import annotations

from random import Random

import pytest

from policies import admission_registry, load_ledger, policy_registry
from policies.routing_algorithm import pick
from policies.routing_types import Candidate, RoutingQuery
from tests.contract.policies.test_every_admission import view
from tests.contract.policies.test_every_policy import cases

OUTLOOK = (
    *(
        "decode_s_per_context_token",
        "next_first_token_at",
        "fixed_ttft_s",
        "free_kv_tokens",
        "s_per_freed_kv_token",
        "attention_s_per_pair",
        "prefill_done_at",
        "decode_s_per_sequence",
        "decode_s_per_token",
        "prefill_s_per_token",
    ),
)
READERS = {"priced", "dualmap", "llmd_predictor", "llmd_token", "llumnix", "mooncake", "preble"}


def randomize_forecasts(candidates: list[Candidate], seed: int) -> None:
    rng = Random(seed)
    for candidate in candidates:
        load_ledger.set_modelled(candidate.load, False, 1.0)
        for name in OUTLOOK:
            setattr(candidate.load, name, 1000 * rng.random())


@pytest.mark.parametrize("name", policy_registry.names())
def test_a_policy_that_reads_no_beliefs_picks_the_same_whatever_they_are(name: str) -> None:
    policy = policy_registry.build(name, {})
    assert policy.reads_forecast == (name in READERS)
    if policy.reads_forecast:
        return
    results = []
    for seed in (1, 2):
        policy = policy_registry.build(name, {})
        for _, ask, candidates in cases():
            randomize_forecasts(candidates, seed)
            chosen = pick(policy, ask, candidates)
            results.append(
                None if chosen is None else (chosen.candidate.load.slot, list(chosen.scores))
            )
    assert results[: len(results) // 2] == results[len(results) // 2 :]


@pytest.mark.parametrize("name", admission_registry.names())
def test_an_admission_that_reads_no_beliefs_judges_the_same_whatever_they_are(name: str) -> None:
    admission = admission_registry.build_admission(name, {})
    assert admission.reads_forecast == (name in {"priced", "early_rejection"})
    if admission.reads_forecast:
        return
    results = []
    for seed in (1, 2):
        admission = admission_registry.build_admission(name, {})
        for number, ask, candidates in cases():
            randomize_forecasts(candidates, seed)
            question = RoutingQuery(
                ask.request,
                ask.now,
                Random(number),
                ask.cached_by_slot,
                ask.failed_endpoints,
                ask.fingerprint,
            )
            results.append(admission.decide(question, candidates, view(Random(number), candidates)))
    assert results[: len(results) // 2] == results[len(results) // 2 :]


def test_token_routing_with_a_given_rate_needs_no_belief_of_it() -> None:
    assert not policy_registry.build("llmd_token", {"peak_tokens_per_s": 10_000.0}).reads_forecast
