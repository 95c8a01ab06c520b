"""Tests that open streams finish after SIGTERM, or end with an error event at the time limit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from tests.duration_limits import pace
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet

LONG_S = 600.0
"""Maximum seconds of a request or a shutdown, which no test reaches."""
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
    gateway: GatewayProcess, streams: int, tokens: int, unstreamed: int, engines: list[str]
) -> Counter[str]:
    # Send SIGTERM while requests are open; return how many ended in which way.
    #
    # Engines that decode slowly because of a fault lose it when the gateway accepts no more
    # connections.
    begun = asyncio.Semaphore(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=LONG_S)
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
        if engines:
            await until_draining(http, gateway)
            # The gateway still serves during its grace period.
            assert await send_streamed(http, gateway.url, begun, 1) == "complete"
            await until_closed(gateway)
            assert not any(task.done() for task in tasks)
            for engine in engines:
                async with http.delete(f"{engine}/mock/fault") as answer:
                    assert answer.status == 200
        return Counter(await asyncio.gather(*tasks))


async def until_draining(http: aiohttp.ClientSession, gateway: GatewayProcess) -> None:
    state = ""
    while state != "draining":
        async with http.get(f"{gateway.admin_url}/readyz") as answer:
            state = (await answer.text()).strip()


async def until_closed(gateway: GatewayProcess) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.05)


@contextmanager
def fleet(
    folder: Path, grace: str, shutdown: str, *options: str
) -> Iterator[tuple[GatewayProcess, list[str]]]:
    with (
        mock_fleet(*options, "--max-num-seqs", "512") as urls,
        gateway_process(folder, CONFIG.format(*urls, grace=grace, shutdown=shutdown)) as gateway,
    ):
        yield gateway, urls


def test_no_open_stream_is_truncated(tmp_path: Path) -> None:
    # Decoding is slow until the gateway accepts no more connections, so that no stream ends before.
    options = "--speed", "2", "--fault", "slow:x=200:decode"
    # A client without CPU would miss a short grace period.
    with fleet(tmp_path, f"{3 * pace():.1f}s", f"{LONG_S:.0f}s", *options) as (gateway, urls):
        counts = asyncio.run(terminate_under_load(gateway, 500, 300, 0, urls))
    assert counts == {"complete": 500}


def test_requests_open_at_the_shutdown_limit_end_with_a_retryable_error(tmp_path: Path) -> None:
    with fleet(tmp_path, "100ms", "1s", "--speed", "0.25") as (gateway, _):
        counts = asyncio.run(terminate_under_load(gateway, 100, 20_000, 20, []))
    assert counts == {"error_event": 100, "503 shutting_down true close": 20}
