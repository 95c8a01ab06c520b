"""Tests that open streams finish after SIGTERM, or end with an error event at the time limit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import aiohttp

from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet
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


async def send_streamed(
    http: aiohttp.ClientSession, url: str, begun: asyncio.Semaphore, tokens: int
) -> str:
    body = {
        "model": "demo-8b",
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hi"}],
    }
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            text = await answer.content.readany()
            begun.release()
            text += await answer.read()
    except aiohttp.ClientError as error:
        return type(error).__name__
    if text.rstrip().endswith(b"[DONE]") and text.count(b'"delta"') >= tokens:
        return "complete"
    events = [json.loads(event.removeprefix(b"data: ")) for event in text.strip().split(b"\n\n")]
    error = events[-1].get("error", {})
    return (
        "error_event"
        if (error.get("code"), error.get("param")) == ("shutting_down", None)
        else f"truncated {text[-80:]!r}"
    )


async def send_unstreamed(http: aiohttp.ClientSession, url: str, tokens: int) -> str:
    body = {
        "model": "demo-8b",
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hi"}],
    }
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        code = (await answer.json())["error"]["code"]
        return f"{answer.status} {code} {answer.headers['x-should-retry']} {answer.headers['connection']}"


async def terminate_under_load(
    gateway: GatewayProcess, streams: int, tokens: int, unstreamed: int = 0
) -> Counter[str]:
    # Send SIGTERM while requests are open; return how many ended in which way.
    begun = asyncio.Semaphore(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=100 * pace())
    ) as http:
        tasks = [
            asyncio.create_task(send_streamed(http, gateway.url, begun, tokens))
            for _ in range(streams)
        ]
        tasks += [
            asyncio.create_task(send_unstreamed(http, gateway.url, tokens))
            for _ in range(unstreamed)
        ]
        for _ in range(streams):
            await begun.acquire()
        assert not any(task.done() for task in tasks)
        os.kill(gateway.pid, signal.SIGTERM)
        state = ""
        while state != "draining":
            async with http.get(f"{gateway.admin_url}/readyz") as answer:
                state = (await answer.text()).strip()
        late = asyncio.create_task(send_streamed(http, gateway.url, begun, 1))
        assert await late == "complete"  # the gateway still serves during its grace period
        return Counter(await asyncio.gather(*tasks))


def results_of_sigterm(
    folder: Path, speed: str, shutdown: str, streams: int, tokens: int, unstreamed: int = 0
) -> Counter[str]:
    with (
        mock_fleet("--speed", speed, "--max-num-seqs", "512") as urls,
        gateway_process(
            folder, CONFIG.format(*urls, grace=f"{2 * pace():.1f}s", shutdown=shutdown)
        ) as gateway,
    ):
        return asyncio.run(terminate_under_load(gateway, streams, tokens, unstreamed))


def test_no_open_stream_is_truncated(tmp_path: Path) -> None:
    shutdown = f"{60 * pace():.0f}s"
    # Slow mocks, so that no stream ends before the last one has begun.
    counts = results_of_sigterm(tmp_path, "0.5", shutdown, streams=500, tokens=int(300 * pace()))
    assert counts == {"complete": 500}


def test_requests_open_at_the_shutdown_limit_end_with_a_retryable_error(tmp_path: Path) -> None:
    counts = results_of_sigterm(tmp_path, "0.25", "1s", streams=100, tokens=20_000, unstreamed=20)
    assert counts == {"error_event": 100, "503 shutting_down true close": 20}
