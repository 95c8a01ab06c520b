"""Members that link with a KV agent, and strangers that hold its port open without showing the fleet's key."""

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

from kvtransfer.clock import ThreadClock
from kvtransfer.transports.inproc import Wire
from tests.contract.kvtransfer.groups import KEY, SMALL, group
from tests.contract.kvtransfer.links import Owner, make
from tests.contract.kvtransfer.test_strangers import Stranger
from tests.e2e.process_cost import ProcessCost
from tests.e2e.processes import ENV
from tests.fair_time import PATIENCE_S

TRANSPORT, MISSES = "tcp", 20


class Source(NamedTuple):
    """An agent in a process of its own."""

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
    """Seconds from dialling to the agent's welcome, which needs the key, for so many members one after the other."""
    members, times = group("d", SMALL, [make(TRANSPORT, Wire(ThreadClock()))]), []
    try:
        for _ in range(links):
            end, owner = make(TRANSPORT, Wire(ThreadClock())), Owner()
            end.start(owner, members.regions)
            began = perf_counter()
            link = await asyncio.to_thread(end.dial, source.address)
            await asyncio.wait_for(Stranger(link, owner, KEY).greet(), PATIENCE_S)
            times.append(perf_counter() - began)
            end.close()
    finally:
        members.forget()
    return times


@contextmanager
def idle_sockets(port: int, number: int) -> Iterator[None]:
    """So many connections that send nothing. One that the agent closes is replaced."""
    over = threading.Event()

    def hold() -> None:
        held: list[socket.socket] = []
        while not over.wait(0.001):
            with suppress(OSError):
                while len(held) < number:
                    held.append(socket.create_connection(("127.0.0.1", port), 5))
                    held[-1].setblocking(False)
            for each in held[:]:
                with suppress(BlockingIOError):
                    try:
                        ended = each.recv(1) == b""
                    except ConnectionError:
                        ended = True
                    if ended:
                        each.close()
                        held.remove(each)
        for each in held:
            each.close()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
