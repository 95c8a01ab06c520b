"""Whole exchanges between two of our agents: invitation, ticket, plan, windows with xxh3, the word that all has landed.

What side_ours measures of a link alone comes here with everything that makes a transfer safe. Settings: transport (tcp
or shm), layers (a request that is computed layer by layer).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
from pool import Bytes, Draw

from kvtransfer.agent import Agent
from kvtransfer.contract import Transport
from kvtransfer.layout.layout import KvDtype, KvLayout
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.outcomes import OutcomeKind, TransferOutcome
from kvtransfer.transfer.handles import Offer

KEY = b"a key for this comparison alone"
PATIENCE_S = 50.0


class Agents:
    """The source offers in `prepare`, ahead of the clock; the sink fetches. Blocks of 64 KiB, of one layer."""

    LAYOUT = KvLayout(1, 8, 128, KvDtype.BF16, 16)

    def __init__(self, role: str, pool_bytes: int, settings: dict[str, Any]) -> None:
        self.role = role
        block_bytes = self.LAYOUT.rank_block_bytes(0)
        if settings["transport"] == "tcp":
            self.region = Region.over(np.zeros(pool_bytes, np.uint8), block_bytes, name=role)
        else:
            self.region = MemoryFileRegion.create(pool_bytes // block_bytes, block_bytes, name=role, populate=True)
        self.pool: Bytes = self.region.bytes
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        transports = [_transport(settings["transport"])]
        self.agent = Agent(role, self.LAYOUT, [self.region], key=KEY, transports=transports)
        self.peer = ""
        self.offers: list[Offer] = []
        self.what: Draw | None = None
        self.each = False
        self.turn = 0
        self._do(self.agent.start())

    def _do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(PATIENCE_S)

    def address(self) -> dict[str, Any]:
        return {"address": self.agent.address}

    def connect(self, peer: dict[str, Any]) -> None:
        self.peer = peer["address"]

    def prepare(self, what: Draw, each: bool) -> None:
        self.what, self.each = what, each
        self.turn += 1
        if self.role == "source":
            self._do(self._offer(what))

    async def _offer(self, what: Draw) -> None:
        tokens = self.LAYOUT.block_tokens
        parts = what.src[:, None] if self.each else [what.src]
        self.offers = [
            self.agent.offer(f"{self.turn}/{i}", blocks, len(blocks) * tokens, ttl_s=PATIENCE_S, public=True)
            for i, blocks in enumerate(parts)
        ]

    def begin(self) -> None: ...

    def finish(self) -> None:
        """The source has its blocks back."""
        if self.role == "source":
            for offer in self.offers:
                _landed(self._do(offer.wait_ended()))

    def run(self) -> None:
        assert self.what is not None
        self._fetch(0, self.what.dst)

    def post(self, index: int) -> None:
        assert self.what is not None
        self._fetch(index, self.what.dst[index : index + 1])

    def _fetch(self, index: int, blocks: Any) -> None:
        _landed(self._do(self._fetched(f"{self.turn}/{index}", blocks)))

    async def _fetched(self, name: str, blocks: Any) -> TransferOutcome:
        tokens = len(blocks) * self.LAYOUT.block_tokens
        return await self.agent.fetch(self.peer, name, blocks, tokens, timeout_s=PATIENCE_S).wait_ended()


class Layers(Agents):
    """The same for one request whose layers are computed one after another: 32 of them, 8 KiB of each in a block."""

    LAYOUT = KvLayout(32, 1, 128, KvDtype.BF16, 16)

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
        end = await self._fetched(str(self.turn), self.what.dst)
        _landed(end)
        return end.seconds

    async def _offer_layers(self, prefill_s: float) -> float:
        assert self.what is not None
        tokens, layers = len(self.what.src) * self.LAYOUT.block_tokens, self.LAYOUT.layers
        began = last = time.perf_counter()
        offer = self.agent.offer(
            str(self.turn), self.what.src, tokens, ready_layers=0 if prefill_s else None, public=True
        )
        for layer in range(layers if prefill_s else 0):
            await asyncio.sleep(began + prefill_s * (layer + 1) / layers - time.perf_counter())
            last = time.perf_counter()
            offer.mark_ready(layer + 1)
        _landed(await offer.wait_ended())
        return time.perf_counter() - last


def _landed(end: TransferOutcome) -> None:
    if end.kind is not OutcomeKind.LANDED:
        raise RuntimeError(f"the transfer ended {end.kind}: {end.reason}")


def _transport(kind: str) -> Transport:
    if kind == "tcp":
        from kvtransfer.transports.tcp import Tcp

        return Tcp()
    from kvtransfer.transports.shm import Shm

    return Shm()


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Agents:
    return (Layers if settings.get("layers") else Agents)(role, pool_bytes, settings)
