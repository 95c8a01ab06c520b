"""Tests of serving a request by a smaller model instead of refusing it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from policies.builtin_policies import DEFAULT_FILTERS
from policies.filters import applicable, fits_context, serves_tenant
from policies.pricing.model_tiers import ModelTier, alternatives
from policies.routing_types import Candidate, Slo
from tests.unit.policies.builders import ask, candidate


def sized(slot: int, context_tokens: int | None, **load: object) -> Candidate:
    result = candidate(slot, **load)
    return replace(result, endpoint=replace(result.endpoint, context_tokens=context_tokens))


def test_endpoints_for_short_contexts_are_kept_from_long_prompts() -> None:
    short, long, any_ = sized(0, 8192), sized(1, 32768), sized(2, None)
    assert list(fits_context(ask(8000, 192), [short, long, any_])) == [short, long, any_]
    assert list(fits_context(ask(8000, 193), [short, long, any_])) == [long, any_]
    assert list(fits_context(ask(40000, 100), [short, long, any_])) == [any_]


def test_contexts_are_looked_at_only_where_some_endpoint_has_a_limit() -> None:
    always = tuple(keep for keep in DEFAULT_FILTERS if keep not in (fits_context, serves_tenant))
    assert applicable(DEFAULT_FILTERS, [sized(0, None)]) == always
    limited = tuple(keep for keep in DEFAULT_FILTERS if keep is not serves_tenant)
    assert applicable(DEFAULT_FILTERS, [sized(0, None), sized(1, 8192)]) == limited


def test_the_cheapest_tier_comes_first() -> None:
    question = ask(1000, 100, now=100.0)
    near = ModelTier("13b", (candidate(0),), 0.3)
    small = ModelTier("8b", (candidate(1),), 0.5)
    result = alternatives(question, [small, near])
    assert [tier.name for tier, _ in result] == ["13b", "8b"]
    assert result[0][1] == pytest.approx(0.3, abs=0.05)


def test_a_busy_tier_costs_more_and_a_late_tier_is_left_out() -> None:
    question = ask(1000, 100, now=100.0)
    question = replace(
        question, request=replace(question.request, arrived_s=98.0, slo=Slo(ttft_s=5.0))
    )
    busy = ModelTier("busy", (candidate(0, prefill_done_at=102.0),), 0.1)
    idle = ModelTier("idle", (candidate(1),), 0.3)
    late = ModelTier("late", (candidate(2, prefill_done_at=103.5),), 0.0)
    assert [tier.name for tier, _ in alternatives(question, [busy, idle, late])] == ["idle", "busy"]


def test_a_tier_without_endpoints_or_context_is_left_out() -> None:
    down = ModelTier("down", (candidate(0, is_available=False),))
    small = ModelTier("small", (sized(1, 512),))
    assert alternatives(ask(1000, 100), [down, small]) == []


def test_a_budget_that_is_used_up_leaves_no_tier() -> None:
    question = ask(now=105.0)
    question = replace(
        question, request=replace(question.request, arrived_s=100.0, slo=Slo(ttft_s=5.0))
    )
    free = candidate(
        0, prefill_done_at=0.0, fixed_ttft_s=0.0, prefill_s_per_token=0.0, attention_s_per_pair=0.0
    )
    assert alternatives(question, [ModelTier("free", (free,))]) == []
