"""The official SDK before a whole gateway: classes, deadlines, refusals with numbers, tenants, smaller tiers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from gateway.app import App
from gateway.config import Config
from mockgpu.fleet import run_fleet
from mockgpu.gpus import gpu_named
from mockgpu.group import GroupSpec
from mockgpu.model_shapes import model_named
from tests.patient import patient
from tests.scraped import total

ASK: Any = {"messages": [{"role": "user", "content": "How deep is the reservoir?"}]}


class Place:
    """A running gateway; `sdk` asks it and `page` reads its admin server."""

    def __init__(self, app: App, http: aiohttp.ClientSession) -> None:
        self.app = app
        self._http = http

    def sdk(self, key: str = "none", retries: int = 0, timeout: float = 20.0) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.app.url}/v1", api_key=key, max_retries=retries, timeout=timeout)

    async def page(self, path: str) -> tuple[int, Any]:
        async with self._http.get(self.app.admin_url + path) as answer:
            return answer.status, await answer.json()

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the series that carry these labels."""
        return total(self.app.metrics.render().decode(), name, **labels)


@asynccontextmanager
async def place(
    *pools: Mapping[str, Any], speed: float = 1.0, concurrency: int = 2, **sections: Any
) -> AsyncIterator[Place]:
    """One mock group to each pool (`main`, `pool1`, ...), whose configuration is filled up."""
    spec = GroupSpec("demo-8b", model_named("demo-8b"), gpu_named("h100"), speed=speed)
    async with run_fleet([spec] * max(1, len(pools))) as members, aiohttp.ClientSession() as http:
        made = {}
        for number, member in enumerate(members):
            endpoint = {"url": member.url, "max_concurrency": concurrency, "served_model": "demo-8b"}
            own = pools[number] if pools else {}
            made["main" if not number else f"pool{number}"] = {"endpoints": [endpoint]} | dict(own)
        given = {"observability": {"access_log": "off"}, "models": [{"name": "demo-8b", "pool": "main"}]} | sections
        config = {"version": 1, "listeners": {"api": {"port": 0}, "admin": {"port": 0}}, "pools": made} | given
        app = App(Config.model_validate(patient(config)))
        await app.start()
        try:
            yield Place(app, http)
        finally:
            await app.stop()


async def stream(sdk: AsyncOpenAI, tokens: int = 8, model: str = "demo-8b", **options: Any) -> str:
    """One chat, read to its end; its request id."""
    answer = await sdk.chat.completions.with_raw_response.create(
        model=model, stream=True, max_completion_tokens=tokens, **ASK, **options
    )
    async for _ in answer.parse():
        pass
    return str(answer.headers["x-request-id"])


async def test_a_class_and_budgets_by_header_are_what_the_request_is_judged_by() -> None:
    async with place(speed=4.0) as home, home.sdk() as sdk:
        await stream(sdk, extra_headers={"x-slo-class": "interactive"})
        await stream(sdk, extra_headers={"x-slo-class": "batch", "x-slo-ttft-ms": "1"})
        await stream(sdk)
        assert home.metric("penstock_goodput_total", kept="met", **{"class": "interactive"}) == 1
        assert home.metric("penstock_goodput_total", kept="ttft_missed", **{"class": "batch"}) == 1
        assert home.metric("penstock_goodput_total", kept="met", **{"class": "standard"}) == 1
        assert home.metric("penstock_goodput_total") == 3


async def test_a_header_that_makes_no_sense_is_a_bad_request_with_its_name() -> None:
    async with place(speed=float("inf")) as home, home.sdk() as sdk:
        with pytest.raises(openai.BadRequestError) as wrong:
            await stream(sdk, extra_headers={"x-slo-class": "platinum"})
        assert wrong.value.param == "x-slo-class"
        assert "interactive, standard, batch" in str(wrong.value)


async def test_every_request_can_be_explained_by_its_id() -> None:
    async with place({"policy": "priced"}) as home, home.sdk() as sdk:
        request_id = await stream(sdk, extra_headers={"x-slo-class": "interactive", "x-session-id": "agent-1"})
        status, page = await home.page(f"/explain/{request_id}")
        assert (status, page["admission"]["verdict"], page["kept"]) == (200, "admitted", "met")
        assert (page["slo"]["name"], page["in_session"], page["deadline_s"]) == ("interactive", True, 20.0)
        (only,) = page["pick"]["candidates"]
        assert sum(only["terms"].values()) == pytest.approx(-only["score"])
        assert 0 < page["predicted"]["ttft_s"] < 10
        assert 0 < page["actual"]["ttft_s"] < 10
        assert "agent-1" not in str(page)
        assert (await home.page("/explain/req_nobody"))[0] == 404


async def test_at_twice_the_capacity_what_is_refused_says_why_and_when_to_come_back() -> None:
    pool = {"waiting_room": {"size": 2, "timeout": "200ms"}}
    async with place(pool, concurrency=2) as home, home.sdk() as sdk:
        await asyncio.gather(*(stream(sdk, tokens=4) for _ in range(4)))  # it takes two to know how fast it drains
        began = time.monotonic()
        found = await asyncio.gather(*(stream(sdk, tokens=100) for _ in range(12)), return_exceptions=True)
        refused = [each for each in found if isinstance(each, openai.RateLimitError)]
        assert len(refused) >= 6
        assert any(isinstance(each, str) for each in found)
        for each in refused:
            error: Any = each.body
            assert error["type"] == "overloaded_error"
            assert error["code"] in ("overloaded", "queue_timeout")
            assert "of 2 places are taken" in error["message"]
            assert int(each.response.headers["retry-after-ms"]) > 0
            status, page = await home.page(f"/explain/{each.response.headers['x-request-id']}")
            assert (status, page["admission"]["verdict"], page["kept"]) == (200, "refused", "shed")
        assert home.metric("penstock_goodput_total", kept="shed", **{"class": "standard"}) == len(refused)
        assert home.metric("penstock_shed_total", **{"class": "standard"}) == len(refused)
        assert time.monotonic() - began < 10


async def test_who_obeys_retry_after_is_served_in_the_end() -> None:
    pool = {"waiting_room": {"size": 1, "timeout": "5s"}}
    async with place(pool, concurrency=2) as home, home.sdk(retries=8) as sdk:
        assert len(await asyncio.gather(*(stream(sdk, tokens=20) for _ in range(8)))) == 8


async def test_a_client_that_will_have_given_up_is_told_so_at_once() -> None:
    long: Any = {"messages": [{"role": "user", "content": "water " * 60_000}]}
    async with place({"admission": "priced"}) as home, home.sdk(timeout=0.2) as hasty:
        with pytest.raises(openai.RateLimitError) as refused:
            await hasty.chat.completions.create(model="demo-8b", max_completion_tokens=8, **long)
        error: Any = refused.value.body
        assert error["code"] == "deadline_unreachable"
        assert "gives up in 0.2 s" in error["message"]
        assert home.metric("penstock_shed_total", reason="deadline") == 1


async def test_a_tenant_that_floods_the_pool_does_not_keep_another_waiting() -> None:
    tenants = [{"name": "crowd", "key": "sk-crowd"}, {"name": "guest", "key": "sk-guest"}]
    async with (
        place(concurrency=1, tenants=tenants) as home,
        home.sdk("sk-crowd") as crowd,
        home.sdk("sk-guest") as guest,
    ):
        finished: list[str] = []

        async def ask(sdk: AsyncOpenAI, who: str) -> None:
            await stream(sdk, tokens=10)
            finished.append(who)

        flood = [asyncio.create_task(ask(crowd, "crowd")) for _ in range(16)]
        room = home.app.gateway.gate.pool_queues()[0]
        while room.queue_length < 10:
            await asyncio.sleep(0.002)
        await asyncio.gather(*(ask(guest, "guest") for _ in range(2)))
        assert finished.count("crowd") <= 8, finished
        await asyncio.gather(*flood)


async def test_a_smaller_model_serves_what_would_be_refused_and_the_answer_says_so() -> None:
    models = [
        {"name": "big", "aliases": ["best"], "pool": "main", "overflow": [{"model": "small", "penalty": 0.4}]},
        {"name": "small", "pool": "pool1"},
    ]
    none_waits = {"waiting_room": {"size": 0}}
    async with place(none_waits, none_waits, concurrency=1, models=models) as home, home.sdk() as sdk:
        create = sdk.chat.completions.with_raw_response.create
        held = await create(model="best", stream=True, max_completion_tokens=400, **ASK)
        answer = await create(model="best", max_completion_tokens=4, **ASK)
        assert answer.headers["x-penstock-tier"] == "small"
        assert answer.parse().model == "best"
        assert "x-penstock-tier" not in held.headers
        assert home.metric("penstock_overflow_total", model="best", tier="small") == 1
        (_, page) = await home.page(f"/explain/{answer.headers['x-request-id']}")
        assert (page["model"], page["tier"]) == ("small", "small")
        filled = await create(model="small", stream=True, max_completion_tokens=400, **ASK)
        with pytest.raises(openai.RateLimitError):  # nobody waits for a smaller tier
            await create(model="best", max_completion_tokens=4, **ASK)
        for each in (held, filled):
            await each.parse().close()


async def test_prompts_go_only_where_their_context_fits() -> None:
    spec = GroupSpec("demo-8b", model_named("demo-8b"), gpu_named("h100"), speed=float("inf"))
    async with run_fleet([spec] * 2) as members:
        endpoints = [
            {"url": members[0].url, "name": "short", "context_tokens": 1000},
            {"url": members[1].url, "name": "long"},
        ]
        async with place({"policy": "round_robin", "endpoints": endpoints}) as home, home.sdk() as sdk:
            create = sdk.chat.completions.with_raw_response.create
            long: Any = [{"role": "user", "content": "water " * 1500}]
            seen = [await create(model="demo-8b", max_completion_tokens=4, messages=long) for _ in range(3)]
            assert {each.headers["x-penstock-endpoint"] for each in seen} == {"long"}
            both = [await create(model="demo-8b", max_completion_tokens=4, **ASK) for _ in range(4)]
            assert {each.headers["x-penstock-endpoint"] for each in both} == {"short", "long"}


async def test_a_long_prompt_goes_beyond_a_cap_when_those_with_room_are_too_short_for_it() -> None:
    spec = GroupSpec("demo-8b", model_named("demo-8b"), gpu_named("h100"))
    long: Any = [{"role": "user", "content": "water " * 1500}]
    async with run_fleet([spec] * 2) as members:
        endpoints = [
            {"url": members[0].url, "name": "short", "context_tokens": 1000},
            {"url": members[1].url, "name": "long", "max_concurrency": 1, "context_tokens": 9000},
        ]
        async with place({"endpoints": endpoints}) as home, home.sdk() as sdk:
            create = sdk.chat.completions.with_raw_response.create
            held = await create(model="demo-8b", stream=True, max_completion_tokens=400, messages=long)
            second = await create(model="demo-8b", max_completion_tokens=4, messages=long)
            assert second.headers["x-penstock-endpoint"] == "long"
            with pytest.raises(openai.BadRequestError) as refused:
                await create(model="demo-8b", max_completion_tokens=4, messages=long * 20)
            assert refused.value.code == "context_length_exceeded"
            await held.parse().close()
