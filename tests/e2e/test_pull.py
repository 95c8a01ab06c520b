"""Tests of requests whose endpoint fetches the cached beginning of the prompt from another one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple

import pytest

from gateway.cli.explain import explanation_lines
from gateway.disagg.handoffs import RELEASE_TIMEOUT_S
from mockgpu.fleet import FleetGroup
from mockgpu.handoff.kv_handoff import DECLINE_S
from mockgpu.mock_tokenizer import expected_text
from mockgpu.paged_kv_cache import BLOCK_TOKENS
from tests.duration_limits import PATIENCE_S, pace
from tests.e2e.split_fleet import MODEL, SENTENCE, SplitFleet, split_fleet, text_of
from tests.e2e.test_split_observability import lines_of
from tests.metrics_page import total

BEGINNING = SENTENCE * 400  # 6,400 tokens
TOKENS = 8
MOST_TOKENS = 20_000
PATHS = ["/v1/completions", "/v1/chat/completions"]


class Answer(NamedTuple):
    text: str
    endpoint: str
    pulled_from: str
    id: str
    cached_tokens: int | None


class PullFleet(NamedTuple):
    """Two engines with the role `both`, of which one has the beginning cached.

    It also generates an endless answer, so that a long prompt costs less at the other one.

    holder   the engine that has computed the beginning
    other    the engine that gets the next requests
    """

    fleet: SplitFleet
    holder: FleetGroup
    other: FleetGroup


def body_of(path: str, text: str, **members: Any) -> dict[str, Any]:
    # A stream's first token shows the gateway how long a transfer took.
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {}
    return {"max_tokens": TOKENS, "stream": True} | (prompt or {"prompt": text}) | members


async def ask(
    fleet: SplitFleet, body: dict[str, Any], path: str = PATHS[0], key: str = ""
) -> Answer:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    options = {"stream_options": {"include_usage": True}} if body["stream"] else {}
    async with fleet.http.post(
        fleet.app.url + path, json={"model": MODEL} | options | body, headers=headers
    ) as answer:
        raw, got = await answer.read(), answer.headers
        assert answer.status == 200, raw
    last = raw.split(b"\n\n")[-3].removeprefix(b"data: ") if body["stream"] else raw
    usage = json.loads(last)["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text_of(raw),
        got["x-penstock-endpoint"],
        got.get("x-penstock-pulled-from", ""),
        got["x-request-id"],
        details.get("cached_tokens"),
    )


def assert_right(answer: Answer, body: dict[str, Any]) -> None:
    assert answer.text == expected_text(body, body["max_tokens"])


def name_of(member: FleetGroup) -> str:
    return member.url.removeprefix("http://")


async def computed_tokens(fleet: SplitFleet, member: FleetGroup) -> float:
    # Return the number of prompt tokens that the engine has computed itself.
    async with fleet.http.get(f"{member.url}/metrics") as answer:
        page = await answer.text()
    queries, hits = (total(page, f"vllm:prefix_cache_{kind}_total") for kind in ("queries", "hits"))
    return queries - hits


async def taken(fleet: SplitFleet, member: FleetGroup) -> float:
    async with fleet.http.get(f"{member.url}/metrics") as answer:
        return total(await answer.text(), "mock:kv_taken_total", end="landed")


@asynccontextmanager
async def pull_fleet(
    path: str = PATHS[0], key: str = "", kv: dict[str, Any] | None = None, **sections: Any
) -> AsyncIterator[PullFleet]:
    # Afterwards no engine holds anything.
    pool = {"policy": {"name": "priced"}}
    async with split_fleet(
        "penstock",
        groups=(1, 1),
        roles=("both", "both"),
        kv={"recompute": True, "lease_s": 60.0} | (kv or {}),
        pool=pool,
        speed=4.0,
        **sections,
    ) as fleet:
        first = body_of(path, BEGINNING + "What is first?")
        answer = await ask(fleet, first, path, key)
        assert_right(answer, first)
        holder, other = fleet.members
        if answer.endpoint == name_of(other):
            holder, other = other, holder
        endless = body_of(path, BEGINNING + "Tell all.", max_tokens=MOST_TOKENS)
        fill = asyncio.ensure_future(ask(fleet, endless, path, key))
        async with asyncio.timeout(PATIENCE_S):
            while not any(live.load.decoding for live in fleet.app.gateway.endpoints.all()):
                await asyncio.sleep(0.01)
        try:
            yield PullFleet(fleet, holder, other)
        finally:
            fill.cancel()
            await asyncio.gather(fill, return_exceptions=True)
        await fleet.at_rest(within_s=RELEASE_TIMEOUT_S + DECLINE_S + 5.0)


async def explained(fleet: SplitFleet, answer: Answer) -> dict[str, Any]:
    async with fleet.http.get(f"{fleet.app.admin_url}/explain/{answer.id}") as page:
        explanation: dict[str, Any] = await page.json()
        return explanation


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
async def test_the_beginning_is_fetched_and_the_rest_is_computed(
    path: str, stream: bool, tmp_path: Path
) -> None:
    file = tmp_path / "access.log"
    async with pull_fleet(path, log=str(file)) as (fleet, holder, other):
        before = await computed_tokens(fleet, holder)
        body = body_of(path, BEGINNING + SENTENCE + "And what is second?", stream=stream)
        answer = await ask(fleet, body, path)
        assert_right(answer, body)
        assert (answer.endpoint, answer.pulled_from) == (name_of(other), name_of(holder))
        # The holder computes the end of the beginning, because engines compute the last token.
        assert 0 < await computed_tokens(fleet, holder) - before <= BLOCK_TOKENS
        assert await taken(fleet, other) == 1
        assert answer.cached_tokens is not None
        assert answer.cached_tokens > 6_000
        assert fleet.metric("penstock_pulls_total", result="pulled") == 1
        pulled = fleet.metric("penstock_pulled_tokens_total")
        assert 6_000 < pulled < 6_500
        explanation = await explained(fleet, answer)
        assert explanation["split"]["reason"] == "pull_cheaper"
        assert explanation["pull"]["source"] == name_of(holder)
        assert explanation["pull"]["tokens"] == pulled
        assert "tokens fetched from" in "\n".join(explanation_lines(explanation))
        (line,) = [line for line in await lines_of(file, 2) if line["id"] == answer.id]
        assert (line["pulled_from"], line["pulled_tokens"]) == (name_of(holder), pulled)
        assert line["sent_us"] <= line["prefilled_us"] <= line["decode_sent_us"]

        # Now the beginning is cached there, too.
        body = body_of(path, BEGINNING + SENTENCE + "And what is third?", stream=stream)
        answer = await ask(fleet, body, path)
        assert_right(answer, body)
        assert (answer.endpoint, answer.pulled_from) == (name_of(other), "")
        assert fleet.metric("penstock_pulls_total") == 1


@pytest.mark.parametrize("fault", ["5xx:status=500", "5xx:status=429", "reset-before-headers"])
async def test_the_prompt_is_computed_if_the_holder_fails(fault: str) -> None:
    async with pull_fleet() as (fleet, holder, other):
        holder.faults.apply(fault)
        body = body_of(PATHS[0], BEGINNING + "And what is second?")
        answer = await ask(fleet, body)
        assert_right(answer, body)
        assert (answer.endpoint, answer.pulled_from) == (name_of(other), "")
        assert fleet.metric("penstock_pulls_total", result="computed") == 1
        explanation = await explained(fleet, answer)
        assert explanation["pull"]["tokens"] == 0
        assert "so the prompt was computed" in "\n".join(explanation_lines(explanation))
        holder.faults.clear()


@pytest.mark.parametrize("fault", ["partition", "slow:x=1000"])
async def test_a_silent_holder_delays_the_answer_by_no_more_than_the_prefill(fault: str) -> None:
    async with pull_fleet() as (fleet, holder, other):
        holder.faults.apply(fault)
        body = body_of(PATHS[0], BEGINNING + "And what is second?")
        began = asyncio.get_running_loop().time()
        answer = await ask(fleet, body)
        # The deadline is 0.25 s here, and deadlines are checked four times a second.
        assert asyncio.get_running_loop().time() - began < 2.0 * pace()
        assert_right(answer, body)
        assert (answer.endpoint, answer.pulled_from) == (name_of(other), "")
        assert fleet.metric("penstock_pulls_total", result="computed") == 1
        holder.faults.clear()


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("who", "fault"),
    [("holder", "kv-lost"), ("holder", "die-in-transfer"), ("other", "die-in-pull")],
)
async def test_kv_that_does_not_arrive_costs_no_answer(
    who: str, fault: str, recompute: bool
) -> None:
    async with pull_fleet(kv={"recompute": recompute}) as (fleet, holder, other):
        (holder if who == "holder" else other).faults.apply(fault)
        body = body_of(PATHS[0], BEGINNING + "And what is second?")
        assert_right(await ask(fleet, body), body)
        for member in fleet.members:
            member.faults.clear()


async def test_a_beginning_that_the_holder_has_evicted_is_computed_somewhere() -> None:
    async with pull_fleet() as (fleet, holder, other):
        holder.group.scheduler.pool.clear_prefix_cache()
        body = body_of(PATHS[0], BEGINNING + "And what is second?")
        answer = await ask(fleet, body)
        assert_right(answer, body)
        assert answer.endpoint == name_of(other)
        assert fleet.metric("penstock_pulls_total") == 1


async def test_the_request_for_the_beginning_has_the_tenants_salt() -> None:
    tenants = [{"name": name, "key": f"sk-{name}"} for name in ("acme", "zeta")]
    async with pull_fleet(key="sk-acme", tenants=tenants) as (fleet, holder, _):
        before = await computed_tokens(fleet, holder)
        body = body_of(PATHS[0], BEGINNING + "And what is second?")
        answer = await ask(fleet, body, key="sk-acme")
        assert_right(answer, body)
        assert answer.pulled_from == name_of(holder)
        assert await computed_tokens(fleet, holder) - before <= BLOCK_TOKENS

        # The other tenant's prompt is computed: nothing is known to be cached for it.
        body = body_of(PATHS[0], BEGINNING + "And what is third?")
        answer = await ask(fleet, body, key="sk-zeta")
        assert_right(answer, body)
        assert (answer.pulled_from, answer.cached_tokens or 0) == ("", 0)


@pytest.mark.parametrize(
    ("members", "split"),
    [
        ({}, {"pull": False}),
        ({"truncate_prompt_tokens": 4_000, "truncation_side": "right"}, {}),
    ],
)
async def test_no_pull_happens_where_it_is_off_or_the_prompt_is_shortened(
    members: dict[str, Any], split: dict[str, Any]
) -> None:
    async with pull_fleet(split=split) as (fleet, _, _):
        body = body_of(PATHS[0], BEGINNING + "And what is second?", **members)
        answer = await ask(fleet, body)
        assert answer.pulled_from == ""
        assert fleet.metric("penstock_pulls_total") == 0


async def test_no_pull_happens_from_an_endpoint_whose_pulls_have_failed() -> None:
    async with pull_fleet() as (fleet, holder, _):
        pauses = fleet.app.gateway.handoffs.pull_pauses
        pauses.on_failed(name_of(holder), monotonic(), is_final=True)
        body = body_of(PATHS[0], BEGINNING + "And what is second?")
        answer = await ask(fleet, body)
        assert_right(answer, body)
        assert answer.pulled_from == ""
        assert fleet.metric("penstock_pulls_total") == 0


async def test_clients_that_leave_at_any_time_leave_nothing_held() -> None:
    async with pull_fleet(kv={"gbps": 40.0}) as (fleet, _, _):
        rng = Random(7)
        for number in range(12):
            # Each has a beginning of its own, so that each may be pulled.
            first = body_of(PATHS[0], f"{number} {BEGINNING} What is first?", stream=False)
            await ask(fleet, first)
            body = body_of(PATHS[0], f"{number} {BEGINNING} And what is second?")
            asking = asyncio.ensure_future(ask(fleet, body))
            await asyncio.sleep(rng.random() * 0.1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
