"""Tests of a canary: a routing policy on trial that serves a share of the requests.

A session stays with its policy, and the requests of both policies are counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.policy_sections import Canary
from gateway.metrics.catalogue import Metrics
from gateway.protocol import api_table
from gateway.request_record import Exchange
from gateway.trials.canary import CanaryArms, CanarySampler, create_sampler
from policies.routing_types import Request
from tests.unit.gateway.reload.running import running
from tests.virtual_time import VIRTUAL_TIME

PLAIN = "    policy: prefix_aware\n"


def canary(**given: object) -> CanarySampler:
    return create_sampler("chat", Canary.model_validate({"policy": "round_robin", **given}))


def request(number: int, session: str = "", tenant: str = "") -> Request:
    return Request(f"req_{number}", "demo", tenant, 10, 10, session=session)


@given(st.text(min_size=1, max_size=20), st.floats(0.1, 99.9))
def test_all_requests_of_a_session_are_in_one_arm(session: str, percent: float) -> None:
    part = canary(percent=percent)
    assert len({part.selects(request(number, session)) for number in range(5)}) == 1


@pytest.mark.parametrize("percent", [1, 5, 50, 95])
def test_the_configured_percentage_of_sessions_is_selected(percent: float) -> None:
    part = canary(percent=percent)
    share = sum(part.selects(request(0, f"session {number}")) for number in range(20_000)) / 20_000
    assert share == pytest.approx(percent / 100, abs=0.012)


def test_a_request_without_a_session_is_sampled_by_its_id() -> None:
    part = canary(percent=20)
    assert sum(part.selects(request(number)) for number in range(10_000)) == pytest.approx(
        2000, abs=150
    )


def test_a_larger_percentage_keeps_the_selected_sessions() -> None:
    few, more = canary(percent=5), canary(percent=25)
    sessions = [request(0, f"session {number}") for number in range(5000)]
    assert all(more.selects(session) for session in sessions if few.selects(session))


def test_a_session_id_that_is_not_utf_8_is_sampled_too() -> None:
    part = canary(percent=50)
    sessions = [bytes([255, number]).decode("utf-8", "surrogateescape") for number in range(200)]
    assert {part.selects(request(0, item)) for item in [*sessions, "\ud800"]} == {True, False}


def test_exactly_the_named_tenants_are_selected() -> None:
    part = canary(tenants=["a", "b"])
    assert [part.selects(request(1, tenant=name)) for name in ("a", "b", "c", "")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_request_that_outlives_its_canary_is_not_counted() -> None:
    metrics = Metrics()
    old, new = (
        CanaryArms("chat", Canary.model_validate({"policy": "round_robin", "percent": 50}), "it")
        for _ in range(2)
    )
    x = Exchange("req_1", api_table.CHAT, "127.0.0.1", 0.0)
    x.slo_outcome, x.ttft_s = "met", 0.1
    old.count_in(metrics)
    old.canary.count(x)
    old.remove_series(metrics)
    new.count_in(metrics)
    old.canary.count(x)
    assert not list(metrics.trial_metrics.requests.children())
    new.canary.count(x)
    assert [values for values, _ in metrics.trial_metrics.requests.children()] == [
        ("chat", "canary", "met")
    ]


@VIRTUAL_TIME
async def test_a_canary_serves_its_sessions_is_compared_and_promoted_by_a_reload(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, speed=100.0) as harness:
        canaried = harness.text().replace(
            PLAIN, PLAIN + "    canary: {policy: round_robin, percent: 50}\n"
        )
        assert (await harness.put(canaried))[0] == 200
        before = harness.app.gateway.snapshot.trials["chat"]
        for number in range(24):
            assert await harness.ask(f"prompt {number}") == "ok"
        _, _, results = await harness.asked("GET", "/canary")
        [pool] = results["canaries"]
        assert (pool["pool"], pool["share"]) == ("chat", "50 %")
        primary, other = pool["arms"]
        assert [(arm["arm"], arm["policy"]) for arm in pool["arms"]] == [
            ("primary", "prefix_aware"),
            ("canary", "round_robin"),
        ]
        assert primary["requests"] + other["requests"] == 24
        assert primary["requests"]
        assert other["requests"]
        assert primary["goodput"] == other["goodput"] == 1.0
        assert primary["failed"] == other["shed"] == 0
        assert primary["ttft_p50_s"] > 0
        assert (await harness.put(canaried + "retries: {floor: 5}\n"))[0] == 200
        assert harness.app.gateway.snapshot.trials["chat"] is before
        assert (await harness.put(harness.text().replace("prefix_aware", "round_robin")))[0] == 200
        assert harness.app.gateway.snapshot.policies["chat"] is before.canary
        assert (await harness.asked("GET", "/canary"))[2] == {"canaries": []}
        assert not list(harness.app.metrics.trial_metrics.requests.children())


async def test_an_invalid_canary_is_rejected_with_its_place(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        for part, words in (
            ("{policy: round_robin}", "needs exactly one of percent and tenants"),
            (
                "{policy: round_robin, percent: 5, tenants: [a]}",
                "needs exactly one of percent and tenants",
            ),
            ("{policy: round_robin, percent: 100}", "percent"),
            ("{policy: rund_robin, percent: 5}", 'did you mean "round_robin"?'),
            ("{policy: round_robin, tenants: [nobody]}", "there is no tenant 'nobody'"),
        ):
            status, results = await harness.put(
                harness.text().replace(PLAIN, PLAIN + f"    canary: {part}\n")
            )
            assert status == 400, part
            assert any(
                words in problem["text"] and "canary" in problem["path"]
                for problem in results["problems"]
            ), results
        status, results = await harness.put(
            harness.text().replace(PLAIN, PLAIN + "    shadow: [round_robin, priecd]\n")
        )
        assert status == 400
        assert results["problems"][0]["path"] == "pools.chat.shadow[1]"
