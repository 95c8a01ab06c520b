"""SIGUSR2 under load: nothing is refused or cut, and the successor knows what the old process had learned."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import Gateway, gateway, mock_fleet
from tests.e2e.restart_house import ended, is_alive, learned, restart, traffic, until_gone
from tests.fair_time import PATIENCE_S
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


def asked(kept: http.client.HTTPConnection, path: str, body: bytes | None = None) -> tuple[int, str | None]:
    """The status of an answer on a kept connection, and what it says about that connection."""
    headers = {} if body is None else {"content-type": "application/json"}
    kept.request("GET" if body is None else "POST", path, body, headers)
    answer = kept.getresponse()
    answer.read()
    return answer.status, answer.getheader("connection")


async def idle_connections(home: Gateway) -> None:
    """One of ordinary requests, one on the other parser: each gets one more answer from the old process."""
    chat = b'{"model": "demo-8b", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}'
    ways: list[tuple[str, bytes | None]] = [("/v1/chat/completions", chat), ("/v1/models", None)]
    kept = [http.client.HTTPConnection("127.0.0.1", home.port, timeout=PATIENCE_S) for _ in ways]
    for connection, (path, body) in zip(kept, ways, strict=True):
        status, said = await asyncio.to_thread(asked, connection, path, body)
        assert (status, said) in ((200, None), (200, "keep-alive"))
    successor = await restart(home, home.pid)
    for connection, (path, body) in zip(kept, ways, strict=True):
        answered = await asyncio.to_thread(asked, connection, path, body)
        assert (path, *answered) == (path, 200, "close")
    await until_gone(home.pid)
    os.kill(successor, signal.SIGTERM)
    await until_gone(successor)


def test_an_idle_connection_gets_one_more_answer_which_says_that_it_closes(tmp_path: Path, engines: list[str]) -> None:
    config = CONFIG.format(*engines, dead=free_port()).replace("idle_timeout: 2s", "idle_timeout: 60s")
    with gateway(tmp_path, config, "") as home, ended(home):
        asyncio.run(idle_connections(home))


async def restarted_twice(home: Gateway) -> None:
    async with traffic(home.url, streams=12, shorts=2) as load:
        await asyncio.sleep(2.0)
        before = learned(home)
        pids = [home.pid]
        for _ in range(2):
            pids.append(await restart(home, pids[-1]))
            after = learned(home)
            assert after["index_bytes"] >= 0.9 * before["index_bytes"] > 0
            # Answers that report fewer cached tokens than believed lower this at any time, restart or not.
            assert after["held_tokens"] >= 0.5 * before["held_tokens"] > 0
            assert after["states"]["dead"] == before["states"]["dead"] == "ejected"
            await asyncio.sleep(1.0)
    assert load.counts["streams answered"] > 0
    assert load.counts.keys() == {"streams answered", "requests answered"}, load.problems
    await until_gone(pids[0])
    await until_gone(pids[1])
    os.kill(pids[2], signal.SIGTERM)
    await until_gone(pids[2])


def test_two_restarts_under_load_refuse_and_cut_nothing_and_keep_what_was_learned(
    tmp_path: Path, engines: list[str]
) -> None:
    with gateway(tmp_path, CONFIG.format(*engines, dead=free_port()), "") as home, ended(home):
        asyncio.run(restarted_twice(home))
        assert "Traceback" not in home.said, home.said
        assert home.said.count("restart: restored the state of process") == 2


async def until_said(home: Gateway, text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while text not in home.said:
            await asyncio.sleep(0.05)


async def failed_restart(home: Gateway, file: Path) -> None:
    good = file.read_text()
    async with traffic(home.url, streams=4, shorts=1) as load:
        file.write_text(f"{good}\nnonsense: 1\n")
        os.kill(home.pid, signal.SIGUSR2)
        await until_said(home, "restart failed: the successor ended with code 1")
        file.write_text(good)
        assert is_alive(home.pid)
        successor = await restart_after_failure(home)
    assert load.counts.keys() == {"streams answered", "requests answered"}, load.problems
    os.kill(successor, signal.SIGTERM)  # while the old process still drains: both have to end
    await until_gone(successor)
    await until_gone(home.pid)


async def restart_after_failure(home: Gateway) -> int:
    home.forget("restart failed")
    return await restart(home, home.pid)


def test_a_successor_that_cannot_start_leaves_the_old_process_serving_and_its_reason_is_told(
    tmp_path: Path, engines: list[str]
) -> None:
    config = CONFIG.format(*engines, dead=free_port()) + "reload: {watch: false}\n"
    with gateway(tmp_path, config, "") as home, ended(home):
        asyncio.run(failed_restart(home, tmp_path / "gateway.yaml"))
        assert "nonsense" in home.said
