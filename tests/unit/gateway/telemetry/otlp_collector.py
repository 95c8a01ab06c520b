"""A minimal OpenTelemetry collector for tests that stores spans, or answers with a given status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class Collector:
    """A fake OpenTelemetry collector, which keeps the spans that it receives.

    spans  the received spans, with attributes as a plain mapping
    url    address of the collector, for the configuration
    """

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
                        span | {"attributes": _plain(span["attributes"])} for span in scope["spans"]
                    ]
        self._came.set()
        return web.json_response({}, status=self.answer)

    async def heard(self, spans: int, within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s):
            while len(self.spans) < spans:
                self._came.clear()
                await self._came.wait()

    def tree(self) -> dict[str, Any]:
        trace = self.spans[-1]["traceId"]
        mine = [span for span in self.spans if span["traceId"] == trace]
        ids = {span["spanId"] for span in mine}
        (root,) = [span for span in mine if span.get("parentSpanId", "") not in ids]
        return {root["name"]: _below(root, mine)}

    def named(self, name: str) -> dict[str, Any]:
        return next(span for span in reversed(self.spans) if span["name"].split()[0] == name)


def _below(parent: dict[str, Any], spans: list[dict[str, Any]]) -> dict[str, Any]:
    own = [span for span in spans if span.get("parentSpanId") == parent["spanId"]]
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in own)
    return {
        span["name"]: _below(span, spans)
        for span in sorted(own, key=lambda span: int(span["startTimeUnixNano"]))
    }


def _plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for span in attributes:
        ((kind, value),) = span["value"].items()
        if kind == "arrayValue":
            value = [next(iter(inner.values())) for inner in value["values"]]
        result[span["key"]] = int(value) if kind == "intValue" else value
    return result


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    receiver = Collector()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/traces", receiver.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield receiver
    finally:
        await runner.cleanup()
