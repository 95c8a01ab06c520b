"""Tests of a gateway under load: service classes, deadlines, refusals, and smaller models."""

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
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.long_timeouts import patient
from tests.metrics_page import total
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME

CHAT: Any = {"messages": [{"role": "user", "content": "How deep is the reservoir?"}]}


class GatewayHarness:
    def __init__(self, app: App, http: aiohttp.ClientSession) -> None:
        self.app = app
        self._http = http

    def sdk(self, key: str = "none", retries: int = 0, timeout: float = 20.0) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"{self.app.url}/v1", api_key=key, max_retries=retries, timeout=timeout
        )

    async def page(self, path: str) -> tuple[int, Any]:
        async with self._http.get(self.app.admin_url + path) as answer:
            return answer.status, await answer.json()

    def metric(self, name: str, **labels: str) -> float:
        self.app.gateway.accounts.account_ended()  # as a page does
        return total(self.app.metrics.render().decode(), name, **labels)


@asynccontextmanager
async def running_gateway(
    *pools: Mapping[str, Any], speed: float = 1.0, concurrency: int = 2, **sections: Any
) -> AsyncIterator[GatewayHarness]:
    # Run a gateway with one mock engine in each pool.
    #
    # pools       settings of the pools `main`, `pool1`, ...; endpoints are filled in
    # sections    further sections of the configuration
    spec = GroupSpec("demo-8b", model_named("demo-8b"), gpu_named("h100"), speed=speed)
    async with run_fleet([spec] * max(1, len(pools))) as members, aiohttp.ClientSession() as http:
        pool_sections = {}
        for number, member in enumerate(members):
            endpoint = {
                "url": member.url,
                "max_concurrency": concurrency,
                "served_model": "demo-8b",
            }
            own = pools[number] if pools else {}
            pool_sections["main" if not number else f"pool{number}"] = {
                "endpoints": [endpoint]
            } | dict(own)
        defaults = {
            "observability": {"access_log": "off"},
            "models": [{"name": "demo-8b", "pool": "main"}],
        } | sections
        config = {
            "version": 1,
            "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
            "pools": pool_sections,
        } | defaults
        app = App(Config.model_validate(patient(config)))
        await app.start()
        try:
            yield GatewayHarness(app, http)
        finally:
            await app.stop()


async def stream(sdk: AsyncOpenAI, tokens: int = 8, model: str = "demo-8b", **options: Any) -> str:
    # Read one streamed chat to its end; return its request id.
    answer = await sdk.chat.completions.with_raw_response.create(
        model=model, stream=True, max_completion_tokens=tokens, **CHAT, **options
    )
    async for _ in answer.parse():
        pass
    return str(answer.headers["x-request-id"])


async def test_goodput_is_judged_by_the_class_and_budgets_in_headers() -> None:
    async with running_gateway(speed=4.0) as gateway, gateway.sdk() as sdk:
        await stream(sdk, extra_headers={"x-slo-class": "interactive"})
        await stream(sdk, extra_headers={"x-slo-class": "batch", "x-slo-ttft-ms": "1"})
        await stream(sdk)
        assert (
            gateway.metric("penstock_goodput_total", slo_outcome="met", **{"class": "interactive"})
            == 1
        )
        assert (
            gateway.metric(
                "penstock_goodput_total", slo_outcome="ttft_missed", **{"class": "batch"}
            )
            == 1
        )
        assert (
            gateway.metric("penstock_goodput_total", slo_outcome="met", **{"class": "standard"})
            == 1
        )
        assert gateway.metric("penstock_goodput_total") == 3


async def test_an_invalid_header_is_a_bad_request_that_names_it() -> None:
    async with running_gateway(speed=float("inf")) as gateway, gateway.sdk() as sdk:
        with pytest.raises(openai.BadRequestError) as wrong:
            await stream(sdk, extra_headers={"x-slo-class": "platinum"})
        assert wrong.value.param == "x-slo-class"
        assert "interactive, standard, batch" in str(wrong.value)


async def test_every_request_can_be_explained_by_its_id() -> None:
    async with running_gateway({"policy": "priced"}) as gateway, gateway.sdk() as sdk:
        request_id = await stream(
            sdk, extra_headers={"x-slo-class": "interactive", "x-session-id": "agent-1"}
        )
        status, page = await gateway.page(f"/explain/{request_id}")
        assert (status, page["admission"]["verdict"], page["slo_outcome"]) == (
            200,
            "admitted",
            "met",
        )
        assert (page["slo"]["name"], page["in_session"], page["deadline_s"]) == (
            "interactive",
            True,
            20.0,
        )
        (only,) = page["pick"]["candidates"]
        assert sum(only["terms"].values()) == pytest.approx(-only["score"])
        assert 0 < page["predicted"]["ttft_s"] < 10
        assert 0 < page["actual"]["ttft_s"] < 10
        assert "agent-1" not in str(page)
        assert (await gateway.page("/explain/req_unknown"))[0] == 404


async def test_refusals_under_overload_have_a_reason_and_a_retry_time() -> None:
    pool = {"waiting_room": {"size": 2, "timeout": "200ms"}}
    async with running_gateway(pool, concurrency=2) as gateway, gateway.sdk() as sdk:
        await asyncio.gather(
            *(stream(sdk, tokens=4) for _ in range(4))
        )  # two completions measure the drain rate
        began = time.monotonic()
        results = await asyncio.gather(
            *(stream(sdk, tokens=100) for _ in range(12)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, openai.RateLimitError)]
        assert len(refused) >= 6
        assert any(isinstance(result, str) for result in results)
        for result in refused:
            error: Any = result.body
            assert error["type"] == "overloaded_error"
            assert error["code"] in ("overloaded", "queue_timeout")
            assert "of at most 2 requests running" in error["message"]
            assert int(result.response.headers["retry-after-ms"]) > 0
            status, page = await gateway.page(f"/explain/{result.response.headers['x-request-id']}")
            assert (status, page["admission"]["verdict"], page["slo_outcome"]) == (
                200,
                "refused",
                "shed",
            )
        assert gateway.metric(
            "penstock_goodput_total", slo_outcome="shed", **{"class": "standard"}
        ) == len(refused)
        assert gateway.metric("penstock_shed_total", **{"class": "standard"}) == len(refused)
        assert time.monotonic() - began < 10


async def test_clients_that_obey_retry_after_are_all_served() -> None:
    pool = {"waiting_room": {"size": 1, "timeout": "5s"}}
    async with running_gateway(pool, concurrency=2) as gateway, gateway.sdk(retries=8) as sdk:
        assert len(await asyncio.gather(*(stream(sdk, tokens=20) for _ in range(8)))) == 8


async def test_a_request_that_cannot_meet_its_client_timeout_is_refused_at_once() -> None:
    long: Any = {"messages": [{"role": "user", "content": "water " * 60_000}]}
    async with (
        running_gateway({"admission": "priced"}) as gateway,
        gateway.sdk(timeout=0.2) as impatient,
    ):
        with pytest.raises(openai.RateLimitError) as refused:
            await impatient.chat.completions.create(
                model="demo-8b", max_completion_tokens=8, **long
            )
        error: Any = refused.value.body
        assert error["code"] == "deadline_unreachable"
        assert "gives up in 0.2 s" in error["message"]
        assert gateway.metric("penstock_shed_total", reason="deadline") == 1


async def test_a_tenant_that_floods_the_pool_does_not_delay_another() -> None:
    tenants = [{"name": "crowd", "key": "sk-crowd"}, {"name": "guest", "key": "sk-guest"}]
    async with (
        running_gateway(concurrency=1, tenants=tenants) as gateway,
        gateway.sdk("sk-crowd") as crowd,
        gateway.sdk("sk-guest") as guest,
    ):
        finished: list[str] = []

        async def ask(sdk: AsyncOpenAI, tenant: str) -> None:
            await stream(sdk, tokens=10)
            finished.append(tenant)

        flood = [asyncio.create_task(ask(crowd, "crowd")) for _ in range(16)]
        room = gateway.app.gateway.gate.pool_queues()[0]
        while room.queue_length < 10:
            await asyncio.sleep(0.002)
        await asyncio.gather(*(ask(guest, "guest") for _ in range(2)))
        assert finished.count("crowd") <= 8, finished
        await asyncio.gather(*flood)


async def test_an_overflow_model_serves_what_would_be_refused_and_a_header_names_it() -> None:
    models = [
        {
            "name": "big",
            "aliases": ["best"],
            "pool": "main",
            "overflow": [{"model": "small", "penalty": 0.4}],
        },
        {"name": "small", "pool": "pool1"},
    ]
    no_waiting = {"waiting_room": {"size": 0}}
    async with (
        running_gateway(no_waiting, no_waiting, concurrency=1, models=models) as gateway,
        gateway.sdk() as sdk,
    ):
        create = sdk.chat.completions.with_raw_response.create
        first = await create(model="best", stream=True, max_completion_tokens=400, **CHAT)
        answer = await create(model="best", max_completion_tokens=4, **CHAT)
        assert answer.headers["x-penstock-tier"] == "small"
        assert answer.parse().model == "best"
        assert "x-penstock-tier" not in first.headers
        assert gateway.metric("penstock_overflow_total", model="best", tier="small") == 1
        (_, page) = await gateway.page(f"/explain/{answer.headers['x-request-id']}")
        assert (page["model"], page["tier"]) == ("small", "small")
        filled = await create(model="small", stream=True, max_completion_tokens=400, **CHAT)
        with pytest.raises(openai.RateLimitError):  # requests do not wait for an overflow tier
            await create(model="best", max_completion_tokens=4, **CHAT)
        for response in (first, filled):
            await response.parse().close()


async def test_prompts_go_only_to_endpoints_with_enough_context() -> None:
    spec = GroupSpec("demo-8b", model_named("demo-8b"), gpu_named("h100"), speed=float("inf"))
    async with run_fleet([spec] * 2) as members:
        endpoints = [
            {"url": members[0].url, "name": "short", "context_tokens": 1000},
            {"url": members[1].url, "name": "long"},
        ]
        async with (
            running_gateway({"policy": "round_robin", "endpoints": endpoints}) as gateway,
            gateway.sdk() as sdk,
        ):
            create = sdk.chat.completions.with_raw_response.create
            long: Any = [{"role": "user", "content": "water " * 1500}]
            responses = [
                await create(model="demo-8b", max_completion_tokens=4, messages=long)
                for _ in range(3)
            ]
            assert {response.headers["x-penstock-endpoint"] for response in responses} == {"long"}
            both = [
                await create(model="demo-8b", max_completion_tokens=4, **CHAT) for _ in range(4)
            ]
            assert {response.headers["x-penstock-endpoint"] for response in both} == {
                "short",
                "long",
            }


async def test_a_long_prompt_exceeds_the_cap_of_the_only_endpoint_with_enough_context() -> None:
    spec = GroupSpec("demo-8b", model_named("demo-8b"), gpu_named("h100"))
    long: Any = [{"role": "user", "content": "water " * 1500}]
    async with run_fleet([spec] * 2) as members:
        endpoints = [
            {"url": members[0].url, "name": "short", "context_tokens": 1000},
            {"url": members[1].url, "name": "long", "max_concurrency": 1, "context_tokens": 9000},
        ]
        async with running_gateway({"endpoints": endpoints}) as gateway, gateway.sdk() as sdk:
            create = sdk.chat.completions.with_raw_response.create
            first = await create(
                model="demo-8b", stream=True, max_completion_tokens=400, messages=long
            )
            second = await create(model="demo-8b", max_completion_tokens=4, messages=long)
            assert second.headers["x-penstock-endpoint"] == "long"
            with pytest.raises(openai.BadRequestError) as refused:
                await create(model="demo-8b", max_completion_tokens=4, messages=long * 20)
            assert refused.value.code == "context_length_exceeded"
            await first.parse().close()
