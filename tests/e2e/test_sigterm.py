"""SIGTERM with many open streams: none is truncated; and after the limit each is told rather than cut."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.processes import Gateway, gateway, mock_fleet

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
    return "told" if b'"error"' in text and b"gateway stopped" in text else f"truncated {text[-80:]!r}"


async def ended(home: Gateway, streams: int, tokens: int) -> Counter[str]:
    """What became of streams that were open when SIGTERM came."""
    begun = asyncio.Semaphore(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as http:
        tasks = [asyncio.create_task(stream(http, home.url, begun, tokens)) for _ in range(streams)]
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


@pytest.mark.parametrize(
    ("streams", "tokens", "shutdown", "fate"), [(500, 300, "20s", "whole"), (100, 20_000, "500ms", "told")]
)
def test_no_open_stream_is_truncated(tmp_path: Path, streams: int, tokens: int, shutdown: str, fate: str) -> None:
    with (
        mock_fleet("--speed", "4", "--max-num-seqs", "512") as urls,
        gateway(tmp_path, CONFIG.format(*urls, grace="1s", shutdown=shutdown)) as home,
    ):
        fates = asyncio.run(ended(home, streams, tokens))
    assert fates == {fate: streams}
