"""Tests of the routing rule consistent_hash: few sessions move when endpoints change."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from policies import policy_registry
from policies.policy_types import Policy
from policies.routing_algorithm import pick
from policies.routing_types import Candidate, Request, RoutingQuery
from tests.unit.policies.builders import candidate

SESSIONS = [f"session-{number}" for number in range(2000)]


def endpoint_of(
    policy: Policy, session: str, fleet: list[Candidate], seed: int = 1, tried: tuple[str, ...] = ()
) -> str:
    request = Request("id", "model", "tenant", 1000, 100, session=session)
    query = RoutingQuery(request, 100.0, Random(seed), failed_endpoints=frozenset(tried))
    picked = pick(policy, query, fleet)
    assert picked is not None
    return picked.candidate.endpoint.name


def build(**params: object) -> Policy:
    return policy_registry.build("consistent_hash", params)


def test_a_session_keeps_its_endpoint_whatever_the_loads() -> None:
    policy = build()
    for session in SESSIONS[:50]:
        homes = {
            endpoint_of(
                policy, session, [candidate(slot, in_flight=(slot * seed) % 9) for slot in range(6)]
            )
            for seed in range(5)
        }
        assert len(homes) == 1


def test_every_gateway_sends_a_session_to_the_same_endpoint() -> None:
    fleet = [candidate(slot) for slot in range(6)]
    for session in SESSIONS[:50]:
        assert endpoint_of(build(), session, fleet, 1) == endpoint_of(
            build(), session, list(reversed(fleet)), 2
        )


def test_sessions_spread_evenly() -> None:
    policy, fleet = build(), [candidate(slot) for slot in range(8)]
    counts = Counter(endpoint_of(policy, session, fleet) for session in SESSIONS)
    assert len(counts) == 8
    assert max(counts.values()) < 1.35 * min(counts.values())


def test_only_the_sessions_of_an_endpoint_that_leaves_move() -> None:
    policy, fleet = build(), [candidate(slot) for slot in range(8)]
    for session in SESSIONS[:400]:
        home = endpoint_of(policy, session, fleet)
        after = endpoint_of(policy, session, fleet[:-1])
        assert after == home or home == "tp7"


def test_a_full_or_failed_endpoint_is_passed_over_for_always_the_same_other() -> None:
    policy = build()
    for session in SESSIONS[:50]:
        fleet = [candidate(slot, cap=4) for slot in range(5)]
        home = endpoint_of(policy, session, fleet)
        full = [candidate(slot, cap=4, in_flight=4 * (f"tp{slot}" == home)) for slot in range(5)]
        other = endpoint_of(policy, session, full)
        assert other != home
        assert other == endpoint_of(policy, session, fleet, tried=(home,))


def test_requests_without_a_session_go_to_all_endpoints() -> None:
    policy, fleet = build(), [candidate(slot) for slot in range(4)]
    assert {endpoint_of(policy, "", fleet, seed) for seed in range(60)} == {
        "tp0",
        "tp1",
        "tp2",
        "tp3",
    }


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_a_load_factor_bounds_every_endpoint(factor: float) -> None:
    policy, fleet, rng = (
        build(load_factor=factor),
        [candidate(slot) for slot in range(5)],
        Random(4),
    )
    by_name = {item.endpoint.name: item.load for item in fleet}
    for number in range(1, 301):
        # Half of the requests belong to one session, which would fill one endpoint alone.
        session = "hot" if rng.random() < 0.5 else rng.choice(SESSIONS)
        by_name[endpoint_of(policy, session, fleet)].in_flight += 1
        assert max(load.in_flight for load in by_name.values()) <= factor * number / 5 + 1
