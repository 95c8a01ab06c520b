"""Runs mock engines and a gateway as processes, with clients that record how requests end.

This module starts and kills processes, sends load and injects faults. The tests have the expected
results.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.duration_limits import PATIENCE_S, Stopwatch
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
BOOKED = ("in_flight", "prefill_tokens", "decode_tokens", "expected_tokens")
WITHIN_S = 3 * PATIENCE_S


class MockProcess:
    def __init__(self, speed: float, *options: str) -> None:
        self.port = free_port()
        self._options = ("--port", str(self.port), "--groups", "1", "--speed", str(speed), *options)
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mockgpu", *self._options]
        self._process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith(b"ready")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


class Clients:
    """Clients that send requests continuously. `fates` counts how the requests ended:

    ok           with a complete answer
    broken       with an answer that is visibly incomplete
    error_event  with a stream that ended with an error event
    failed       with an error status, or without any byte
    silent       with a stream that ended as if complete, although it was not
    """

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http
        self.fates: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest_s = 0.0
        self._number = 0
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def working(self, users: int) -> AsyncIterator[Clients]:
        self._tasks = [asyncio.create_task(self._user()) for _ in range(users)]
        try:
            yield self
        finally:
            self._stop = True
            await asyncio.gather(*self._tasks)

    async def _user(self) -> None:
        while not self._stop:
            self._number += 1
            began = time.monotonic()
            fate = await self.ask(self._number)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.fates[fate] += 1

    async def ask(self, number: int) -> str:
        stream = number % 4 != 0
        body = {
            "model": "demo-8b",
            "stream": stream,
            "max_tokens": 20 + number % 40,
            "messages": [
                {
                    "role": "user",
                    "content": f"question {number} " + "and more " * (number * 7 % 200),
                }
            ],
        }
        begun = False
        text = b""
        try:
            async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    return self._failed(f"{answer.status} {await answer.text()}")
                async for piece, _ in answer.content.iter_chunks():
                    begun = True
                    text += piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return (
                "broken"
                if begun and not isinstance(error, TimeoutError)
                else self._failed(repr(error))
            )
        return self._whole(text) if stream else "ok" if json.loads(text)["choices"] else "silent"

    def _whole(self, text: bytes) -> str:
        if b'"stream_interrupted"' in text or b'data: {"error"' in text:
            return "error_event"
        if text.rstrip().endswith(b"data: [DONE]"):
            return "ok"
        self.problems.append(f"silent: {text[-200:]!r}")
        return "silent"

    def _failed(self, problem: str) -> str:
        self.problems.append(problem)
        return "failed"


@dataclass(frozen=True)
class FleetProcesses:
    mocks: list[MockProcess]
    gateway: subprocess.Popen[bytes]
    url: str
    admin_url: str


class FleetClient:
    def __init__(self, running: FleetProcesses, http: aiohttp.ClientSession) -> None:
        self.mocks = running.mocks
        self._url = running.url
        self._admin_url = running.admin_url
        self._gateway = running.gateway
        self._http = http

    def stopwatch(self) -> Stopwatch:
        # Return a stopwatch that subtracts the time in which the gateway had no CPU.
        return Stopwatch(self._gateway.pid)

    def clients(self) -> Clients:
        return Clients(self._url, self._http)

    async def fault(self, mock: MockProcess, spec: str) -> None:
        async with self._http.post(f"{mock.url}/mock/fault", json={"spec": spec}) as answer:
            assert answer.status == 200

    async def endpoint(self, mock: MockProcess) -> dict[str, Any]:
        return next(endpoint for endpoint in await self.endpoints() if endpoint["url"] == mock.url)

    async def endpoints(self) -> list[dict[str, Any]]:
        async with self._http.get(f"{self._admin_url}/endpoints") as answer:
            urls: list[dict[str, Any]] = (await answer.json())["endpoints"]
        return urls

    async def until(
        self, mock: MockProcess, *, available: bool, within_s: float = WITHIN_S
    ) -> float:
        # Wait until the gateway uses this engine again, or (`available=False`) stops using it.
        #
        # Returns the seconds that this took, without those in which the gateway had no CPU.
        took = self.stopwatch()
        await eventually(lambda: self._is(mock, available), within_s)
        return took.fair_s

    async def _is(self, mock: MockProcess, available: bool) -> bool:
        return (await self.endpoint(mock))["available"] is available

    async def wait_until_idle(self) -> None:
        # Wait until the gateway and the engines have no load.
        #
        # Raises AssertionError on a timeout.
        await eventually(self._is_quiet, PATIENCE_S)

    async def _is_quiet(self) -> bool:
        endpoints = await self.endpoints()
        async with self._http.get(f"{self._admin_url}/metrics") as answer:
            metrics = await answer.text()
        total = sum(endpoint[name] for endpoint in endpoints for name in BOOKED)
        for name in ("penstock_open_streams", "penstock_waiting"):
            total += sum(
                float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)
            )
        return total == 0 and all([await self._freed(mock) for mock in self.mocks])

    async def _freed(self, mock: MockProcess) -> bool:
        async with self._http.get(f"{mock.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return all(
            float(line.split()[-1]) == 0
            for line in lines
            if line.startswith("vllm:kv_cache_usage_perc")
        )


async def eventually(holds: Callable[[], Any], within_s: float) -> None:
    # Poll until a condition holds. Raises AssertionError after `within_s` seconds.
    began = time.monotonic()
    while not await holds():
        assert time.monotonic() - began < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.05)


@contextmanager
def fleet_processes(folder: Path, config: str, speed: float = 0.5) -> Iterator[FleetProcesses]:
    # Start four mock engines and a gateway during a `with` block.
    #
    # `config` is YAML that is added to the pool, with its indentation.
    mocks = [MockProcess(speed) for _ in range(4)]
    gateway: subprocess.Popen[bytes] | None = None
    try:
        for mock in mocks:
            mock.wait_until_ready()
        file = folder / "gateway.yaml"
        endpoints = "".join(
            f"      - {{url: '{mock.url}', max_concurrency: 16}}\n" for mock in mocks
        )
        file.write_text(
            "version: 1\nlisteners: {api: {port: 0}, admin: {port: 0}}\nobservability: {access_log: 'off'}\n"
            "timeouts: {connect: 10s}\nhealth: {timeout: 3s}\nscrape: {timeout: 3s}\n"
            f"pools:\n  main:\n    endpoints:\n{endpoints}{config}"
        )
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
        gateway = subprocess.Popen(
            command, env=ENV, stderr=(folder / "stderr").open("wb"), stdout=subprocess.DEVNULL
        )
        yield FleetProcesses(mocks, gateway, *wait_until_listening(gateway, folder / "stderr"))
    finally:
        for mock in mocks:
            mock.end()
        if gateway is not None:
            gateway.terminate()
            gateway.wait(WITHIN_S)


def wait_until_listening(gateway: subprocess.Popen[bytes], stderr: Path) -> tuple[str, str]:
    # Wait until the gateway has written its URLs to `stderr`; return those of API and admin.
    #
    # Raises AssertionError at once when the process ends, or after `WITHIN_S` seconds.
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        status = gateway.poll()
        text = stderr.read_text()
        urls = [word.strip(";,") for word in text.split() if word.startswith("http://")]
        if status is not None:
            raise AssertionError(
                f"the gateway ended with exit status {status} before it listened:\n{text}"
            )
        if len(urls) >= 2:
            return urls[0].removesuffix("/v1"), urls[1]
        time.sleep(0.02)
    raise AssertionError(f"the gateway did not listen within {WITHIN_S} s:\n{stderr.read_text()}")


@asynccontextmanager
async def fleet_client(running: FleetProcesses) -> AsyncIterator[FleetClient]:
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as http:
        yield FleetClient(running, http)
