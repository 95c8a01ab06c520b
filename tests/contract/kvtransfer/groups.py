"""Simulated engines for tests of KV transfer: they fill their KV memory, and check what they
receive.

`cell` computes addresses from the layout's description, independently of the tested code.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agent import Agent
from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import Transport
from kvtransfer.transports.inproc import InprocWire
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import Clock, ThreadClock
from tests.contract.kvtransfer.links import PATIENCE_S, make

KEY = b"the fleet's own secret, 32 bytes"
# A busy machine may stop the process for a second, which must not count as silence.
PATIENT = AgentOptions(max_missed_beats=60, handshake_s=15.0)
SMALL = KvLayout(layers=4, kv_heads=8, head_dim=16, dtype=KvDtype.BF16, block_tokens=16, tp=2)


def cell(
    layout: KvLayout, rank: int, layer: int, part: int, head: int, block: int, token: int
) -> int | None:
    # Return the byte offset of one head's and token's row in a rank's region.
    #
    # Returns None if the rank does not have that layer or head.
    stage, tp_rank = divmod(rank, layout.tp)
    first = stage * layout.layers // layout.pp
    last = (stage + 1) * layout.layers // layout.pp
    here = max(1, layout.kv_heads // layout.tp)
    first_head = 0 if layout.mla else tp_rank * layout.kv_heads // layout.tp
    if not (first <= layer < last and first_head <= head < first_head + here):
        return None
    sizes = {
        "l": last - first,
        "b": layout.blocks,
        "p": 1 if layout.mla else 2,
        "h": here,
        "n": layout.block_tokens,
    }
    index = {"l": layer - first, "b": block, "p": part, "h": head - first_head, "n": token}
    axes = list(layout.order[:-1])
    place = {"planes": 2, "heads": axes.index("n"), "tokens": 4}[layout.content]
    axes.insert(place, "p")
    offset = 0
    for axis in axes:
        offset = offset * sizes[axis] + index[axis]
    return offset * layout.head_dim * layout.dtype.n_bytes


class Cache:
    def __init__(self, layout: KvLayout, tokens: int, seed: int) -> None:
        parts = 1 if layout.mla else 2
        row = layout.head_dim * layout.dtype.n_bytes
        shape = (layout.layers, parts, layout.kv_heads, tokens, row)
        self.rows = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def write(self, layout: KvLayout, regions: Sequence[Region], blocks: Sequence[int]) -> None:
        for rank, _, offset, row in self._cells(layout, blocks):
            regions[rank].bytes[offset : offset + row.size] = row

    def differs(
        self, layout: KvLayout, regions: Sequence[Region], blocks: Sequence[int], skip: int = 0
    ) -> int:
        cells = self._cells(layout, blocks)
        return sum(
            not np.array_equal(regions[rank].bytes[offset : offset + row.size], row)
            for rank, token, offset, row in cells
            if token >= skip
        )

    def _cells(self, layout: KvLayout, blocks: Sequence[int]):  # type: ignore[no-untyped-def]
        for index in itertools.product(*(range(size) for size in self.rows.shape[:4])):
            layer, part, head, token = index
            block, inside = blocks[token // layout.block_tokens], token % layout.block_tokens
            for rank in range(layout.pp * layout.tp):
                offset = cell(layout, rank, layer, part, head, block, inside)
                if offset is not None:
                    yield rank, token, offset, self.rows[index]


@dataclass
class Group:
    layout: KvLayout
    regions: list[Region]
    agent: Agent

    def snapshot(self) -> list[NDArray[np.uint8]]:
        return [region.bytes.copy() for region in self.regions]

    def forget(self) -> None:
        # Close the KV memory, so that tests can count open file descriptors.
        for region in self.regions:
            region.close()

    @property
    def held(self) -> int:
        figures = self.agent.stats()
        return (
            sum(figures["leases"].values())
            + sum(figures["reservations"].values())
            + figures["under_way_bytes"]
        )


def memory(layout: KvLayout, blocks: int, name: str) -> list[Region]:
    return [
        MemoryFileRegion.create(blocks, layout.rank_block_bytes(rank), name=f"{name}-{rank}")
        for rank in range(layout.ranks)
    ]


def group(
    name: str,
    layout: KvLayout,
    transports: Sequence[Transport],
    *,
    blocks: int = 32,
    key: bytes = KEY,
    clock: Clock | None = None,
    options: AgentOptions | None = None,
) -> Group:
    regions = memory(layout, blocks, name)
    return Group(
        layout,
        regions,
        Agent(name, layout, regions, key=key, transports=transports, clock=clock, options=options),
    )


@asynccontextmanager
async def groups(
    transport: str,
    *layouts: KvLayout,
    options: Sequence[AgentOptions | None] = (),
    keys: Sequence[bytes] = (),
) -> AsyncIterator[list[Group]]:
    # Start one engine per layout, named p0, p1, ..., over one transport.
    #
    # Asserts at the end that no engine holds any resource.
    clock = ThreadClock()
    wire = InprocWire(clock)
    created = []
    async with AsyncExitStack() as stack:
        stack.callback(clock.close)
        for index, layout in enumerate(layouts):
            chosen = options[index] if index < len(options) else PATIENT
            key = keys[index] if index < len(keys) else KEY
            created.append(
                group(f"p{index}", layout, [make(transport, wire)], options=chosen, key=key)
            )
            stack.callback(created[-1].forget)
            await created[-1].agent.start()
            stack.push_async_callback(created[-1].agent.close)
        yield created
    assert [member.held for member in created] == [0] * len(created)


async def until(holds: Callable[[], object], what: str = "it has not come about") -> None:
    # Wait for a condition while the event loop runs; raise AssertionError on a timeout.
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)
