"""SIGTERM with many open streams: none is truncated; and after the limit everybody is told rather than cut."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import aiohttp

from tests.e2e.processes import Gateway, gateway, mock_fleet
from tests.fair_time import pace

CONFIG = """
models: [{{name: demo-8b, pool: main}}]
pools:
  main:
    policy: least_loaded
    admission: none
    endpoints: [{{url: '{0}', max_concurrency: 400}}, {{url: '{1}', max_concurrency: 400}}]
timeouts: {{grace: {grace}, shutdown: {shutdown}}}
"""


async def stream(http: aiohttp.ClientSession, url: str, begun: asyncio.Semaphore, tokens: int) -> str:
    body = {"model": "demo-8b", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "hi"}]}
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            text = await answer.content.readany()
            begun.release()
            text += await answer.read()
    except aiohttp.ClientError as error:
        return type(error).__name__
    if text.rstrip().endswith(b"[DONE]") and text.count(b'"delta"') >= tokens:
        return "whole"
    events = [json.loads(event.removeprefix(b"data: ")) for event in text.strip().split(b"\n\n")]
    error = events[-1].get("error", {})
    return "told" if (error.get("code"), error.get("param")) == ("shutting_down", None) else f"truncated {text[-80:]!r}"


async def whole(http: aiohttp.ClientSession, url: str, tokens: int) -> str:
    body = {"model": "demo-8b", "max_tokens": tokens, "messages": [{"role": "user", "content": "hi"}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        code = (await answer.json())["error"]["code"]
        return f"{answer.status} {code} {answer.headers['x-should-retry']} {answer.headers['connection']}"


async def ended(home: Gateway, streams: int, tokens: int, wholes: int = 0) -> Counter[str]:
    """What became of streams that were open when SIGTERM came, and of requests for whole answers."""
    begun = asyncio.Semaphore(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=100)) as http:
        tasks = [asyncio.create_task(stream(http, home.url, begun, tokens)) for _ in range(streams)]
        tasks += [asyncio.create_task(whole(http, home.url, tokens)) for _ in range(wholes)]
        for _ in range(streams):
            await begun.acquire()
        assert not any(task.done() for task in tasks)
        os.kill(home.pid, signal.SIGTERM)
        said = ""
        while said != "draining":
            async with http.get(f"{home.admin_url}/readyz") as answer:
                said = (await answer.text()).strip()
        late = asyncio.create_task(stream(http, home.url, begun, 1))
        assert await late == "whole"  # within its grace the gateway still serves
        return Counter(await asyncio.gather(*tasks))


def fates(folder: Path, speed: str, shutdown: str, streams: int, tokens: int, wholes: int = 0) -> Counter[str]:
    with (
        mock_fleet("--speed", speed, "--max-num-seqs", "512") as urls,
        gateway(folder, CONFIG.format(*urls, grace=f"{2 * pace():.1f}s", shutdown=shutdown)) as home,
    ):
        return asyncio.run(ended(home, streams, tokens, wholes))


def test_no_open_stream_is_truncated(tmp_path: Path) -> None:
    assert fates(tmp_path, "4", "60s", streams=500, tokens=int(300 * pace())) == {"whole": 500}


def test_who_is_not_done_at_the_limit_is_told_to_ask_again(tmp_path: Path) -> None:
    told = fates(tmp_path, "0.25", "1s", streams=100, tokens=20_000, wholes=20)
    assert told == {"told": 100, "503 shutting_down true close": 20}
