"""Contract tests that every registered routing policy must pass, as the gateway uses them.

New policies are tested automatically.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from random import Random

import pytest

from policies import policy_registry
from policies.endpoint_load import LOAD_FIELDS, EndpointLoad
from policies.prefix.fingerprint import Fingerprinter
from policies.routing_algorithm import pick, rejecting_filter
from policies.routing_types import STANDARD, Candidate, Endpoint, Request, RoutingQuery, Slo
from tests.contract.policies.extremes import builds

LIVE = [name for name in LOAD_FIELDS if name not in ("slot", "belief", "changes", "timeline")]
PRINTS = Fingerprinter(b"sixteen bytes at least")
TEXT = Random(1).randbytes(20 * PRINTS.block_bytes)
pytestmark = pytest.mark.parametrize("name", policy_registry.names())


def live(slot: int, rng: Random) -> EndpointLoad:
    load = EndpointLoad(slot)
    load.in_flight = rng.randrange(31)
    load.decoding = rng.randint(0, load.in_flight)
    for field in (
        "prefill_tokens",
        "decode_tokens",
        "expected_tokens",
        "kv_reserved",
        "prefix_cache_tokens",
    ):
        setattr(load, field, rng.choice((0, rng.randrange(1000), rng.randrange(10**7))))
    load.is_available = rng.random() < 0.7
    load.running, load.waiting = (
        rng.choice((None, rng.randrange(300))),
        rng.choice((None, 0, rng.randrange(300))),
    )
    load.external_requests = rng.choice((0, rng.randrange(300)))
    load.kv_usage, load.scraped_at = (
        rng.choice((None, 0.0, rng.random(), 1.0)),
        rng.choice((None, 100 * rng.random())),
    )
    load.kv_tokens = rng.choice((None, 1.0, 1e7 * rng.random() + 1))
    if rng.random() < 0.5:
        load.prefill_done_at = 300 * rng.random()
        for field in (
            "prefill_s_per_token",
            "attention_s_per_pair",
            "fixed_ttft_s",
            "decode_s_per_token",
            "decode_s_per_sequence",
            "decode_s_per_context_token",
        ):
            setattr(load, field, rng.choice((0.0, 1e-6 * rng.random(), 10 * rng.random())))
    return load


def cases() -> Iterator[tuple[int, RoutingQuery, list[Candidate]]]:
    for number in range(150):
        rng = Random(number)
        slots = rng.sample(range(100), rng.choice((0, 1, 2, 3, 8)))
        fleet = [
            Candidate(Endpoint(f"tp{slot}", "http://127.0.0.1:9000", "p", "m"), live(slot, rng))
            for slot in slots
        ]
        prompt = rng.choice((0, 1, rng.randrange(10**4), rng.randrange(10**6)))
        slo = rng.choice(
            (STANDARD, Slo("interactive", 10 * rng.random() + 0.01, rng.random() + 0.001))
        )
        request = Request(
            f"{rng.random()}",
            "model",
            "tenant",
            prompt,
            rng.choice((0, rng.randrange(10**5))),
            slo=slo,
        )
        cached = [
            rng.choice((0, prompt, rng.randint(0, prompt))) for _ in range(rng.choice((0, 3, 100)))
        ]
        tried_names = frozenset(
            f"tp{slot}" for slot in rng.sample(slots, min(len(slots), rng.choice((0, 0, 1, 3))))
        )
        prints = (
            PRINTS.fingerprint(b"salt", TEXT[: rng.randrange(len(TEXT))])
            if rng.random() < 0.5
            else None
        )
        yield number, RoutingQuery(request, 100.0, rng, cached, tried_names, prints), fleet


def able(ask: RoutingQuery, candidates: Sequence[Candidate]) -> list[Candidate]:
    # Return the candidates that a policy may pick for this query.
    #
    # A retry may exceed an endpoint's concurrency limit if no other endpoint has capacity.
    untried = [
        candidate
        for candidate in candidates
        if candidate.load.is_available and candidate.endpoint.name not in ask.failed_endpoints
    ]
    below = [
        candidate
        for candidate in untried
        if candidate.load.in_flight < candidate.endpoint.max_concurrency
    ]
    return below or untried if ask.failed_endpoints else below


def snapshot(candidates: Sequence[Candidate]) -> list[list[object]]:
    return [[getattr(candidate.load, field, None) for field in LIVE] for candidate in candidates]


def test_a_pick_is_one_of_the_allowed_candidates(name: str) -> None:
    policy = policy_registry.build(name, {})
    for number, ask, candidates in cases():
        picked = pick(policy, ask, candidates)
        if picked is not None:
            assert any(picked.candidate is candidate for candidate in candidates), number
            assert picked.candidate in able(ask, candidates), number
            assert 1 <= picked.candidate_count <= len(candidates), number
            assert 0 <= picked.cached_tokens <= ask.request.prompt_tokens, number


def test_a_candidate_is_picked_whenever_one_is_allowed(name: str) -> None:
    policy = policy_registry.build(name, {})
    for number, ask, candidates in cases():
        assert (pick(policy, ask, candidates) is None) == (not able(ask, candidates)), number
        if not able(ask, candidates):
            assert rejecting_filter(policy, ask, candidates) in {
                "no_candidates",
                "available",
                "untried",
                "below_cap",
            }, number


def test_a_policy_changes_nothing_it_is_given(name: str) -> None:
    policy = policy_registry.build(name, {})
    for number, ask, candidates in cases():
        before, order, cached = snapshot(candidates), list(candidates), list(ask.cached_by_slot)
        pick(policy, ask, candidates)
        assert snapshot(candidates) == before, number
        assert all(now is then for now, then in zip(candidates, order, strict=True)), number
        assert list(ask.cached_by_slot) == cached, number


def test_the_same_seed_makes_the_same_choices(name: str) -> None:
    def choices() -> list[str | None]:
        policy, rng, names = policy_registry.build(name, {}), Random(7), []
        for _, ask, candidates in cases():
            question = RoutingQuery(
                ask.request, ask.now, rng, ask.cached_by_slot, ask.failed_endpoints, ask.fingerprint
            )
            picks = [pick(policy, question, candidates) for _ in range(3)]
            names += [picked and picked.candidate.endpoint.name for picked in picks]
        return names

    assert choices() == choices()


def test_scorers_rate_every_candidate_with_a_finite_number(name: str) -> None:
    policy = policy_registry.build(name, {})
    for number, ask, candidates in cases():
        if candidates:
            for part in policy.scorers:
                scores = part.scorer(ask, candidates)
                assert len(scores) == len(candidates), number
                assert all(abs(score) < inf for score in scores), number


def test_any_parameters_rate_all_candidates_and_pick_one(name: str) -> None:
    for policy in builds(policy_registry.build, name, policy_registry.params_type(name)):
        for number, ask, candidates in cases():
            for part in policy.scorers if candidates else ():
                assert all(abs(score) < inf for score in part.scorer(ask, candidates)), number
            assert (pick(policy, ask, candidates) is None) == (not able(ask, candidates)), number


def test_a_policy_accepts_an_empty_candidate_list(name: str) -> None:
    request = Request("id", "model", "tenant", 10, 10)
    assert pick(policy_registry.build(name, {}), RoutingQuery(request, 0.0, Random(1)), ()) is None


def test_equal_idle_endpoints_share_requests_evenly(name: str) -> None:
    policy, rng = policy_registry.build(name, {}), Random(3)
    candidates = [
        Candidate(Endpoint(f"tp{slot}", "u", "p", "m"), EndpointLoad(slot)) for slot in range(4)
    ]
    counts = [0] * 4
    for _ in range(2000):
        picked = pick(policy, RoutingQuery(Request("id", "m", "t", 100, 10), 0.0, rng), candidates)
        assert picked is not None
        counts[picked.candidate.load.slot] += 1
    assert max(counts) / min(counts) <= 1.3


def test_one_of_sixty_four_is_picked_with_any_knowledge(name: str) -> None:
    policy, rng = policy_registry.build(name, {}), Random(5)
    fleet = [
        Candidate(Endpoint(f"tp{slot}", "u", "p", "m"), EndpointLoad(slot)) for slot in range(64)
    ]
    request = Request("id", "m", "t", 8000, 300)
    blind = pick(policy, RoutingQuery(request, 0.0, rng), fleet)
    for candidate in fleet:
        load = candidate.load
        load.in_flight, load.prefill_tokens, load.kv_usage = (
            rng.randrange(20),
            rng.randrange(20_000),
            rng.random(),
        )
        load.running, load.waiting, load.scraped_at, load.kv_tokens = 20, 3, 0.5, 600_000.0
    cached = [rng.randrange(8000) for _ in fleet]
    seeing = pick(
        policy,
        RoutingQuery(request, 1.0, rng, cached, frozenset(), PRINTS.fingerprint(b"", TEXT)),
        fleet,
    )
    assert blind is not None
    assert blind.candidate in fleet
    assert seeing is not None
    assert seeing.candidate in fleet
    assert seeing.cached_tokens == cached[seeing.candidate.load.slot]


def test_only_policies_that_read_prefixes_depend_on_them(name: str) -> None:
    policy = policy_registry.build(name, {})
    fleet = [
        Candidate(Endpoint(f"tp{slot}", "u", "p", "m"), EndpointLoad(slot)) for slot in range(4)
    ]
    request = Request("id", "m", "t", 8000, 300)

    def choices(cached: Sequence[int]) -> list[int]:
        own = policy_registry.build(name, {})
        return [
            picks.candidate.load.slot
            for seed in range(20)
            if (
                picks := pick(
                    own,
                    RoutingQuery(
                        request,
                        0.0,
                        Random(seed),
                        cached,
                        frozenset(),
                        PRINTS.fingerprint(b"", TEXT),
                    ),
                    fleet,
                )
            )
        ]

    moved = any(
        choices([7900 * (slot == holder) for slot in range(4)]) != choices(())
        for holder in range(4)
    )
    assert moved == policy.reads_prefix
