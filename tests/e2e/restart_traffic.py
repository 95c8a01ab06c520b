"""Sends traffic during a restart of a gateway, and counts refused and truncated requests.

Streams reuse connections, and short requests open new ones. So a restart happens both with idle
connections and with connections that are not accepted yet. The module can also restart a gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import aiohttp

from gateway.restart.old_process_side import READY_TIMEOUT_S
from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import GatewayProcess
from tests.metrics_page import total

STARTS_WITHIN_S = READY_TIMEOUT_S + PATIENCE_S  # the gateway itself gives up first
ACCEPTS = re.compile(r"the successor process \(pid (\d+)\) accepts connections")


class Traffic:
    def __init__(self, url: str, model: str = "demo-8b", tokens: int = 40) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.began = 0
        self._url, self._model, self._tokens = url, model, tokens
        self._stopping = False

    async def run(self, streams: int, shorts: int) -> None:
        persistent, fresh = (
            aiohttp.TCPConnector(limit=0),
            aiohttp.TCPConnector(limit=0, force_close=True),
        )
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(connector=persistent, timeout=timeout) as on_kept,
            aiohttp.ClientSession(connector=fresh, timeout=timeout) as on_fresh,
        ):
            await asyncio.gather(
                *(self._again(self._stream, on_kept, number) for number in range(streams)),
                *(self._again(self._short, on_fresh, number) for number in range(shorts)),
                *(self._again(self._short, on_kept, number) for number in range(shorts)),
            )

    def stop(self) -> None:
        self._stopping = True

    async def _again(self, ask: Any, http: aiohttp.ClientSession, number: int) -> None:
        while not self._stopping:
            self.began += 1
            try:
                self.counts[await ask(http, number)] += 1
            except aiohttp.ClientConnectorError as error:
                self._problem("refused", error)
            except (aiohttp.ClientError, TimeoutError) as error:
                self._problem("cut", error)

    def _problem(self, kind: str, error: Exception) -> None:
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {type(error).__name__}: {error}")

    async def _stream(self, http: aiohttp.ClientSession, number: int) -> str:
        body = self._body(number) | {"stream": True, "max_tokens": self._tokens}
        async with http.post(f"{self._url}/v1/chat/completions", json=body) as answer:
            text = await answer.read()
            if answer.status != 200:
                return self._refusal(answer, text)
            whole = text.rstrip().endswith(b"[DONE]") and text.count(b'"delta"') >= self._tokens
            return "streams answered" if whole else self._cut(text)

    async def _short(self, http: aiohttp.ClientSession, number: int) -> str:
        await asyncio.sleep(0.02)
        async with http.post(
            f"{self._url}/v1/chat/completions", json=self._body(number) | {"max_tokens": 1}
        ) as answer:
            body = await answer.read()
            return "requests answered" if answer.status == 200 else self._refusal(answer, body)

    def _cut(self, text: bytes) -> str:
        self.problems.append(f"cut: {text[-300:].decode(errors='replace')}")
        return "cut"

    def _refusal(self, answer: aiohttp.ClientResponse, body: bytes) -> str:
        self.problems.append(f"{answer.status}: {body[:500].decode(errors='replace')}")
        return f"status {answer.status}"

    def _body(self, number: int) -> dict[str, Any]:
        words = f"You are assistant number {number % 7}. " * 200
        messages = [
            {"role": "system", "content": words},
            {"role": "user", "content": f"Question {self.began}?"},
        ]
        return {"model": self._model, "messages": messages}


@asynccontextmanager
async def traffic(url: str, streams: int, shorts: int, tokens: int = 40) -> AsyncIterator[Traffic]:
    background = Traffic(url, tokens=tokens)
    task = asyncio.create_task(background.run(streams, shorts))
    try:
        yield background
    finally:
        background.stop()
        await task


def get_page(gateway: GatewayProcess, path: str) -> bytes:
    with urllib.request.urlopen(gateway.admin_url + path, timeout=PATIENCE_S) as answer:
        body: bytes = answer.read()
        return body


def learned_state(gateway: GatewayProcess) -> dict[str, Any]:
    shown = json.loads(get_page(gateway, "/endpoints"))["endpoints"]
    return {
        "index_bytes": int(
            total(get_page(gateway, "/metrics").decode(), "penstock_prefix_index_bytes")
        ),
        "held_tokens": sum(row["held_tokens"] for row in shown),
        "states": {row["name"]: row["state"] for row in shown},
    }


async def restart(gateway: GatewayProcess, pid: int) -> int:
    # Restart a gateway with SIGUSR2; return its successor's pid once that accepts connections.
    known = len(ACCEPTS.findall(gateway.stderr_text))
    os.kill(pid, signal.SIGUSR2)
    try:
        async with asyncio.timeout(STARTS_WITHIN_S):
            while len(pids := ACCEPTS.findall(gateway.stderr_text)) == known:
                assert "restart failed" not in gateway.stderr_text, gateway.stderr_text
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(
            f"no successor process was ready within {STARTS_WITHIN_S:g} s: {gateway.stderr_text}"
        ) from None
    return int(pids[-1])


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while is_alive(pid):
            await asyncio.sleep(0.05)


@contextmanager
def killing_successors(gateway: GatewayProcess) -> Iterator[None]:
    # Kill all successor processes at the end of a `with` block.
    #
    # They are not children of the test process.
    try:
        yield
    finally:
        for pid in map(int, ACCEPTS.findall(gateway.stderr_text)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
