"""Overflow into a smaller model: the question that its room is asked."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from gateway.admission.controller import Room
from gateway.config import WaitingRoom
from gateway.fleet.endpoint_table import EndpointTable
from gateway.legs import forward
from gateway.protocol.openai import Call
from gateway.proxy.tier_fallback import into
from gateway.route import Route
from policies import registry
from policies.admission.admission import Cap, RoomView, Verdict
from policies.model import Ask, Candidate
from tests.replaced import stand_in
from tests.unit.policies.builders import ask, candidate


class RecordingCap(Cap):
    """A cap that records what it was asked."""

    __slots__ = ("asks",)

    def __init__(self) -> None:
        super().__init__()
        self.asks: list[Ask] = []

    def judge(self, ask: Ask, candidates: Sequence[Candidate], room: RoomView) -> Verdict:
        self.asks.append(ask)
        return super().judge(ask, candidates, room)


def route(name: str, judge: Cap, **fields: Any) -> Route:
    room, candidates = Room(name), (candidate(0, 1),)
    room.govern(judge, {})
    room.configure(WaitingRoom(), candidates)
    policy = registry.build("round_robin", {})
    return Route(name, name, None, policy, candidates, room, forward.prepare, **fields)


def test_a_smaller_model_is_asked_for_less_worth_and_without_a_client_that_returns() -> None:
    recording, question = RecordingCap(), ask()
    small = route("small", recording)
    big = route("big", Cap(), overflow=(("small", 0.4),))
    endpoints = stand_in(EndpointTable, SimpleNamespace(ask=lambda *_: question))
    call = cast(Call, SimpleNamespace(request=question.request))
    assert into(endpoints, {"small": small, "big": big}, big, call) is small
    assert into(endpoints, {"small": small, "big": big}, big, call) is None  # its one place is taken
    slo = replace(question.request.slo, weight=0.6)
    expected = replace(question, request=replace(question.request, slo=slo), returns=False)
    assert [recording.asks[0], recording.asks[1]] == [expected, expected]
    assert question.returns
