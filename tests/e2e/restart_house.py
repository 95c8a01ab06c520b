"""A gateway that is restarted under load: traffic that counts what was refused or cut, and the process that serves now.

Streams run on kept connections, short requests on new ones, so that both the accept queue and idle connections are
met by a restart.
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

from tests.e2e.processes import Gateway
from tests.fair_time import PATIENCE_S
from tests.scraped import total

STARTS_WITHIN_S = 60.0  # imports alone take long on a machine with many other jobs
ACCEPTS = re.compile(r"the successor \(pid (\d+)\) accepts connections")


class Traffic:
    """Streams and short requests until stop(); `counts` says what became of them."""

    def __init__(self, url: str, model: str = "demo-8b", tokens: int = 40) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.began = 0
        self._url, self._model, self._tokens = url, model, tokens
        self._stopping = False

    async def run(self, streams: int, shorts: int) -> None:
        kept, fresh = aiohttp.TCPConnector(limit=0), aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(connector=kept, timeout=timeout) as on_kept,
            aiohttp.ClientSession(connector=fresh, timeout=timeout) as on_fresh,
        ):
            await asyncio.gather(
                *(self._again(self._stream, on_kept, number) for number in range(streams)),
                *(self._again(self._short, on_fresh, number) for number in range(shorts)),
                *(self._again(self._short, on_kept, number) for number in range(shorts)),
            )

    def stop(self) -> None:
        """Whatever is under way ends by itself."""
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
        async with http.post(f"{self._url}/v1/chat/completions", json=self._body(number) | {"max_tokens": 1}) as answer:
            body = await answer.read()
            return "requests answered" if answer.status == 200 else self._refusal(answer, body)

    def _cut(self, text: bytes) -> str:
        """A stream that ended early; its last bytes go to `problems`."""
        self.problems.append(f"cut: {text[-300:].decode(errors='replace')}")
        return "cut"

    def _refusal(self, answer: aiohttp.ClientResponse, body: bytes) -> str:
        """The status, as what became of a request; the engine's or gateway's words go to `problems`."""
        self.problems.append(f"{answer.status}: {body[:500].decode(errors='replace')}")
        return f"status {answer.status}"

    def _body(self, number: int) -> dict[str, Any]:
        words = f"You are assistant number {number % 7}. " * 200
        messages = [{"role": "system", "content": words}, {"role": "user", "content": f"Question {self.began}?"}]
        return {"model": self._model, "messages": messages}


@asynccontextmanager
async def traffic(url: str, streams: int, shorts: int, tokens: int = 40) -> AsyncIterator[Traffic]:
    """Runs while the block does, and is over when it is left."""
    made = Traffic(url, tokens=tokens)
    task = asyncio.create_task(made.run(streams, shorts))
    try:
        yield made
    finally:
        made.stop()
        await task


def get(home: Gateway, path: str) -> bytes:
    with urllib.request.urlopen(home.admin_url + path, timeout=PATIENCE_S) as answer:
        body: bytes = answer.read()
        return body


def learned(home: Gateway) -> dict[str, Any]:
    """What the process that answers now has learned, as its admin server shows it."""
    shown = json.loads(get(home, "/endpoints"))["endpoints"]
    return {
        "index_bytes": int(total(get(home, "/metrics").decode(), "penstock_prefix_index_bytes")),
        "held_tokens": sum(each["held_tokens"] for each in shown),
        "states": {each["name"]: each["state"] for each in shown},
    }


async def restart(home: Gateway, pid: int) -> int:
    """SIGUSR2 to the process that serves; the pid of its successor once that one accepts connections."""
    known = len(ACCEPTS.findall(home.said))
    os.kill(pid, signal.SIGUSR2)
    try:
        async with asyncio.timeout(STARTS_WITHIN_S):
            while len(found := ACCEPTS.findall(home.said)) == known:
                assert "restart failed" not in home.said, home.said
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"no successor within {STARTS_WITHIN_S:g} s: {home.said}") from None
    return int(found[-1])


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while is_alive(pid):
            await asyncio.sleep(0.05)


@contextmanager
def ended(home: Gateway) -> Iterator[None]:
    """No successor outlives the block, whatever happens in it: they are no children of ours."""
    try:
        yield
    finally:
        for pid in map(int, ACCEPTS.findall(home.said)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """A zombie that waits for its parent is not alive."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
