"""Tests of the loop over attempts to serve a request, with scripted endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.protocol import api_table
from gateway.protocol.errors import GatewayError
from gateway.protocol.response.relay import UpstreamError
from gateway.protocol.upstream_error import MODEL_GONE
from gateway.proxy.attempt_loop import attempts
from gateway.proxy.retry_permission import permit_retry
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway
from policies.pricing.split_decision import EndpointPair
from policies.routing_types import Pick
from tests.replacement import stand_in
from tests.unit.policies.builders import candidate

NAMES = ("tp0", "tp1", "tp2")
PICKS = {name: Pick(candidate(slot), 0, 0.0, 1, "test") for slot, name in enumerate(NAMES)}


class Endpoints:
    def __init__(self, **answers: bool | None) -> None:
        self.answers = answers
        self.checked: list[str] = []

    def all(self) -> list[Any]:
        return [SimpleNamespace(endpoint=pick.candidate.endpoint) for pick in PICKS.values()]

    async def check_health(self, candidate: Any) -> bool | None:
        self.checked.append(candidate.endpoint.name)
        return self.answers.get(candidate.endpoint.name, True)


class Plan:
    """A fake attempt plan, which chooses the first endpoint that is left.

    The first attempts fail with the listed errors, and all later ones succeed.
    """

    def __init__(self, endpoints: Endpoints, *failures: UpstreamError) -> None:
        self.exchange = Exchange("req_1", api_table.CHAT, "10.0.0.1", 0.0)
        self.gateway = stand_in(Gateway, SimpleNamespace(endpoints=endpoints))
        self.failures = list(failures)
        self.attempted: list[str] = []
        self.unavailable: set[str] = set()
        self.may = True
        self.given_up: list[UpstreamError | None] = []

    def choose(self, left_out: Sequence[str]) -> Pick | None:
        left = [name for name in NAMES if name not in {*left_out, *self.unavailable}]
        return PICKS[left[0]] if left else None

    async def attempt(self, choice: Pick) -> UpstreamError | None:
        self.attempted.append(choice.candidate.endpoint.name)
        return self.failures.pop(0) if self.failures else None

    async def may_retry(self, problem: UpstreamError) -> bool:
        self.exchange.retries.append(self.attempted[-1])
        self.exchange.unsent_attempts += not problem.was_sent
        return self.may

    def give_up(self, problem: UpstreamError | None) -> None:
        self.given_up.append(problem)


def reset() -> UpstreamError:
    return UpstreamError("reset", "as asked")


def refused() -> UpstreamError:
    return UpstreamError("connect_failed", "as asked", was_sent=False)


async def test_an_answer_ends_the_loop_and_no_endpoint_is_checked_before_a_first_attempt() -> None:
    endpoints = Endpoints()
    plan = Plan(endpoints)
    assert await attempts(plan) is None
    assert (plan.attempted, endpoints.checked) == (["tp0"], [])


async def test_a_retry_goes_to_another_endpoint_that_answers_its_health_check() -> None:
    endpoints = Endpoints()
    plan = Plan(endpoints, reset())
    assert await attempts(plan) is None
    assert (plan.attempted, endpoints.checked) == (["tp0", "tp1"], ["tp1"])


async def test_a_refused_connection_is_no_reason_for_a_health_check() -> None:
    endpoints = Endpoints(tp1=False)
    plan = Plan(endpoints, refused())
    assert await attempts(plan) is None
    assert (plan.attempted, endpoints.checked) == (["tp0", "tp1"], [])


async def test_an_endpoint_that_fails_its_check_is_recorded_and_costs_no_attempt() -> None:
    plan = Plan(Endpoints(tp1=False), reset())
    assert await attempts(plan) is None
    assert plan.attempted == ["tp0", "tp2"]
    assert (plan.exchange.retries, plan.exchange.failed_attempts) == (["tp0", "tp1"], 1)


async def test_a_silent_endpoint_is_attempted_only_if_there_is_no_other() -> None:
    plan = Plan(Endpoints(tp1=None), reset())
    assert await attempts(plan) is None
    assert plan.attempted == ["tp0", "tp2"]
    plan = Plan(Endpoints(tp1=None, tp2=False), reset())
    assert await attempts(plan) is None
    assert plan.attempted == ["tp0", "tp1"]


async def test_an_endpoint_that_is_taken_out_during_its_check_is_not_attempted() -> None:
    endpoints = Endpoints()
    plan = Plan(endpoints, reset())
    check = endpoints.check_health

    async def taken_out(candidate: Any) -> bool | None:
        plan.unavailable.add("tp1")
        return await check(candidate)

    cast(Any, endpoints).check_health = taken_out
    assert await attempts(plan) is None
    assert plan.attempted == ["tp0", "tp2"]


async def test_both_endpoints_of_a_pair_are_checked() -> None:
    class Pairs(Plan):
        def choose(self, left_out: Sequence[str]) -> Any:
            first = super().choose(left_out)
            if first is None or self.exchange.retries == [] or {"tp1", "tp2"} & set(left_out):
                return first
            return EndpointPair(PICKS["tp1"], PICKS["tp2"])

        async def attempt(self, choice: Any) -> UpstreamError | None:
            decode = choice.decode if isinstance(choice, EndpointPair) else choice
            return await super().attempt(decode)

    endpoints = Endpoints()
    plan = Pairs(endpoints, reset())
    assert await attempts(plan) is None
    assert (plan.attempted, endpoints.checked) == (["tp0", "tp2"], ["tp1", "tp2"])


async def test_the_plan_is_given_up_with_the_last_failure_when_nothing_can_be_picked() -> None:
    failures = [reset(), reset(), reset()]
    plan = Plan(Endpoints(), *failures)
    assert await attempts(plan) is failures[-1]
    assert (plan.attempted, plan.given_up) == (list(NAMES), [failures[-1]])


async def test_without_permission_for_a_retry_the_failure_is_returned() -> None:
    failure = reset()
    plan = Plan(Endpoints(), failure)
    plan.may = False
    assert await attempts(plan) is failure
    assert plan.attempted == ["tp0"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("reset", "No engine could respond (reset); attempts: 2."),
        (MODEL_GONE, "No engine serves the model '' any more: 2 answered that it does not exist."),
    ],
)
async def test_the_error_counts_the_attempts_that_reached_an_engine(
    kind: str, message: str
) -> None:
    # Two of the five refused the connection, and one failed its health check.
    exchange = Exchange("req_1", api_table.CHAT, "10.0.0.1", 0.0)
    exchange.retries, exchange.unsent_attempts = ["tp0", "tp1", "tp2", "tp3", "tp4"], 3
    config = SimpleNamespace(retries=SimpleNamespace(attempts=2))
    gateway = stand_in(
        Gateway,
        SimpleNamespace(
            snapshot=SimpleNamespace(config=config), count_unsent=lambda exchange, problem: False
        ),
    )
    with pytest.raises(GatewayError) as raised:
        await permit_retry(gateway, exchange, UpstreamError(kind, "as asked"))
    assert str(raised.value) == message


async def test_endpoints_that_failed_the_request_before_are_left_out() -> None:
    endpoints = Endpoints()
    plan = Plan(endpoints)
    plan.exchange.retries.append("tp0")
    assert await attempts(plan, plan.exchange.retries) is None
    assert (plan.attempted, endpoints.checked) == (["tp1"], ["tp1"])


@pytest.mark.parametrize("served", [True, False])
async def test_a_second_attempt_that_runs_decides_what_follows_the_first(served: bool) -> None:
    class Race:
        is_over, loser = False, ""

        def close(self) -> None: ...

        async def finish(self, problem: UpstreamError) -> UpstreamError | None:
            return None if served else UpstreamError("reset", "the second one")

    plan = Plan(Endpoints(), reset())
    plan.exchange.hedge = Race()
    plan.may = False
    result = await attempts(plan)
    assert result is None if served else str(result) == "the second one"
