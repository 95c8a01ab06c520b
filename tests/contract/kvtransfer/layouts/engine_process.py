"""The process of one simulated engine, for tests of KV transfer between different memory layouts.

It has transfer agents for all ranks, with KV in memory files. It reads commands from stdin and
writes replies to stdout, as lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import msgspec
import numpy as np

from kvtransfer.agent import Agent
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import source_ranks
from kvtransfer.transports.tcp import Tcp
from tests.contract.kvtransfer.groups import KEY, PATIENT

PATIENCE_S = float(os.environ.get("PENSTOCK_PATIENCE_S", "20"))


class EngineProcess:
    def __init__(self) -> None:
        self.agents: list[Agent] = []

    async def open(self, name: str, layout: dict[str, Any], files: list[str]) -> list[str]:
        self.layout = msgspec.convert(layout, KvLayout)
        for rank, path in enumerate(files):
            memory = np.memmap(path, np.uint8, "r+")
            region = Region.over(memory, self.layout.rank_block_bytes(rank), name=path)
            agent = Agent(
                f"{name}.{rank}", self.layout, [region], key=KEY, transports=[Tcp()],
                options=PATIENT, rank=rank, group=name,
            )  # fmt: skip
            await agent.start()
            self.agents.append(agent)
        return [agent.address for agent in self.agents]

    async def offer(self, name: str, blocks: list[int], tokens: int) -> list[str]:
        return [agent.offer(name, blocks, tokens).ticket for agent in self.agents]

    async def fetch(
        self,
        name: str,
        blocks: list[int],
        tokens: int,
        source: dict[str, Any],
        addresses: list[str],
        tickets: list[str],
    ) -> list[list[str]]:
        there = msgspec.convert(source, KvLayout)
        landings = [
            agent.fetch(addresses[other], name, blocks, tokens, ticket=tickets[other])
            for rank, agent in enumerate(self.agents)
            for other in source_ranks(there, self.layout, rank)
        ]
        async with asyncio.timeout(PATIENCE_S):
            ends = await asyncio.gather(*(landing.wait_ended() for landing in landings))
        return [[end.kind, end.reason, end.detail] for end in ends]

    async def close(self) -> None:
        await asyncio.gather(*(agent.close() for agent in self.agents))
        self.agents.clear()


async def main() -> None:
    engine = EngineProcess()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        try:
            reply = {"ok": await getattr(engine, command.pop("do"))(**command)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
