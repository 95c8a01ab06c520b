"""Runs a gateway and mock engines on the test's event loop, so that a test can inspect their
state.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from gateway.app import App
from gateway.config import Config
from gateway.http.engine_request import UpstreamTimeouts
from mockgpu.fleet import FleetGroup, run_fleet
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.duration_limits import PATIENCE_S
from tests.long_timeouts import patient


class GatewayFleet:
    def __init__(self, app: App, groups: list[FleetGroup], http: aiohttp.ClientSession) -> None:
        self.app = app
        self.groups = groups
        self.http = http

    async def ask(self, *, stream: bool = True, tokens: int = 8, prompt: str = "hello") -> Answer:
        body = {
            "model": "demo-8b",
            "stream": stream,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": prompt}],
        }
        text, broke = b"", False
        async with self.http.post(f"{self.app.url}/v1/chat/completions", json=body) as answer:
            try:
                async for piece, _ in answer.content.iter_chunks():
                    text += piece
            except aiohttp.ClientError:
                broke = True
            return Answer(answer.status, dict(answer.headers), text, broke)

    def loads(self) -> list[int]:
        # Return all load counters of gateway and engines, including retry permits and body bytes.
        #
        # All are zero when no request is in progress.
        gate = self.app.gateway.gate
        amounts = [
            gate.active_requests,
            gate.bodies.used_bytes,
            gate.retries.running,
            *(room.queue_length for room in gate.pool_queues()),
        ]
        for live in self.app.gateway.endpoints.all():
            load = live.load
            amounts += [
                load.in_flight,
                load.prefill_tokens,
                load.decode_tokens,
                load.expected_tokens,
            ]
        return amounts + [member.group.in_flight for member in self.groups]

    async def at_rest(self) -> None:
        # Wait until all load counters are zero, and all ended requests are in the metrics.
        #
        # Raises TimeoutError otherwise.
        async with asyncio.timeout(PATIENCE_S):
            while any(self.loads()) or any(self.kv_usages()):
                await asyncio.sleep(0.01)
        self.app.gateway.accounts.account_ended()  # without a wait for the next loop iteration

    def lose_patience(self, group: int) -> None:
        # Make every request time out now that waits for a byte of this engine.
        #
        # It acts like short timeouts for this engine only, so that slow tests do not time out
        # elsewhere.
        live = next(
            endpoint
            for endpoint in self.app.gateway.endpoints.all()
            if endpoint.endpoint.url == self.groups[group].url
        )
        live.upstream.timeouts = UpstreamTimeouts(connect_s=10.0, first_byte_s=0.0, stall_s=0.0)

    def kv_usages(self) -> list[float]:
        usages = []
        for member in self.groups:
            text = member.group.metrics.render(member.group.scheduler)
            usages += [
                float(line.split()[-1])
                for line in text.splitlines()
                if line.startswith("vllm:kv_cache_usage")
            ]
        return usages

    def metric(self, name: str) -> float:
        self.app.gateway.accounts.account_ended()  # as a page does
        lines = self.app.metrics.render().decode().splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(name) and line[len(name)] in " {"
        )


class Answer:
    """A response of the gateway, as a client received it.

    fate  how it ended: "ok", "error_event", "broken", "silent" (early, without an error), or the
          HTTP status of a refusal
    """

    def __init__(self, status: int, headers: Mapping[str, str], text: bytes, broke: bool) -> None:
        self.status = status
        self.headers = headers
        self.text = text
        self.broke = broke

    @property
    def fate(self) -> str:
        if self.status != 200:
            return str(self.status)
        if self.broke:
            return "broken"
        if b'data: {"error"' in self.text:
            return "error_event"
        whole = self.text.rstrip().endswith(b"data: [DONE]") or self.text.startswith(b"{")
        return "ok" if whole else "silent"

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.text)["error"]
        return error


@asynccontextmanager
async def gateway_fleet(
    groups: int = 2,
    speed: float = math.inf,
    concurrency: int = 24,
    pool: Mapping[str, Any] | None = None,
    kv_tokens: int | None = None,
    **sections: Any,
) -> AsyncIterator[GatewayFleet]:
    # Start a gateway with `groups` mock engines during an `async with` block.
    #
    # speed        speed-up of the engines
    # concurrency  concurrent requests per engine
    # pool         further settings of the pool
    # sections     further sections of the configuration
    spec = GroupSpec(
        "demo-8b", model_named("demo-8b"), gpu_named("h100"), speed=speed, kv_tokens=kv_tokens
    )
    async with run_fleet([spec] * groups) as members:
        endpoints = [{"url": member.url, "max_concurrency": concurrency} for member in members]
        listeners = {"api": {"port": 0}, "admin": {"port": 0}}
        config = Config.model_validate(
            {
                "version": 1,
                "listeners": listeners,
                "observability": {"access_log": "off"},
                "pools": {
                    "main": {"policy": "round_robin", "endpoints": endpoints} | dict(pool or {})
                },
            }
            | patient(sections)
        )
        app = App(config)
        await app.start()
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=3 * PATIENCE_S)
            ) as http:
                yield GatewayFleet(app, members, http)
        finally:
            await app.stop()
