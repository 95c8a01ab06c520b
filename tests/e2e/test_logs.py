"""Tests of log files under load: the access log is moved and rotated, the operator log is JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet

BODY = {"model": "demo-8b", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
REQUESTS = 400


async def request_ids(gateway: GatewayProcess, count: int) -> list[str]:
    async def one(http: aiohttp.ClientSession) -> str:
        async with http.post(f"{gateway.url}/v1/chat/completions", json=BODY) as answer:
            assert answer.status == 200
            return answer.headers["x-request-id"]

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=16, force_close=True)
    ) as http:
        return await asyncio.gather(*(one(http) for _ in range(count)))


def logged_request_ids(folder: Path) -> list[str]:
    # Return the request ids in all access log files. Raises an error for an incomplete line.
    files = sorted(folder.glob("access.jsonl*"))
    return sorted(
        json.loads(line)["id"] for file in files for line in file.read_text().splitlines()
    )


async def until_exists(file: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not file.exists():
            await asyncio.sleep(0.02)


async def ask_and_move(gateway: GatewayProcess, file: Path) -> list[str]:
    # Send requests before and after the log is moved away and reopened by SIGHUP, until it rotates.
    #
    # Returns their request ids.
    ids = await request_ids(gateway, REQUESTS)
    await asyncio.sleep(1.0)  # so that all lines are written before the move
    file.rename(file.with_name("access.jsonl.moved"))
    os.kill(gateway.pid, signal.SIGHUP)
    await until_exists(file)
    # Workers write lines in batches and rotate between two batches; how many is a matter of time.
    async with asyncio.timeout(PATIENCE_S):
        while not list(file.parent.glob("access.jsonl.[0-9]*")):
            ids += await request_ids(gateway, REQUESTS)
    return ids + await request_ids(gateway, REQUESTS)


def test_two_workers_lose_no_log_line_when_it_is_moved_and_rotated_and_report_their_drain(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    file = logs / "access.jsonl"
    observability = (
        f"{{access_log: '{file}', access_rotate: {{size: 64KiB, keep: 50}}, log: {{format: json}}}}"
    )
    with (
        mock_fleet() as urls,
        gateway_process(
            tmp_path,
            f"workers: 2\npools: {{main: {{endpoints: [{{url: '{urls[0]}'}}]}}}}\n",
            "",
            observability,
        ) as gateway,
    ):
        ids = asyncio.run(ask_and_move(gateway, file))
        os.kill(gateway.pid, signal.SIGTERM)
        gateway.wait()
        assert logged_request_ids(logs) == sorted(ids)
        assert list(logs.glob("access.jsonl.[0-9]*"))
    records: list[dict[str, Any]] = [json.loads(line) for line in gateway.stderr_text.splitlines()]
    messages = [record["message"] for record in records]
    assert any(record.startswith("SIGTERM") for record in messages)
    assert {
        record.get("worker") for record in records if record["message"].startswith("drain ended")
    } == {None, 0, 1}
    assert messages[-1].startswith("drain ended")
