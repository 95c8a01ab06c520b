"""Tests of the plan for a request that is not split, with a fake gateway."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from gateway.http.client_interface import Client
from gateway.protocol import api_table
from gateway.protocol.request.api_call import Call
from gateway.proxy.whole_request import UncountedPlan
from gateway.request_record import Exchange
from gateway.routes_and_snapshot import Gateway, Route
from policies import policy_registry
from tests.replacement import stand_in
from tests.unit.policies.builders import ask, candidate


def test_policies_know_of_a_request_for_which_nothing_is_computed() -> None:
    question = ask()
    endpoints = SimpleNamespace(build_query=lambda *_: question)
    gateway = stand_in(Gateway, SimpleNamespace(endpoints=endpoints))
    policy = policy_registry.build("round_robin", {})
    route = stand_in(Route, SimpleNamespace(policy=policy, candidates=(candidate(0),)))
    exchange = Exchange("req_1", api_table.CHAT, "10.0.0.1", 0.0)
    call = cast(Call, SimpleNamespace(request=question.request))
    plan = UncountedPlan(gateway, exchange, cast(Client, None), route, call)
    assert plan.choose(()) is not None
    assert question.computes_tokens
    assert not plan.query.computes_tokens
