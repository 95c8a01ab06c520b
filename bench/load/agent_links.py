"""Measures how fast trusted peers connect to a KV transfer agent while its port is attacked.

Trusted peers prove that they know the fleet's secret key; attackers do not know it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import NamedTuple

from kvtransfer.transports.inproc import InprocWire
from kvtransfer.util.clock import ThreadClock
from tests.contract.kvtransfer.groups import KEY, SMALL, group
from tests.contract.kvtransfer.links import Owner, make
from tests.contract.kvtransfer.test_untrusted_peers import UnprovenPeer
from tests.duration_limits import PATIENCE_S
from tests.e2e.process_cost import ProcessCost
from tests.e2e.processes import ENV

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
    """Connect clients one after another to a KV agent; return the seconds that each one took.

    source  the agent
    links   number of clients, which know the fleet's secret key
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
