"""Runs one mock engine on real sockets, with a raw HTTP client and an OpenAI SDK client.

This module sends requests, reads metrics and sets faults. The tests have the expected results.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import aiohttp
import openai

from mockgpu.fleet import FleetGroup, run_fleet
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.duration_limits import PATIENCE_S

SPEC = GroupSpec("demo-8b", model_named("demo-8b"), gpu_named("h100"), speed=inf)
CHAT = {
    "model": "demo-8b",
    "messages": [{"role": "user", "content": "How deep is the reservoir behind the dam?"}],
}


class MockGroup:
    def __init__(self, member: FleetGroup, http: aiohttp.ClientSession) -> None:
        self.member = member
        self.http = http
        self.sdk = openai.AsyncOpenAI(base_url=f"{member.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        return self.http.post(self.member.url + path, json=body, **options)

    async def answer(self, path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any]:
        async with self.post(path, body, **options) as response:
            return response.status, await response.json()

    async def stream(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[str]:
        async with self.post(path, body | {"stream": True}) as response:
            assert response.status == 200
            return [
                event.removeprefix("data: ")
                for event in (await response.text()).split("\n\n")
                if event
            ]

    async def status(self, path: str) -> int:
        async with self.http.get(self.member.url + path) as response:
            return response.status

    async def metric(self, series: str) -> float:
        async with self.http.get(self.member.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))

    async def until(self, series: str, value: float) -> None:
        # Poll until the metric `series` has this value. Raises an error on a timeout.
        async with asyncio.timeout(PATIENCE_S):
            while await self.metric(series) != value:
                await asyncio.sleep(0)

    async def fault(self, spec: str) -> None:
        status, _ = await self.answer("/mock/fault", {"spec": spec})
        assert status == 200


@asynccontextmanager
async def mock_group(spec: GroupSpec = SPEC, **options: Any) -> AsyncIterator[MockGroup]:
    async with run_fleet([spec], **options) as (member,), aiohttp.ClientSession() as http:
        yield MockGroup(member, http)


def slow_group() -> GroupSpec:
    return GroupSpec("demo-8b", SPEC.model, SPEC.gpu, speed=5, max_num_seqs=4)
