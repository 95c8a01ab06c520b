"""Tests of a gateway whose listening sockets belong to systemd: restarts, and pauses between them.

The test does what systemd does: it opens the sockets, passes them on, and keeps them open.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp

from tests.duration_limits import PATIENCE_S
from tests.e2e.processes import (
    ENV,
    PATIENCE,
    GatewayProcess,
    complete_config,
    mock_fleet,
    run_process,
)
from tests.e2e.restart_traffic import killing_successors, restart, traffic, until_gone
from tests.ports import free_port

CONFIG = """
models: [{{name: demo-8b, pool: main}}]
pools: {{main: {{admission: none, endpoints: [{{url: '{0}'}}, {{url: '{1}'}}]}}}}
limits: {{idle_timeout: 2s}}
reload: {{watch: false}}
"""
BODY = {"model": "demo-8b", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def systemd_sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=512) as api,
        socket.create_server(("127.0.0.1", 0)) as admin,
    ):
        yield api, admin


@contextmanager
def activated(file: Path, api: socket.socket, admin: socket.socket) -> Iterator[GatewayProcess]:
    # Run a gateway that gets these sockets as descriptors 3 and 4.
    fds = api.fileno(), admin.fileno()
    # The sockets move to high descriptors first, because theirs may be 3 and 4 in another order.
    moves = f'exec 103<&{fds[0]} 104<&{fds[1]}; export LISTEN_PID=$$; exec "$@" 3<&103 4<&104'
    serve = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    with run_process(
        ["bash", "-c", moves, "bash", *serve],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=fds,
        env=ENV | {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "api:admin"},
    ) as process:
        assert process.stderr
        gateway = GatewayProcess(process)
        gateway.read_until_ready(process.stderr)
        yield gateway


async def ask(http: aiohttp.ClientSession, url: str) -> int:
    async with http.post(f"{url}/v1/chat/completions", json=BODY) as answer:
        await answer.read()
        return answer.status


async def restart_and_end(gateway: GatewayProcess, file: Path) -> None:
    async with traffic(gateway.url, streams=8, shorts=2) as load:
        await asyncio.sleep(0.5)
        # The successor has systemd's sockets whatever ports its configuration names.
        file.write_text(file.read_text().replace("api: {port: 0}", f"api: {{port: {free_port()}}}"))
        successor = await restart(gateway, gateway.pid)
        await asyncio.sleep(0.5)
    assert load.counts.keys() == {"streams answered", "requests answered"}, load.problems
    await until_gone(gateway.pid)
    os.kill(successor, signal.SIGTERM)
    await until_gone(successor)


async def ask_while_none_serves(file: Path, api: socket.socket, admin: socket.socket) -> None:
    url = f"http://127.0.0.1:{api.getsockname()[1]}"
    timeout = aiohttp.ClientTimeout(total=3 * PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        waiting = asyncio.create_task(ask(http, url))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        with ExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, activated(file, api, admin))
            assert await waiting == 200


def test_a_restart_with_sockets_of_systemd_refuses_no_request_and_cuts_no_stream(
    tmp_path: Path,
) -> None:
    file = tmp_path / "gateway.yaml"
    with mock_fleet("--speed", "4") as urls, systemd_sockets() as (api, admin):
        file.write_text(complete_config(CONFIG.format(*urls)) + PATIENCE)
        with activated(file, api, admin) as gateway, killing_successors(gateway):
            assert gateway.port == api.getsockname()[1]
            asyncio.run(restart_and_end(gateway, file))
            assert "Traceback" not in gateway.stderr_text, gateway.stderr_text


def test_a_request_waits_while_systemd_has_the_sockets_and_no_gateway_runs(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    with mock_fleet() as urls, systemd_sockets() as (api, admin):
        file.write_text(complete_config(CONFIG.format(*urls)) + PATIENCE)
        with activated(file, api, admin) as gateway:
            os.kill(gateway.pid, signal.SIGTERM)
            assert gateway.wait() == 0
        asyncio.run(ask_while_none_serves(file, api, admin))
