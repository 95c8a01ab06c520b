"""Whole exchanges between two of our agents: invitation, ticket, plan, windows with xxh3, the word that all has landed.

What side_ours measures of a link alone comes here with everything that makes a transfer safe. Source and sink have one
agent for every block size, over the same memory. Settings: transport (tcp or shm).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

from pool import Bytes, Draw

from kvtransfer.agent import Agent
from kvtransfer.ends import End, How
from kvtransfer.handles import Offer
from kvtransfer.layout import KvDtype, KvLayout
from kvtransfer.options import Options
from kvtransfer.regions import Region
from kvtransfer.transports.base import Transport

KEY = b"a key for this comparison alone"
TOKEN_BYTES = 4096  # of one layer: keys and values of 8 heads of 128 in bf16
PATIENCE_S = 50.0


class Agents:
    """The source offers in `prepare`, ahead of the clock; the sink fetches."""

    SIZES: tuple[int, ...] = (4 << 10, 64 << 10, 2 << 20)

    def __init__(self, role: str, pool_bytes: int, settings: dict[str, Any]) -> None:
        self.role, self.kind = role, settings["transport"]
        self.region = Region.create(pool_bytes // 4096, 4096, name=role, populate=True)
        self.pool: Bytes = self.region.bytes
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.agents: dict[int, Agent] = {}
        self.peers: dict[str, str] = {}
        self.offers: list[Offer] = []
        self.what: Draw | None = None
        self.each = False
        self.turn = 0
        for block_bytes in self.SIZES:
            self.agents[block_bytes] = self._agent(block_bytes)

    def _agent(self, block_bytes: int) -> Agent:
        layout = KvLayout(1, 8, 128, KvDtype.BF16, block_bytes // TOKEN_BYTES)
        region = Region.over(self.pool, block_bytes, name=f"{self.role} {block_bytes}")
        transports = [_transport(self.kind)]
        name = f"{self.role}-{block_bytes}"
        agent = Agent(name, layout, [region], key=KEY, transports=transports, options=Options(host="here"))
        self._do(agent.start())
        return agent

    def _do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(PATIENCE_S)

    def address(self) -> dict[str, Any]:
        return {"addresses": {str(size): agent.address for size, agent in self.agents.items()}}

    def connect(self, peer: dict[str, Any]) -> None:
        self.peers = peer["addresses"]

    def prepare(self, what: Draw, each: bool) -> None:
        self.what, self.each = what, each
        self.turn += 1
        if self.role == "source":
            self._do(self._offer(what))

    async def _offer(self, what: Draw) -> None:
        agent, tokens = self.agents[what.block_bytes], what.block_bytes // TOKEN_BYTES
        parts = what.src[:, None] if self.each else [what.src]
        self.offers = [
            agent.offer(f"{self.turn}/{i}", blocks, len(blocks) * tokens, ttl_s=PATIENCE_S)
            for i, blocks in enumerate(parts)
        ]

    def begin(self) -> None: ...

    def finish(self) -> None:
        """The source has its blocks back."""
        if self.role == "source":
            for offer in self.offers:
                _landed(self._do(offer.ended()))

    def run(self) -> None:
        assert self.what is not None
        self._fetch(0, self.what.dst)

    def post(self, index: int) -> None:
        assert self.what is not None
        self._fetch(index, self.what.dst[index : index + 1])

    def _fetch(self, index: int, blocks: Any) -> None:
        assert self.what is not None
        _landed(self._do(self._fetched(index, blocks, self.what.block_bytes)))

    async def _fetched(self, index: int, blocks: Any, block_bytes: int) -> End:
        tokens = len(blocks) * block_bytes // TOKEN_BYTES
        landing = self.agents[block_bytes].fetch(self.peers[str(block_bytes)], f"{self.turn}/{index}", blocks, tokens)
        return await landing.ended()


class Layers(Agents):
    """The same for one request whose layers are computed one after another: 32 of them, 8 KiB of each in a block."""

    LAYERS, BLOCK_TOKENS = 32, 16
    SIZES = (LAYERS * BLOCK_TOKENS * 512,)

    def _agent(self, block_bytes: int) -> Agent:
        layout = KvLayout(self.LAYERS, 1, 128, KvDtype.BF16, self.BLOCK_TOKENS)
        region = Region.over(self.pool, block_bytes, name=self.role)
        agent = Agent(self.role, layout, [region], key=KEY, transports=[_transport(self.kind)])
        self._do(agent.start())
        return agent

    def custom(self, what: str, prefill_s: float = 0.0) -> float:
        """`fetch`: have the blocks that were drawn. `offer`: seconds from the last layer until the source knows that
        all has landed, with a prefill of `prefill_s` (0: over before the offer) that takes no processor time."""
        assert self.what is not None
        if what == "fetch":
            return self._do(self._fetch_layers())  # type: ignore[no-any-return]
        return self._do(self._offer_layers(prefill_s))  # type: ignore[no-any-return]

    def prepare(self, what: Draw, each: bool) -> None:
        self.what = what
        self.turn += 1

    def finish(self) -> None: ...

    async def _fetch_layers(self) -> float:
        assert self.what is not None
        agent, address = self.agents[self.what.block_bytes], self.peers[str(self.what.block_bytes)]
        tokens = len(self.what.dst) * self.BLOCK_TOKENS
        end = await agent.fetch(address, str(self.turn), self.what.dst, tokens, timeout_s=PATIENCE_S).ended()
        _landed(end)
        return end.seconds

    async def _offer_layers(self, prefill_s: float) -> float:
        assert self.what is not None
        agent, tokens = self.agents[self.what.block_bytes], len(self.what.src) * self.BLOCK_TOKENS
        began = time.perf_counter()
        offer = agent.offer(str(self.turn), self.what.src, tokens, ready_layers=0 if prefill_s else None)
        for layer in range(self.LAYERS if prefill_s else 0):
            await asyncio.sleep(began + prefill_s * (layer + 1) / self.LAYERS - time.perf_counter())
            offer.ready(layer + 1)
        last = time.perf_counter() if prefill_s else began
        _landed(await offer.ended())
        return time.perf_counter() - last


def _landed(end: End) -> None:
    if end.how is not How.LANDED:
        raise RuntimeError(f"the transfer ended {end.how}: {end.reason}")


def _transport(kind: str) -> Transport:
    if kind == "tcp":
        from kvtransfer.transports.tcp import Tcp

        return Tcp()
    from kvtransfer.transports.shm import Shm

    return Shm()


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Agents:
    return (Layers if settings.get("layers") else Agents)(role, pool_bytes, settings)
