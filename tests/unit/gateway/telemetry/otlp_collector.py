"""A minimal OpenTelemetry collector that stores spans, or answers with a given status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class Collector:
    """`url` for the configuration; `spans` as received, with attributes as a plain mapping."""

    def __init__(self) -> None:
        self.url = ""
        self.answer = 200
        self.posts = 0
        self.bodies: list[str] = []
        self.authorizations: list[str | None] = []
        self.resources: list[dict[str, str]] = []
        self.spans: list[dict[str, Any]] = []
        self._came = asyncio.Event()

    async def take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        self.posts += 1
        self.authorizations.append(request.headers.get("Authorization"))
        self.bodies.append(await request.text())
        if self.answer == 200:
            for group in (await request.json())["resourceSpans"]:
                self.resources.append(_plain(group["resource"]["attributes"]))
                for scope in group["scopeSpans"]:
                    self.spans += [
                        each | {"attributes": _plain(each["attributes"])} for each in scope["spans"]
                    ]
        self._came.set()
        return web.json_response({}, status=self.answer)

    async def heard(self, spans: int, within_s: float = 10.0) -> None:
        """Wait until this many spans have arrived."""
        async with asyncio.timeout(within_s):
            while len(self.spans) < spans:
                self._came.clear()
                await self._came.wait()

    def tree(self) -> dict[str, Any]:
        """Return the newest trace: names nested, children in order of their start."""
        trace = self.spans[-1]["traceId"]
        mine = [each for each in self.spans if each["traceId"] == trace]
        ids = {each["spanId"] for each in mine}
        (root,) = [each for each in mine if each.get("parentSpanId", "") not in ids]
        return {root["name"]: _below(root, mine)}

    def named(self, name: str) -> dict[str, Any]:
        """Return the newest span with that name."""
        return next(each for each in reversed(self.spans) if each["name"].split()[0] == name)


def _below(parent: dict[str, Any], spans: list[dict[str, Any]]) -> dict[str, Any]:
    own = [each for each in spans if each.get("parentSpanId") == parent["spanId"]]
    assert all(int(each["startTimeUnixNano"]) <= int(each["endTimeUnixNano"]) for each in own)
    return {
        each["name"]: _below(each, spans)
        for each in sorted(own, key=lambda each: int(each["startTimeUnixNano"]))
    }


def _plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in attributes:
        ((kind, value),) = each["value"].items()
        if kind == "arrayValue":
            value = [next(iter(inner.values())) for inner in value["values"]]
        found[each["key"]] = int(value) if kind == "intValue" else value
    return found


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """Run a collector until the block is left."""
    kept = Collector()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/traces", kept.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    kept.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield kept
    finally:
        await runner.cleanup()
