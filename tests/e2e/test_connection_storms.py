"""Tests that many simultaneous connections of some clients do not delay clients elsewhere.

The delay is CPU time of the gateway, so it does not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import pytest

from tests.duration_limits import PATIENCE_S, TRIES
from tests.e2e.attackers import ATTACKER, CHUNKED, IP_BIND_ADDRESS_NO_PORT, call, head
from tests.e2e.gateway_under_attack import Attacked, attacked_gateway, canned_engine
from tests.e2e.processes import GatewayProcess, gateway_process, mock_fleet
from tests.e2e.raw_connection import RawConnection, post
from tests.e2e.restart_traffic import killing_successors, restart, until_gone

REQUEST = post(
    {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions",
    "Authorization: Bearer sk-bench",
)
GET = b"GET /v1/models HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
CROWD = 800
IDLE_S = 0.2  # the gateway is idle if it uses less than a fifth of this time
MAX_RATIO = 80.0
"""Maximum CPU time from the connect of a client beside a crowd to its response, by that without.

Where the crowd is served first, it is several hundred.
"""
STORMS: dict[str, Callable[[], bytes]] = {
    "chunked bodies": lambda: head(CHUNKED) + b"1\r\n{\r\n",
    "requests": call,
    "requests to aiohttp": lambda: head(start="GET /v1/models HTTP/1.1"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("storms")
    with (
        canned_engine() as calm,
        canned_engine() as hostile,
        attacked_gateway(folder, [f"http://127.0.0.1:{calm}"], hostile) as attacked,
    ):
        yield attacked
        assert "Traceback" not in attacked.gateway.stderr_text, attacked.gateway.stderr_text[-2000:]


def cost_of_a_new_client(target: Attacked) -> float:
    # Return the gateway's CPU seconds from a client's connect to its response.
    before = target.cost.cpu_s
    with RawConnection(target.gateway.port) as client:
        client.send(REQUEST)
        assert client.answer().status == 200
        return target.cost.cpu_s - before


def cost_without_a_crowd(target: Attacked) -> float:
    # Wait until the gateway has closed the connections of an earlier crowd, then measure.
    before = -1.0
    while (now := target.cost.cpu_s) - before > IDLE_S / 5:
        before = now
        time.sleep(IDLE_S)
    return median(cost_of_a_new_client(target) for _ in range(10))


@contextmanager
def crowd(port: int, sent: bytes, *, is_first: bool = True) -> Iterator[None]:
    # Connect CROWD clients from another address; then all of them send the same bytes.
    #
    # If it is not the first request of a client, all have been answered once before.
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(CROWD)]
        for client in clients:
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            client.bind((ATTACKER, 0))
            client.connect_ex(("127.0.0.1", port))
        if not is_first:
            for client in clients:
                client.setblocking(True)
                client.send(sent)
                assert client.recv(65536).startswith(b"HTTP/1.1 200")
        for client in clients:
            with suppress(OSError):
                client.send(sent)
        yield


@pytest.mark.parametrize("name", STORMS)
def test_a_new_client_is_served_soon_while_a_crowd_connects(target: Attacked, name: str) -> None:
    calm_s, ratios = cost_without_a_crowd(target), list[float]()
    for _ in range(TRIES):
        with crowd(target.gateway.port, STORMS[name]()):
            ratios.append(cost_of_a_new_client(target) / calm_s)
        cost_without_a_crowd(target)
    assert min(ratios) <= MAX_RATIO, ratios


def test_a_crowd_does_not_make_the_kernels_table_of_open_files_grow(target: Attacked) -> None:
    # In a process with threads, the growth of the table blocks an accept() for about 13 ms.
    status = Path(f"/proc/{target.gateway.pid}/status")
    before = [line for line in status.read_text().splitlines() if line.startswith("FDSize")]
    with crowd(target.gateway.port, call()):
        cost_of_a_new_client(target)
        after = [line for line in status.read_text().splitlines() if line.startswith("FDSize")]
    cost_without_a_crowd(target)
    assert before == after


@pytest.mark.parametrize("name", ["requests", "requests to aiohttp"])
def test_a_new_client_is_served_soon_while_a_crowd_sends_its_next_requests(
    target: Attacked, name: str
) -> None:
    calm_s, ratios = cost_without_a_crowd(target), list[float]()
    for _ in range(TRIES):
        with crowd(target.gateway.port, STORMS[name](), is_first=False):
            ratios.append(cost_of_a_new_client(target) / calm_s)
        cost_without_a_crowd(target)
    assert min(ratios) <= MAX_RATIO, ratios


async def one_client(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(GET)
        return (await reader.read()).partition(b"\r\n")[0]
    except ConnectionError as error:
        return repr(error).encode()
    finally:
        writer.close()


async def crowds_during_a_restart(gateway: GatewayProcess) -> None:
    answers: set[bytes] = set()
    is_over = asyncio.Event()

    async def connect_crowds() -> None:
        while not is_over.is_set():
            async with asyncio.timeout(PATIENCE_S):
                answers.update(
                    await asyncio.gather(*(one_client(gateway.port) for _ in range(200)))
                )

    crowds = asyncio.create_task(connect_crowds())
    successor = await restart(gateway, gateway.pid)
    await until_gone(gateway.pid)
    is_over.set()
    await crowds
    assert answers == {b"HTTP/1.1 200 OK"}
    os.kill(successor, signal.SIGTERM)
    await until_gone(successor)


def test_no_client_of_a_crowd_is_refused_or_forgotten_during_a_restart(tmp_path: Path) -> None:
    with mock_fleet() as urls:
        config = f"pools: {{main: {{endpoints: [{{url: '{urls[0]}'}}]}}}}\n"
        with gateway_process(tmp_path, config, "") as gateway, killing_successors(gateway):
            asyncio.run(crowds_during_a_restart(gateway))
            assert "Traceback" not in gateway.stderr_text, gateway.stderr_text
