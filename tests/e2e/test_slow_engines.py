"""Tests that a slow engine is ejected, and that abandoned prompts make no engine suspect.

The engines, the gateway and the client are separate processes. A healthy engine computes a prompt
in about 0.1 s, and a slow one in seconds. So a busy machine does not look like a slow engine.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.cli import main
from tests.command_runner import CommandRunner
from tests.duration_limits import TRIES
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet

MODEL = ("--model", "llama-3.1-70b-fp8", "--gpu", "h200", "--tp", "4", "--kv-tokens", "400000")
MOST_REQUESTS, AT_ONCE = 400, 6
LONG, SHORT = 8000, 300  # number of words in a long and in a short prompt


@contextmanager
def pool(folder: Path, options: str = "") -> Iterator[tuple[GatewayProcess, list[str]]]:
    with mock_fleet("--speed", "1", *MODEL) as urls:
        endpoints = ", ".join(f"{{url: '{url}'}}" for url in urls)
        config = f"pools: {{main: {{policy: round_robin, endpoints: [{endpoints}]}}}}\n{options}"
        with gateway_process(folder, config) as running:
            yield running, urls


@asynccontextmanager
async def client(running: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(running.url, connector=connector) as session:
        yield session


async def ask(http: aiohttp.ClientSession, number: int, words: int, tokens: int) -> None:
    prompt = " ".join(f"{number}-{word}" for word in range(words))
    body = {
        "model": MODEL[1],
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert b"[DONE]" in await answer.read()


async def endpoints(running: GatewayProcess, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
    async with http.get(f"{running.admin_url}/endpoints") as answer:
        page = await answer.json()
    return page["endpoints"]


async def make_slow(http: aiohttp.ClientSession, url: str) -> None:
    async with http.post(f"{url}/mock/fault", data=json.dumps({"spec": "slow:x=20"})) as answer:
        assert answer.status == 200, await answer.text()


async def test_a_slow_engine_is_ejected_and_named(tmp_path: Path) -> None:
    with pool(tmp_path) as (running, urls):
        async with client(running) as http:
            await make_slow(http, urls[0])
            asking: set[asyncio.Task[None]] = set()
            for number in range(MOST_REQUESTS):
                asking.add(asyncio.create_task(ask(http, number, SHORT, 8)))
                if len(asking) >= AT_ONCE:
                    done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                    assert [task.exception() for task in done] == [None] * len(done)
                page = {endpoint["url"]: endpoint for endpoint in await endpoints(running, http)}
                if page[urls[0]]["cause"] == "slow":
                    break
            await asyncio.gather(*asking)
            slow, other = (page[url] for url in urls)
            assert slow["cause"] == "slow", running.stderr_text
            assert slow["slow"]["ratio"] > 2.5
            assert other["cause"] != "slow"
        name = urls[0].removeprefix("http://")
        assert f"endpoint {name} is slow: " in running.stderr_text
        top = CommandRunner().invoke(main.run, ["top", "--once", "--admin", running.admin_url])
        assert re.search(rf"{name} .*slow", top.output), top.output
        assert "no problems" not in top.output


async def test_abandoned_long_prompts_make_no_engine_suspect(tmp_path: Path) -> None:
    # An engine that gets no CPU is slow, so one of several attempts has to go without suspicion.
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        if not await is_suspect_beside_abandoned_prompts(folder):
            return
    pytest.fail(f"an engine was suspect in each of {TRIES} attempts")


async def is_suspect_beside_abandoned_prompts(folder: Path) -> bool:
    # Every fourth request is a long prompt whose client leaves long before the engine ends the
    # step. Until the step ends, the streams of that engine pause and its next prompt waits.
    with pool(folder, "retries: {hedge: 0}\n") as (running, _):
        async with client(running) as http:
            streams = [asyncio.create_task(ask(http, number, 20, 4000)) for number in range(4)]
            for number in range(12):
                abandoned = asyncio.create_task(ask(http, 100 + number, LONG, 8))
                await asyncio.sleep(0.15)
                abandoned.cancel()
                for short in range(3):
                    await ask(http, 1000 + 3 * number + short, SHORT, 4)
            page = await endpoints(running, http)
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
        return " is suspect: " in running.stderr_text or any(
            endpoint["cause"] == "slow" for endpoint in page
        )
