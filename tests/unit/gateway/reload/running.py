"""Runs a gateway that watches its configuration file, mock engines and clients, for tests."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp

from gateway.app import App
from gateway.config import load_with_warnings
from gateway.reload import file_watcher
from gateway.restart.start_options import StartOptions
from mockgpu.fleet import FleetGroup, run_fleet
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.duration_limits import PATIENCE_S

ENV = {"ADMIN_KEY": "sk-admin-of-the-test"}
CONFIG = """\
version: 1
listeners:
  api: {{port: 0}}
  admin: {{port: 0}}
observability: {{access_log: 'off'}}
models:
  - {{name: demo-8b, pool: chat}}
pools:
  chat:
    policy: prefix_aware
    endpoints:
{endpoints}
    waiting_room: {{size: 512, timeout: 20s}}
timeouts: {{connect: 10s, stall: 60s}}
"""


class Running:
    def __init__(self, file: Path, members: list[FleetGroup], http: aiohttp.ClientSession) -> None:
        self.file = file
        self.members = members
        self.http = http
        self.said: list[str] = []
        self.fates: dict[str, int] = {}
        self.app: App

    def text(self, *numbers: int) -> str:
        chosen = numbers or range(len(self.members))
        lines = [f"      - {{name: group-{n}, url: {self.members[n].url}}}" for n in chosen]
        return CONFIG.format(endpoints="\n".join(lines))

    def write(self, text: str) -> None:
        fresh = self.file.with_suffix(".tmp")
        fresh.write_text(text)
        fresh.replace(self.file)

    async def asked(
        self, method: str, path: str, **options: Any
    ) -> tuple[int, Mapping[str, str], Any]:
        async with self.http.request(method, self.app.admin_url + path, **options) as answer:
            return answer.status, answer.headers, await answer.json()

    async def put(self, text: str, **options: Any) -> tuple[int, Any]:
        status, _, reply = await self.asked("PUT", "/config", data=text.encode(), **options)
        return status, reply

    async def hears(self, words: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(words in line for line in self.said):
                await asyncio.sleep(0.01)

    async def ask(self, prompt: str = "hello", tokens: int = 4) -> str:
        # Stream one completion to its end; return ok or the kind of failure.
        body = {"model": "demo-8b", "stream": True, "max_tokens": tokens}
        body["messages"] = [{"role": "user", "content": prompt}]
        try:
            async with self.http.post(f"{self.app.url}/v1/chat/completions", json=body) as answer:
                text = await answer.read()
                whole = (
                    answer.status == 200
                    and text.rstrip().endswith(b"[DONE]")
                    and b'"error"' not in text
                )
                fate = "ok" if whole else f"{answer.status} {text[-200:]!r}"
        except aiohttp.ClientError as problem:
            fate = repr(problem)
        self.fates[fate] = self.fates.get(fate, 0) + 1
        return fate

    @asynccontextmanager
    async def load(self, users: int = 8) -> AsyncIterator[None]:
        # Let `users` users send requests continuously during the block.
        #
        # Asserts that every response is complete.
        over = asyncio.Event()

        async def user(number: int) -> None:
            count = 0
            while not over.is_set():
                count += 1
                await self.ask(f"user {number} " + "x" * 600 + f" turn {count % 5}")

        tasks = [asyncio.create_task(user(number)) for number in range(users)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)
        assert set(self.fates) <= {"ok"}, self.fates


@asynccontextmanager
async def running(
    folder: Path,
    groups: int = 2,
    speed: float = math.inf,
    more: str = "",
    poll_s: float = 0.03,
    late: tuple[str, str] | None = None,
) -> AsyncIterator[Running]:
    # Run a gateway with a configuration file.
    #
    # more    text appended to the configuration
    # poll_s  poll interval of the file watcher
    # late    (old, new): replaced in the file after it was loaded and before the gateway starts
    spec = GroupSpec("demo-8b", model_named("demo-8b"), gpu_named("h100"), speed=speed)
    connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=3 * PATIENCE_S)
    async with (
        run_fleet([spec] * groups) as members,
        aiohttp.ClientSession(connector=connector, timeout=patience) as http,
    ):
        harness = Running(folder / "gateway.yaml", members, http)
        harness.file.write_text(harness.text() + more)
        loaded = load_with_warnings(harness.file, ENV)

        def say(line: str, bad: bool) -> None:
            harness.said.append(line)

        harness.app = App(loaded.config, StartOptions(loaded, harness.file, ENV, say))
        if late is not None:
            harness.write((harness.text() + more).replace(*late))
        with patch.object(file_watcher, "POLL_S", poll_s):
            await harness.app.start()
            try:
                yield harness
            finally:
                await harness.app.stop()


def dumped(value: object) -> str:
    return json.dumps(value, default=str)
