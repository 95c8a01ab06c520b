"""Runs a gateway in the test's process, with mock engines that publish KV events over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from gateway.app import App
from gateway.config import Config
from gateway.fleet.kv_events.event_verification import EndpointEvents
from mockgpu.fleet import FleetGroup, run_fleet
from mockgpu.kv_events.numbered_event_batches import KvEventSpec
from tests.duration_limits import PATIENCE_S
from tests.e2e.mock_group import SPEC

MODEL = SPEC.served_name


class EventFleet:
    def __init__(self, app: App, groups: list[FleetGroup], http: aiohttp.ClientSession) -> None:
        self.app, self.groups, self.http = app, groups, http
        self.exact = app.gateway.endpoints.prefixes.exact

    def events(self, group: int) -> EndpointEvents:
        return self.exact.endpoints[group]

    def is_exact(self, group: int = 0) -> bool:
        return self.exact.is_exact(group)

    async def until(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(patience_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def ask(self, content: str, tokens: int = 8, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return await self.post({"messages": messages, "max_tokens": tokens, **more})

    async def post(self, body: dict[str, Any], key: str = "") -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"{self.app.url}/v1/chat/completions"
        async with self.http.post(url, json={"model": MODEL, **body}, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    def is_current(self, group: int) -> bool:
        sources = self.events(group).sources
        return bool(sources) and all(source.is_current for source in sources)

    def truth(self, group: int) -> set[int]:
        publisher = self.groups[group].group.kv_events
        assert publisher is not None
        return set(publisher.hashes())

    def index(self, group: int) -> frozenset[int | bytes]:
        (source,) = self.events(group).sources
        return source.blocks.hashes()

    async def quiet(self) -> None:
        def is_quiet() -> bool:
            return all(
                self.is_current(group) and self.index(group) == self.truth(group)
                for group in range(len(self.groups))
            )

        await self.until(is_quiet)

    async def endpoints(self) -> list[dict[str, Any]]:
        async with self.http.get(f"{self.app.admin_url}/endpoints") as response:
            return (await response.json())["endpoints"]


@asynccontextmanager
async def event_fleet(
    groups: int = 1,
    kv_tokens: int | None = None,
    events: str = "{}",
    policy: str = "prefix_aware",
    further: dict[str, Any] | None = None,
    endpoint: dict[str, Any] | None = None,
    **spec: Any,
) -> AsyncIterator[EventFleet]:
    # Run a gateway that asks the groups for their sources, unless `events` says otherwise.
    publishing = msgspec.structs.replace(SPEC, kv_events=KvEventSpec(), kv_tokens=kv_tokens, **spec)
    async with run_fleet([publishing] * groups) as members, aiohttp.ClientSession() as http:
        endpoints = [
            {"url": member.url, "kv_events": _events(events, member), **(endpoint or {})}
            for member in members
        ]
        config = {
            "version": 1,
            "observability": {"access_log": "off"},
            "pools": {"main": {"policy": policy, "endpoints": endpoints}},
            "listeners": {"api": {"port": 0}, "admin": {"port": 0}},
            **(further or {}),
        }
        app = App(Config.model_validate(config))
        await app.start()
        try:
            yield EventFleet(app, members, http)
        finally:
            await app.stop()


def _events(text: str, member: FleetGroup) -> dict[str, str]:
    publisher = member.group.kv_events
    assert publisher is not None
    if text == "{}":
        return {}
    configured = {"publisher": f":{publisher.port}"}
    return (
        configured if text == "no replay" else configured | {"replay": f":{publisher.replay_port}"}
    )
