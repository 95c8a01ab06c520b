"""Contract tests that every registered admission rule must pass, as the wait queue uses them.

New admission rules are tested automatically.
"""

from __future__ import annotations

from random import Random

import pytest

from policies import admission_registry
from policies.admission.admission_policy import (
    Admission,
    Admit,
    RequestOutcome,
    Shed,
    Wait,
)
from policies.admission.drain_rate import DrainRate
from policies.admission.gateway_share import total_capacity
from policies.routing_types import Candidate, Pick, Request, RoutingQuery, Slo
from tests.contract.policies.extremes import builds
from tests.contract.policies.test_every_policy import cases, snapshot
from tests.unit.policies.builders import View

pytestmark = pytest.mark.parametrize("name", admission_registry.names())


def view(rng: Random, candidates: list[Candidate]) -> View:
    busy, waiting = (rng.choice((0, rng.randint(0, 300))) for _ in range(2))
    waiting_s, is_new_arrival = waiting * rng.random(), rng.random() < 0.7
    drain = DrainRate()
    for number in range(rng.choice((0, 5))):
        drain.record(90.0 + number)
    return View(busy, total_capacity(candidates), waiting, drain, waiting_s, is_new_arrival)


def verdicts(admission: Admission, seed: int) -> list[tuple[int, object]]:
    collected = list[tuple[int, object]]()
    for number, ask, candidates in cases():
        rng = Random(f"{number} {seed}")
        now = 100.0 + number / 7
        fields = (
            rng.choice(("", "s1", "s2")),
            rng.choice((0, 0, -1, 2)),
            rng.choice((None, now + 5 * rng.random())),
        )
        request = Request(
            *(
                ask.request.id,
                "model",
                rng.choice(("one", "other")),
                ask.request.prompt_tokens,
                ask.request.output_tokens,
            ),
            slo=Slo("any", 5.0 * rng.random() + 0.01, 0.1),
            arrived_s=now,
            session=fields[0],
            priority=fields[1],
            deadline_s=fields[2],
        )
        question = RoutingQuery(
            request, now, rng, ask.cached_by_slot, ask.failed_endpoints, ask.fingerprint
        )
        before = snapshot(candidates)
        verdict = admission.decide(question, candidates, view(rng, candidates))
        collected.append((number, verdict))
        if isinstance(verdict, Admit):
            admission.on_reserved(question, Pick(candidates[0], 0, 0.0, len(candidates), "test"))
            if rng.random() < 0.8:
                ended = rng.choice(("served", "dropped", "ignored"))
                admission.on_ended(
                    request,
                    RequestOutcome(
                        now + rng.random(), output_tokens=rng.randrange(500), status=ended
                    ),
                )
        admission.tick(now, candidates)
        assert snapshot(candidates) == before, number
    return collected


def check(number: int, verdict: object) -> None:
    # Assert that a verdict is well formed.
    if isinstance(verdict, Shed):
        assert verdict.reason, number
        assert verdict.detail.endswith("."), number
        assert verdict.retry_after_s is None or 0.0 <= verdict.retry_after_s < float("inf"), number
    else:
        assert isinstance(verdict, Admit | Wait), number
        assert not isinstance(verdict, Wait) or verdict.timeout_s > 0.0, number


def test_every_verdict_is_well_formed(name: str) -> None:
    for number, verdict in verdicts(admission_registry.build_admission(name, {}), 1):
        check(number, verdict)


def test_verdicts_are_well_formed_with_extreme_parameters(name: str) -> None:
    for admission in builds(
        admission_registry.build_admission, name, admission_registry.params_type(name)
    ):
        for number, verdict in verdicts(admission, 3):
            check(number, verdict)


def test_nothing_is_admitted_without_an_available_endpoint(name: str) -> None:
    admission = admission_registry.build_admission(name, {})
    for number, ask, candidates in cases():
        room = view(ask.rng, candidates)
        if not room.capacity:
            room.is_new_arrival = True
            assert isinstance(admission.decide(ask, candidates, room), Shed), number


def test_the_same_seed_gives_the_same_verdicts(name: str) -> None:
    first, second = (admission_registry.build_admission(name, {}) for _ in range(2))
    assert verdicts(first, 2) == verdicts(second, 2)


def test_two_builds_share_no_memory(name: str) -> None:
    assert admission_registry.build_admission(name, {}) is not admission_registry.build_admission(
        name, {}
    )
    assert admission_registry.build_admission(name, {}).name == name
