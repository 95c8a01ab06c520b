"""What the line may rely on from any registered policy. A new name in the registry is tested here by being there."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import registry
from policies.model import Ask, Candidate, Endpoint, EndpointLoad, Request
from policies.run import pick, refusal

LIVE = [name for name in EndpointLoad.__slots__ if name != "slot"]
pytestmark = pytest.mark.parametrize("name", registry.names())


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[Candidate]:
    slots = draw(st.lists(st.integers(0, 100), unique=True, max_size=8))
    found = []
    for slot in slots:
        load = EndpointLoad(slot)
        load.in_flight = draw(st.integers(0, 30))
        load.prefill_tokens, load.decode_tokens, load.expected_tokens = draw(st.tuples(*[st.integers(0, 10**7)] * 3))
        load.available = draw(st.booleans())
        load.running, load.waiting = draw(st.tuples(*[st.none() | st.integers(0, 300)] * 2))
        load.strangers = draw(st.integers(0, 300))
        load.kv_usage, load.scraped_at = draw(st.none() | st.floats(0, 1)), draw(st.none() | st.floats(0, 100))
        found.append(Candidate(Endpoint(f"tp{slot}", "http://127.0.0.1:9000", "pool", "model"), load))
    return found


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    request = Request("id", "model", "tenant", draw(st.integers(0, 10**6)), draw(st.integers(0, 10**5)))
    cached = draw(st.lists(st.integers(0, request.prompt_tokens), max_size=12))
    tried = draw(st.frozensets(st.integers(0, 100).map("tp{}".format), max_size=3))
    return Ask(request, 100.0, Random(draw(st.integers())), cached, tried)


def able(ask: Ask, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Who may be picked; a retry goes over a cap where nobody else has room."""
    asked = [each for each in candidates if each.load.available and each.endpoint.name not in ask.tried]
    below = [each for each in asked if each.load.in_flight < each.endpoint.max_concurrency]
    return below or asked if ask.tried else below


def snapshot(candidates: Sequence[Candidate]) -> list[list[object]]:
    return [[getattr(candidate.load, field) for field in LIVE] for candidate in candidates]


@given(asks(), candidate_lists())
def test_a_pick_is_one_of_those_given_that_may_be_picked(name: str, ask: Ask, candidates: list[Candidate]) -> None:
    found = pick(registry.build(name, {}), ask, candidates)
    if found is not None:
        chosen = found.candidate
        assert any(chosen is candidate for candidate in candidates)
        assert chosen.load.available
        assert chosen.endpoint.name not in ask.tried
        assert chosen in able(ask, candidates)
        assert 1 <= found.considered <= len(candidates)
        assert 0 <= found.cached_tokens <= ask.request.prompt_tokens


@given(asks(), candidate_lists())
def test_somebody_is_picked_whenever_somebody_may_be(name: str, ask: Ask, candidates: list[Candidate]) -> None:
    policy = registry.build(name, {})
    assert (pick(policy, ask, candidates) is None) == (not able(ask, candidates))
    if not able(ask, candidates):
        assert refusal(policy, ask, candidates) in {"no_candidates", "available", "untried", "below_cap"}


@given(asks(), candidate_lists())
def test_a_policy_changes_nothing_it_is_given(name: str, ask: Ask, candidates: list[Candidate]) -> None:
    before, order, cached = snapshot(candidates), list(candidates), list(ask.cached)
    pick(registry.build(name, {}), ask, candidates)
    assert snapshot(candidates) == before
    assert all(now is then for now, then in zip(candidates, order, strict=True))
    assert list(ask.cached) == cached


@given(asks(), candidate_lists(), st.integers())
def test_the_same_seed_makes_the_same_choices(name: str, ask: Ask, candidates: list[Candidate], seed: int) -> None:
    def choices() -> list[str | None]:
        policy, rng = registry.build(name, {}), Random(seed)
        question = Ask(ask.request, ask.now, rng, ask.cached, ask.tried)
        found = [pick(policy, question, candidates) for _ in range(6)]
        return [one and one.candidate.endpoint.name for one in found]

    assert choices() == choices()


@given(asks(), candidate_lists())
def test_scorers_rate_every_candidate_with_a_finite_number(name: str, ask: Ask, candidates: list[Candidate]) -> None:
    for part in registry.build(name, {}).scorers:
        if candidates:
            scores = part.scorer(ask, candidates)
            assert len(scores) == len(candidates)
            assert all(abs(score) < float("inf") for score in scores)


def test_a_policy_is_total_on_nobody(name: str) -> None:
    request = Request("id", "model", "tenant", 10, 10)
    assert pick(registry.build(name, {}), Ask(request, 0.0, Random(1)), ()) is None


def test_equal_idle_endpoints_share_requests_evenly(name: str) -> None:
    policy, rng = registry.build(name, {}), Random(3)
    candidates = [Candidate(Endpoint(f"tp{slot}", "u", "p", "m"), EndpointLoad(slot)) for slot in range(4)]
    counts = [0] * 4
    for _ in range(2000):
        found = pick(policy, Ask(Request("id", "m", "t", 100, 10), 0.0, rng), candidates)
        assert found is not None
        counts[found.candidate.load.slot] += 1
    assert max(counts) / min(counts) <= 1.3
