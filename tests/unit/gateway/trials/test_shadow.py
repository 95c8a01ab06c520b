"""Tests of shadow policies, which only record what they would pick and have no other effect.

Their picks take little CPU time, and are computed after the request was sent.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import msgspec
import pytest

from gateway.fleet.endpoint_load_and_health import EndpointTable
from gateway.metrics.catalogue import Metrics
from gateway.protocol import api_table
from gateway.protocol.request.api_call import Call
from gateway.request_record import Exchange
from gateway.trials import shadow
from gateway.trials.shadow import MIN_COMPARED, NamedPolicy, Shadows, evaluate, name_policies
from policies import load_ledger, policy_registry, routing_algorithm
from policies.endpoint_load import EndpointLoad
from policies.filters import available
from policies.pickers import best
from policies.policy_types import Policy, WeightedScorer
from policies.prefix.fingerprint import Fingerprinter
from policies.routing_types import Candidate, Endpoint, Pick, Request, RoutingQuery
from tests.replacement import stand_in
from tests.unit.gateway.reload.running import running

PLAIN = "    policy: prefix_aware\n"
SHADOWED = (
    PLAIN + "    shadow: [round_robin, {name: least_loaded, parameters: {output_weight: 2.0}}]\n"
)


class Table:
    def __init__(self) -> None:
        self.rng = Random(1)
        self.taught: list[int] = []
        self.prefixes = self

    def fingerprint(self, call: Call, model: str) -> Any:
        return None

    def cached_tokens(self, fingerprint: Any, prompt_tokens: int) -> list[int]:
        return [0, 800]

    def learn_prompt(self, fingerprint: Any, load: EndpointLoad, prompt_tokens: int) -> None:
        self.taught.append(load.slot)


class Route:
    name = "demo"

    def __init__(self) -> None:
        results = [
            Endpoint(f"tp{slot}", f"http://127.0.0.1:{9000 + slot}", "main", "demo")
            for slot in range(2)
        ]
        self.candidates = tuple(
            Candidate(each, EndpointLoad(slot)) for slot, each in enumerate(results)
        )
        load_ledger.reserve(
            self.candidates[1].load, Request("first", "demo", "", 500, 50), 0, monotonic()
        )  # no ties


def asked(number: int = 0, cached: tuple[int, ...] = ()) -> RoutingQuery:
    return RoutingQuery(
        Request(f"req_{number}", "demo", "", 1000, 100), monotonic(), Random(2), cached
    )


def exchange(ask: RoutingQuery, took_s: float) -> Exchange:
    x = Exchange(ask.request.id, api_table.CHAT, "127.0.0.1", ask.now)
    x.picked_at = ask.now + took_s
    x.call = Call(api_table.CHAT, ask.request, "demo", b"{}", (b"[]",))  # type: ignore[arg-type]
    return x


def made(*policies: Policy, primary: str = "least_loaded") -> tuple[Shadows, Metrics]:
    matches = [NamedPolicy(f"{each.name}-{index}", each) for index, each in enumerate(policies)]
    shadows, metrics = (
        Shadows(
            "main", matches, stand_in(EndpointTable, Table()), policy_registry.build(primary, {})
        ),
        Metrics(),
    )
    shadows.count_in(metrics)
    return shadows, metrics


def picked(shadows: Shadows, route: Route, ask: RoutingQuery, took_s: float = 1.0) -> Pick:
    pick = routing_algorithm.pick(policy_registry.build("least_loaded", {}), ask, route.candidates)
    assert pick is not None
    shadows.on_pick(exchange(ask, took_s), route, ask, pick)
    return pick


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def failing() -> Policy:
    def fail(ask: RoutingQuery, candidates: Any) -> list[float]:
        raise RuntimeError("the shadow policy of the test fails")

    return Policy("broken", (available,), (WeightedScorer(fail),), best)


async def test_a_shadow_sees_the_load_as_it_was_before_the_reservation_and_agrees_with_itself() -> (
    None
):
    shadows, metrics = made(policy_registry.build("least_loaded", {}))
    route = Route()
    for number in range(20):
        ask = asked(number)
        pick = picked(shadows, route, ask)
        load_ledger.reserve(pick.candidate.load, ask.request, 0, ask.now)
        await turns()
    assert metrics.trial_metrics.picks.labels("main", "least_loaded-0", "agreed").value == 20
    assert [each.load.in_flight for each in route.candidates] == [10, 11]


async def test_records_of_a_removed_shadow_are_not_counted() -> None:
    shadows, metrics = made(policy_registry.build("least_loaded", {}))
    route = Route()
    picked(shadows, route, asked(1))
    await turns()
    picked(shadows, route, asked(2))
    shadows.remove_series(metrics)
    await turns()
    assert not list(metrics.trial_metrics.picks.children())


async def test_the_gain_of_a_shadow_is_counted_in_seconds_and_tokens() -> None:
    route, ask = Route(), asked(cached=(0, 800))
    busy = route.candidates[0].load
    load_ledger.reserve(busy, Request("other", "demo", "", 4000, 100), 0, ask.now)
    pick = Pick(route.candidates[0], 0, 0.0, 2, "by hand")
    verdict = evaluate(policy_registry.build("prefix_aware", {}), ask, pick, route.candidates)
    assert (verdict.result, verdict.extra_cached_tokens) == ("differed", 800)
    assert verdict.ttft_gain_s is not None
    assert verdict.ttft_gain_s > 0
    back = evaluate(
        policy_registry.build("round_robin", {}),
        ask,
        Pick(route.candidates[1], 800, 0.0, 2, "by hand"),
        route.candidates,
    )
    assert back.extra_cached_tokens == -800
    assert back.ttft_gain_s == pytest.approx(-verdict.ttft_gain_s)


async def test_without_latency_models_there_is_no_gain_in_seconds() -> None:
    route, ask = Route(), asked(cached=(0, 800))
    for each in route.candidates:
        load_ledger.set_modelled(each.load, False, ask.now)
    verdict = evaluate(
        policy_registry.build("prefix_aware", {}),
        ask,
        Pick(route.candidates[0], 0, 0.0, 2, ""),
        route.candidates,
    )
    assert (verdict.ttft_gain_s, verdict.extra_cached_tokens) == (None, 800)


async def test_a_failing_shadow_is_counted_and_the_next_one_is_evaluated() -> None:
    shadows, metrics = made(failing(), policy_registry.build("round_robin", {}))
    picked(shadows, Route(), asked())
    await turns()
    trials = metrics.trial_metrics
    assert trials.picks.labels("main", "broken-0", "failed").value == 1
    assert (
        sum(trials.picks.labels("main", "round_robin-1", result).value for result in shadow.RESULTS)
        == 1
    )


async def test_a_pick_is_evaluated_in_a_later_turn_after_its_request_was_sent() -> None:
    shadows, _ = made(policy_registry.build("least_loaded", {}))
    order: list[str] = []
    score = shadows._evaluate
    shadows._evaluate = lambda note: (order.append("scored"), score(note))[1]  # type: ignore[method-assign,func-returns-value]
    picked(shadows, Route(), asked())
    # The write queue also sends after the pick.
    asyncio.get_running_loop().call_soon(order.append, "sent")
    assert order == []
    await turns()
    assert order == ["sent", "scored"]


async def test_evaluations_take_a_tenth_of_the_time_of_picks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(10**9))
    monkeypatch.setattr(
        shadow, "perf_counter", lambda: 0.001 * next(clock)
    )  # four clock readings: 3 ms of evaluation
    shadows, _ = made(policy_registry.build("least_loaded", {}))
    route = Route()
    for number in range(3000):
        picked(shadows, route, asked(number), took_s=0.001)
        await turns(3)
    results = shadows.as_json()
    assert results["cost_share"] == pytest.approx(0.1, rel=0.02)
    assert results["scored"] == pytest.approx(3000 * 0.1 / 3, rel=0.03)


async def test_prompts_are_fingerprinted_for_shadows_if_the_serving_policy_reads_no_prefixes() -> (
    None
):
    shadows, metrics = made(policy_registry.build("prefix_aware", {}), primary="least_loaded")
    route = Route()
    pick = picked(shadows, route, asked())
    assert shadows._endpoints.taught == []  # type: ignore[attr-defined]
    await turns()
    assert shadows._endpoints.taught == [pick.candidate.load.slot]  # type: ignore[attr-defined]
    assert metrics.trial_metrics.tokens.labels("main", "prefix_aware-0", "more").value == 800


async def test_a_prompt_is_fingerprinted_once() -> None:
    shadows, _ = made(policy_registry.build("prefix_aware", {}), primary="least_loaded")
    ask = msgspec.structs.replace(
        asked(), fingerprint=Fingerprinter(b"sixteen bytes or more").fingerprint(b"", b"a prompt")
    )
    picked(shadows, Route(), ask)
    await turns()
    assert shadows._endpoints.taught == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(("picks", "conclusive"), [(MIN_COMPARED - 1, False), (MIN_COMPARED, True)])
async def test_a_shadow_with_too_few_evaluations_is_inconclusive(
    picks: int, conclusive: bool
) -> None:
    shadows, _ = made(policy_registry.build("round_robin", {}))
    for _ in range(picks):
        shadows._budget_s = 1.0
        picked(shadows, Route(), asked())
        await turns()
    (policy,) = shadows.as_json()["policies"]  # type: ignore[misc]
    assert policy["agreed"] + policy["differed"] == picks
    assert policy["conclusive"] is conclusive


def test_two_shadows_with_one_policy_are_named_by_their_parameters() -> None:
    policy = policy_registry.build("least_loaded", {})
    result = name_policies(
        [
            ("least_loaded", {}, policy),
            ("least_loaded", {"fresh_s": 1.0}, policy),
            ("priced", {}, policy),
        ]
    )
    assert [each.name for each in result] == [
        "least_loaded()",
        "least_loaded(fresh_s=1.0)",
        "priced",
    ]


async def test_shadows_are_shown_survive_a_reload_and_are_removed_with_their_configuration(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as app:
        text = app.text().replace(PLAIN, SHADOWED)
        assert (await app.put(text))[0] == 200
        table = app.app.gateway.endpoints
        assert all(live.load.is_modelled for live in table.all())
        for number in range(8):
            app.app.gateway.snapshot.trials["chat"].shadows._budget_s = 1.0  # type: ignore[union-attr]
            assert await app.ask(f"prompt {number}") == "ok"
        _, _, results = await app.asked("GET", "/shadow")
        [pool] = results["shadows"]
        assert (pool["pool"], pool["picks"], pool["scored"]) == ("chat", 8, 8)
        assert [each["policy"] for each in pool["policies"]] == ["round_robin", "least_loaded"]
        assert all(each["agreed"] + each["differed"] == 8 for each in pool["policies"])
        before = app.app.gateway.snapshot.trials["chat"].shadows
        assert (await app.put(text + "retries: {floor: 5}\n"))[0] == 200
        assert app.app.gateway.snapshot.trials["chat"].shadows is before
        assert (await app.put(app.text()))[0] == 200
        assert (await app.asked("GET", "/shadow"))[2] == {"shadows": []}
        assert not list(app.app.metrics.trial_metrics.picks.children())
        assert not any(live.load.is_modelled for live in table.all())
