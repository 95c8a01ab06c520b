"""The access log of two workers is moved and rotated under requests; the operator's log says what happened, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.processes import Gateway, gateway, mock_fleet
from tests.fair_time import PATIENCE_S

BODY = {"model": "demo-8b", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
REQUESTS = 400


async def request_ids(home: Gateway, count: int) -> list[str]:
    async def one(http: aiohttp.ClientSession) -> str:
        async with http.post(f"{home.url}/v1/chat/completions", json=BODY) as answer:
            assert answer.status == 200
            return answer.headers["x-request-id"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16, force_close=True)) as http:
        return await asyncio.gather(*(one(http) for _ in range(count)))


def logged(folder: Path) -> list[str]:
    """The ids in all files of the access log; every line must be whole."""
    files = sorted(folder.glob("access.jsonl*"))
    return sorted(json.loads(line)["id"] for file in files for line in file.read_text().splitlines())


async def until_exists(file: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not file.exists():
            await asyncio.sleep(0.02)


async def ask_and_move(home: Gateway, file: Path) -> list[str]:
    """Requests before, while and after the file is moved away; SIGHUP alone brings a new one."""
    ids = await request_ids(home, REQUESTS)
    await asyncio.sleep(1.0)  # until the last lines were written: what is moved below is all of it
    file.rename(file.with_name("access.jsonl.moved"))
    os.kill(home.pid, signal.SIGHUP)
    await until_exists(file)
    return ids + await request_ids(home, REQUESTS)


def test_no_line_of_two_workers_is_lost_when_the_log_is_moved_and_rotated_and_the_drain_is_told(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    file = logs / "access.jsonl"
    seen = f"{{access_log: '{file}', access_rotate: {{size: 64KiB, keep: 50}}, log: {{format: json}}}}"
    with (
        mock_fleet() as urls,
        gateway(tmp_path, f"workers: 2\npools: {{main: {{endpoints: [{{url: '{urls[0]}'}}]}}}}\n", "", seen) as home,
    ):
        ids = asyncio.run(ask_and_move(home, file))
        os.kill(home.pid, signal.SIGTERM)
        home.wait()
        assert logged(logs) == sorted(ids)
        assert len(list(logs.iterdir())) > 3
    said: list[dict[str, Any]] = [json.loads(line) for line in home.said.splitlines()]
    messages = [each["message"] for each in said]
    assert any(each.startswith("SIGTERM") for each in messages)
    assert {each.get("worker") for each in said if each["message"].startswith("drain ended")} == {None, 0, 1}
    assert messages[-1].startswith("drain ended")
