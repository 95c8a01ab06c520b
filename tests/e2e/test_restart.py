"""Tests of restarts by SIGUSR2 under load: no request is lost, and learned state is kept."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet
from tests.e2e.restart_traffic import (
    is_alive,
    killing_successors,
    learned_state,
    restart,
    traffic,
    until_gone,
)
from tests.ports import free_port

CONFIG = """
models: [{{name: demo-8b, pool: main}}]
pools:
  main:
    policy: prefix_aware
    admission: none
    waiting_room: {{size: 512, timeout: 60s}}
    endpoints: [{{url: '{0}', name: a}}, {{url: '{1}', name: b}}, {{url: 'http://127.0.0.1:{dead}', name: dead}}]
health: {{backoff: 60s, backoff_max: 60s, timeout: 10s, progress: 60s}}
limits: {{idle_timeout: 2s}}
"""


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    with mock_fleet("--speed", "4") as urls:
        yield urls


def send(
    connection: http.client.HTTPConnection, path: str, body: bytes | None = None
) -> tuple[int, str | None]:
    # Send a request on an open connection; return the status and the Connection header.
    headers = {} if body is None else {"content-type": "application/json"}
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.getheader("connection")


async def check_idle_connections(gateway: GatewayProcess) -> None:
    # Check that the old process answers one more request on each idle connection.
    #
    # One connection sent a chat, the other a GET, so that both HTTP parsers are covered.
    chat = b'{"model": "demo-8b", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}'
    requests: list[tuple[str, bytes | None]] = [
        ("/v1/chat/completions", chat),
        ("/v1/models", None),
    ]
    connections = [
        http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S) for _ in requests
    ]
    for connection, (path, body) in zip(connections, requests, strict=True):
        status, connection_header = await asyncio.to_thread(send, connection, path, body)
        assert (status, connection_header) in ((200, None), (200, "keep-alive"))
    successor = await restart(gateway, gateway.pid)
    for connection, (path, body) in zip(connections, requests, strict=True):
        answered = await asyncio.to_thread(send, connection, path, body)
        assert (path, *answered) == (path, 200, "close")
    await until_gone(gateway.pid)
    os.kill(successor, signal.SIGTERM)
    await until_gone(successor)


def test_an_idle_connection_gets_one_more_response_with_connection_close(
    tmp_path: Path, engines: list[str]
) -> None:
    config = CONFIG.format(*engines, dead=free_port()).replace(
        "idle_timeout: 2s", "idle_timeout: 60s"
    )
    with gateway_process(tmp_path, config, "") as gateway, killing_successors(gateway):
        asyncio.run(check_idle_connections(gateway))


async def restart_twice(gateway: GatewayProcess) -> None:
    async with traffic(gateway.url, streams=12, shorts=2) as load:
        await asyncio.sleep(2.0)
        before = learned_state(gateway)
        pids = [gateway.pid]
        for _ in range(2):
            pids.append(await restart(gateway, pids[-1]))
            after = learned_state(gateway)
            assert after["index_bytes"] >= 0.9 * before["index_bytes"] > 0
            # This number also falls if responses report fewer cached tokens than predicted.
            assert after["held_tokens"] >= 0.5 * before["held_tokens"] > 0
            assert after["states"]["dead"] == before["states"]["dead"] == "ejected"
            await asyncio.sleep(1.0)
    assert load.counts["streams answered"] > 0
    assert load.counts.keys() == {"streams answered", "requests answered"}, load.problems
    await until_gone(pids[0])
    await until_gone(pids[1])
    os.kill(pids[2], signal.SIGTERM)
    await until_gone(pids[2])


def test_two_restarts_under_load_fail_no_request_and_keep_the_learned_state(
    tmp_path: Path, engines: list[str]
) -> None:
    with (
        gateway_process(tmp_path, CONFIG.format(*engines, dead=free_port()), "") as gateway,
        killing_successors(gateway),
    ):
        asyncio.run(restart_twice(gateway))
        assert "Traceback" not in gateway.stderr_text, gateway.stderr_text
        assert gateway.stderr_text.count("restart: restored the state of process") == 2


async def wait_for_output(gateway: GatewayProcess, text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while text not in gateway.stderr_text:
            await asyncio.sleep(0.05)


async def fail_then_restart(gateway: GatewayProcess, file: Path) -> None:
    good = file.read_text()
    async with traffic(gateway.url, streams=4, shorts=1) as load:
        file.write_text(f"{good}\nnonsense: 1\n")
        os.kill(gateway.pid, signal.SIGUSR2)
        await wait_for_output(gateway, "restart failed: the successor ended with code 1")
        file.write_text(good)
        assert is_alive(gateway.pid)
        successor = await restart_after_failure(gateway)
    assert load.counts.keys() == {"streams answered", "requests answered"}, load.problems
    os.kill(successor, signal.SIGTERM)  # the old process still drains now
    await until_gone(successor)
    await until_gone(gateway.pid)


async def restart_after_failure(gateway: GatewayProcess) -> int:
    gateway.drop_lines("restart failed")
    return await restart(gateway, gateway.pid)


def test_a_successor_that_cannot_start_leaves_the_old_process_serving_and_is_logged(
    tmp_path: Path, engines: list[str]
) -> None:
    config = CONFIG.format(*engines, dead=free_port()) + "reload: {watch: false}\n"
    with gateway_process(tmp_path, config, "") as gateway, killing_successors(gateway):
        asyncio.run(fail_then_restart(gateway, tmp_path / "gateway.yaml"))
        assert "nonsense" in gateway.stderr_text
