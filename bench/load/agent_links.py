"""Measures how fast members of a fleet connect to a KV transfer agent while idle sockets occupy it.

Members prove that they know the fleet's key; idle sockets send nothing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from time import perf_counter
from typing import NamedTuple

from kvtransfer.transports.inproc import InprocWire
from kvtransfer.util.clock import ThreadClock
from tests.contract.kvtransfer.groups import KEY, SMALL, group
from tests.contract.kvtransfer.links import Owner, make
from tests.contract.kvtransfer.test_untrusted_peers import UnprovenPeer
from tests.e2e.process_cost import ProcessCost
from tests.e2e.processes import ENV
from tests.fair_time import PATIENCE_S

TRANSPORT, MISSES = "tcp", 20


class Source(NamedTuple):
    address: str
    port: int
    cost: ProcessCost


@asynccontextmanager
async def agent() -> AsyncIterator[Source]:
    command = [sys.executable, "-m", "tests.chaos.kv_peer", TRANSPORT, str(MISSES), "source"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=ENV)
    try:
        assert process.stdout is not None
        address = json.loads(await process.stdout.readline())["address"]
        port = int(address.rsplit(":", 1)[1].split("/")[0].split(",")[0])
        yield Source(address, port, ProcessCost(process.pid))
    finally:
        process.kill()
        await process.wait()


async def link_times(source: Source, links: int) -> list[float]:
    """Connect `links` members to a KV agent one after another.

    Returns the seconds until each is accepted.
    """
    members, times = group("d", SMALL, [make(TRANSPORT, InprocWire(ThreadClock()))]), []
    try:
        for _ in range(links):
            end, owner = make(TRANSPORT, InprocWire(ThreadClock())), Owner()
            end.start(owner, members.regions)
            began = perf_counter()
            link = await asyncio.to_thread(end.dial, source.address)
            await asyncio.wait_for(UnprovenPeer(link, owner, KEY).greet(), PATIENCE_S)
            times.append(perf_counter() - began)
            end.close()
    finally:
        members.forget()
    return times


@contextmanager
def idle_sockets(port: int, number: int) -> Iterator[None]:
    """Keep `number` connections open that send nothing, during a `with` block.

    A connection that the agent closes is replaced.
    """
    over = threading.Event()

    def hold() -> None:
        sockets: list[socket.socket] = []
        while not over.wait(0.001):
            with suppress(OSError):
                while len(sockets) < number:
                    sockets.append(socket.create_connection(("127.0.0.1", port), 5))
                    sockets[-1].setblocking(False)
            for sock in sockets[:]:
                with suppress(BlockingIOError):
                    try:
                        has_ended = sock.recv(1) == b""
                    except ConnectionError:
                        has_ended = True
                    if has_ended:
                        sock.close()
                        sockets.remove(sock)
        for sock in sockets:
            sock.close()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
