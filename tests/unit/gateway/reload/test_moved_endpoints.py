"""Tests that a reload that moves engines between pools, or replaces them, loses no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.reload.reloader import ChangeOptions
from policies.health.endpoint_health import HealthState
from tests.duration_limits import PATIENCE_S
from tests.unit.gateway.fleet.test_served_models import Engine, Running, running
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


class SlowEngine(Engine):
    """A fake engine whose health page does not respond while `is_busy`."""

    is_busy = False

    async def list(self, request: web.Request) -> web.Response:
        while self.is_busy:
            await asyncio.sleep(0.01)
        return await super().list(request)

    async def well(self, request: web.Request) -> web.Response:
        while self.is_busy:
            await asyncio.sleep(0.01)
        return await super().well(request)


def pools(**urls: str) -> dict[str, Any]:
    return {
        pool: {"policy": "round_robin", "endpoints": [{"url": url}]} for pool, url in urls.items()
    }


async def put(
    gateway: Running, models: dict[str, str] | None = None, *, force: bool = False, **urls: str
) -> str:
    # Apply a configuration with these models by pool and endpoints by pool; return the result.
    settings = {
        "version": 1,
        "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
        "observability": {"access_log": "off"},
        "models": [{"name": name, "pool": pool} for name, pool in (models or {}).items()],
        "pools": pools(**urls),
    }
    text, options = json.dumps(settings).encode(), ChangeOptions(force=force)
    return (await gateway.app.reloader.put(text, "admin", options=options)).result


def current(gateway: Running) -> list[LiveEndpoint]:
    return [live for live in gateway.app.gateway.endpoints.all() if not live.is_leaving]


async def lists_are_read(gateway: Running) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(live.models_at is None for live in current(gateway)):
            await asyncio.sleep(0.01)
    await gateway.lists_in_force()


@asynccontextmanager
async def serving(first: SlowEngine, *others: SlowEngine) -> AsyncIterator[Running]:
    # Run engines, and a gateway without configured models that uses the first one.
    async with AsyncExitStack() as stack:
        for engine in others:
            server = TestServer(engine.application(), host="127.0.0.1")
            await stack.enter_async_context(server)
            engine.url = str(server.make_url("")).rstrip("/")
        yield await stack.enter_async_context(running([first], []))


async def test_engines_that_exchange_their_pools_are_known_to_lack_the_others_models() -> None:
    first, second = SlowEngine("a"), SlowEngine("b")
    models = {"a": "one", "b": "two"}
    async with serving(first, second) as gateway:
        assert await put(gateway, models, one=first.url, two=second.url) == "applied"
        await lists_are_read(gateway)
        assert await put(gateway, models, one=second.url, two=first.url) == "rejected"
        for model in models:
            assert await gateway.ask(model) == (200, model)
        # The engines have exchanged their models as well, and were not asked for them since.
        first.models, second.models = second.models, first.models
        assert await put(gateway, models, one=second.url, two=first.url) == "applied"
        for model in models:
            assert await gateway.ask(model) == (200, model)


async def test_models_that_move_with_their_engines_to_other_pools_are_served_all_the_time() -> None:
    first, second = SlowEngine("a"), SlowEngine("b")
    async with serving(first, second) as gateway:
        await put(gateway, {"a": "one", "b": "two"}, one=first.url, two=second.url)
        await lists_are_read(gateway)
        first.is_busy = second.is_busy = True
        result = await put(gateway, {"a": "two", "b": "one"}, one=second.url, two=first.url)
        assert result == "applied"
        assert HealthState.EJECTED not in {live.health.state for live in current(gateway)}
        for model in ("a", "b"):
            assert await gateway.ask(model) == (200, model)
        first.is_busy = second.is_busy = False


async def test_a_pool_gets_another_name_without_losing_its_models() -> None:
    engine = SlowEngine("a")
    async with serving(engine) as gateway:
        engine.is_busy = True
        assert await put(gateway, other=engine.url) == "applied"
        assert await gateway.ask("a") == (200, "a")
        engine.is_busy = False


async def test_an_engine_that_moves_to_another_pool_stays_drained() -> None:
    engine = SlowEngine("a")
    async with serving(engine) as gateway:
        table = gateway.app.gateway.endpoints
        (live,) = table.all()
        table.set_drained(live, is_drained=True)
        await put(gateway, other=engine.url)
        (moved,) = current(gateway)
        assert moved is not live
        assert (moved.is_drained, moved.load.is_available) == (True, False)
        assert moved.health.state is HealthState.UP


@pytest.mark.parametrize("lists_it", [True, False])
async def test_a_model_stays_while_the_engine_that_replaces_its_last_one_may_list_it(
    lists_it: bool,
) -> None:
    old, new = SlowEngine("a"), SlowEngine("a" if lists_it else "b", is_strict=False)
    async with serving(old, new) as gateway:
        assert await gateway.ask("a") == (200, "a")
        new.is_busy = True
        assert await put(gateway, main=new.url) == "applied"
        assert await gateway.ask("a") == (200, "a")
        assert new.asked
        assert (await gateway.ask("c"))[0] == 404
        new.is_busy = False
        await lists_are_read(gateway)
        assert (await gateway.ask("a"))[0] == (200 if lists_it else 404)
