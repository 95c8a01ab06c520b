"""Tests of serving a request by a smaller model, whose admission rule must accept it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gateway.admission.pool_queue import PoolQueue
from gateway.config import WaitingRoom
from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.forwarding import forward
from gateway.protocol.api_table import CHAT
from gateway.protocol.request.api_call import Call
from gateway.proxy.tier_fallback import pick_tier
from gateway.routes_and_snapshot import Route
from policies import policy_registry
from policies.admission.admission_policy import Verdict, WaitQueueView
from policies.admission.cap_admission import CapAdmission
from policies.routing_types import Candidate, RoutingQuery
from tests.replacement import stand_in
from tests.unit.policies.builders import ask, candidate


class RecordingCap(CapAdmission):
    __slots__ = ("asks",)

    def __init__(self) -> None:
        super().__init__()
        self.asks: list[RoutingQuery] = []

    def decide(
        self, ask: RoutingQuery, candidates: Sequence[Candidate], room: WaitQueueView
    ) -> Verdict:
        self.asks.append(ask)
        return super().decide(ask, candidates, room)


def route(name: str, judge: CapAdmission, **fields: Any) -> Route:
    room, candidates = PoolQueue(name), (candidate(0, 1),)
    room.set_admission(judge, {})
    room.configure(WaitingRoom(), candidates)
    policy = policy_registry.build("round_robin", {})
    return Route(name, name, None, policy, candidates, room, forward.prepare, **fields)


def test_a_smaller_model_is_asked_for_less_worth_and_without_a_client_that_returns() -> None:
    recording, question = RecordingCap(), ask()
    small = route("small", recording)
    big = route("big", CapAdmission(), overflow=(("small", 0.4),))
    endpoints = stand_in(EndpointTable, SimpleNamespace(build_query=lambda *_: question))
    call = cast(Call, SimpleNamespace(request=question.request, api=CHAT))
    assert pick_tier(endpoints, {"small": small, "big": big}, big, call) is small
    # The only place of the smaller model is taken.
    assert pick_tier(endpoints, {"small": small, "big": big}, big, call) is None
    slo = replace(question.request.slo, weight=0.6)
    expected = replace(question, request=replace(question.request, slo=slo), can_return=False)
    assert [recording.asks[0], recording.asks[1]] == [expected, expected]
    assert question.can_return


@pytest.mark.parametrize(
    ("prompt_tokens", "is_estimated", "members", "fits"),
    [
        pytest.param(900, False, {"max_tokens"}, True, id="exact, at the limit"),
        pytest.param(901, False, {"max_tokens"}, False, id="exact, one above"),
        pytest.param(1035, True, {"max_tokens"}, True, id="estimated prompt, 15 % above"),
        pytest.param(1036, True, {"max_tokens"}, False, id="estimated prompt, more than 15 %"),
        pytest.param(913, False, set(), True, id="exact prompt, expected answer"),
        pytest.param(914, False, set(), False, id="exact prompt, expected answer, above"),
        pytest.param(1050, True, set(), True, id="both estimated, 15 % above"),
        pytest.param(1051, True, set(), False, id="both estimated, more than 15 %"),
    ],
)
def test_estimates_within_15_percent_of_a_context_leave_the_decision_to_the_engine(
    prompt_tokens: int, is_estimated: bool, members: set[str], fits: bool
) -> None:
    question = ask()
    request = replace(question.request, prompt_tokens=prompt_tokens, output_tokens=100)
    question = replace(question, request=request)
    small = replace(route("small", CapAdmission()), context_tokens=1000)
    big = route("big", CapAdmission(), overflow=(("small", 0.4),))
    endpoints = stand_in(EndpointTable, SimpleNamespace(build_query=lambda *_: question))
    estimated = prompt_tokens if is_estimated else 0
    call = SimpleNamespace(
        request=request, api=CHAT, members=dict.fromkeys(members), estimated_tokens=estimated
    )
    picked = pick_tier(endpoints, {"small": small, "big": big}, big, cast(Call, call))
    assert (picked is small) == fits
