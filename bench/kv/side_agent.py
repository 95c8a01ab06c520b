"""KV benchmark: complete transfers between two of our KV agents, with all safety checks.

side_ours.py measures only the connection. Here a transfer starts with the ticket, which permits the
sink to fetch the blocks, and ends when the source knows that they have arrived.

Settings: transport (tcp or shm), layers (True to compute the request layer by layer), options
(fields of AgentOptions).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
from block_memory import Bytes, Draw

from kvtransfer.agent import Agent
from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.outcomes import OutcomeKind, TransferOutcome
from kvtransfer.transfer.handles import Offer
from kvtransfer.transport_interface import Transport
from kvtransfer.util.agent_options import AgentOptions

KEY = b"a key for this comparison alone"
PATIENCE_S = 50.0


class Agents:
    """One end of KV transfers between two agents, as engines use them, with all safety checks.

    A block has 64 KiB, all of one layer.
    """

    LAYOUT = KvLayout(1, 8, 128, KvDtype.BF16, 16)

    def __init__(self, role: str, pool_bytes: int, settings: dict[str, Any]) -> None:
        self.role = role
        block_bytes = self.LAYOUT.rank_block_bytes(0)
        if settings["transport"] == "tcp":
            self.region = Region.over(np.zeros(pool_bytes, np.uint8), block_bytes, name=role)
        else:
            self.region = MemoryFileRegion.create(
                pool_bytes // block_bytes, block_bytes, name=role, populate=True
            )
        self.pool: Bytes = self.region.bytes
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        transports = [_transport(settings["transport"])]
        options = AgentOptions(**settings.get("options", {}))
        self.agent = Agent(
            role, self.LAYOUT, [self.region], key=KEY, transports=transports, options=options
        )
        self.peer = ""
        self.offers: list[Offer] = []
        self.drawn: Draw | None = None
        self.each = False
        self.pass_number = 0
        self._run_on_loop(self.agent.start())

    def _run_on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def address(self) -> dict[str, Any]:
        return {"address": self.agent.address}

    def connect(self, peer: dict[str, Any]) -> None:
        self.peer = peer["address"]

    def prepare(self, drawn: Draw, each: bool) -> None:
        self.drawn, self.each = drawn, each
        self.pass_number += 1
        if self.role == "source":
            self._run_on_loop(self._offer(drawn))

    async def _offer(self, drawn: Draw) -> None:
        tokens = self.LAYOUT.block_tokens
        parts = drawn.src[:, None] if self.each else [drawn.src]
        self.offers = [
            self.agent.offer(
                f"{self.pass_number}/{i}",
                blocks,
                len(blocks) * tokens,
                ttl_s=PATIENCE_S,
                public=True,
            )
            for i, blocks in enumerate(parts)
        ]

    def begin(self) -> None: ...

    def finish(self) -> None:
        if self.role == "source":
            for offer in self.offers:
                _check_landed(self._run_on_loop(offer.wait_ended()))

    def run(self) -> None:
        assert self.drawn is not None
        self._fetch(self.drawn.dst)

    def posts(self) -> list[float]:
        """Fetch the chosen blocks one after another, and return how many microseconds each took.

        This runs on the event loop, as in an engine.
        """
        times: list[float] = self._run_on_loop(self._await_posts())
        return times

    async def _await_posts(self) -> list[float]:
        assert self.drawn is not None
        times = []
        for index in range(len(self.drawn.dst)):
            started = time.perf_counter_ns()
            name, blocks = f"{self.pass_number}/{index}", self.drawn.dst[index : index + 1]
            end = await self._await_fetch(name, blocks)
            times.append((time.perf_counter_ns() - started) / 1e3)
            _check_landed(end)
        return times

    def _fetch(self, blocks: Any) -> None:
        _check_landed(self._run_on_loop(self._await_fetch(f"{self.pass_number}/0", blocks)))

    async def _await_fetch(self, name: str, blocks: Any) -> TransferOutcome:
        tokens = len(blocks) * self.LAYOUT.block_tokens
        return await self.agent.fetch(
            self.peer, name, blocks, tokens, timeout_s=PATIENCE_S
        ).wait_ended()


class Layers(Agents):
    """One end of a transfer in which 32 layers of KV are computed and sent one after another.

    A block has 8 KiB of each layer.
    """

    LAYOUT = KvLayout(32, 1, 128, KvDtype.BF16, 16)

    def custom(self, what: str, prefill_s: float = 0.0) -> float:
        """Do this end's part of a transfer that is computed layer by layer, and return its seconds.

        what       "fetch" to receive the chosen blocks, "offer" to send them. An offer is measured
                   from the end of the last layer's computation until this side learns that all
                   blocks have arrived
        prefill_s  seconds of the simulated computation of all layers, which uses no CPU; 0: all
                   layers are ready before the offer
        """
        assert self.drawn is not None
        if what == "fetch":
            return self._run_on_loop(self._fetch_layers())  # type: ignore[no-any-return]
        return self._run_on_loop(self._offer_layers(prefill_s))  # type: ignore[no-any-return]

    def prepare(self, drawn: Draw, each: bool) -> None:
        self.drawn = drawn
        self.pass_number += 1

    def finish(self) -> None: ...

    async def _fetch_layers(self) -> float:
        assert self.drawn is not None
        end = await self._await_fetch(str(self.pass_number), self.drawn.dst)
        _check_landed(end)
        return end.seconds

    async def _offer_layers(self, prefill_s: float) -> float:
        assert self.drawn is not None
        tokens, layers = len(self.drawn.src) * self.LAYOUT.block_tokens, self.LAYOUT.layers
        started = last = time.perf_counter()
        offer = self.agent.offer(
            str(self.pass_number),
            self.drawn.src,
            tokens,
            ready_layers=0 if prefill_s else None,
            public=True,
        )
        for layer in range(layers if prefill_s else 0):
            await asyncio.sleep(started + prefill_s * (layer + 1) / layers - time.perf_counter())
            last = time.perf_counter()
            offer.mark_ready(layer + 1)
        _check_landed(await offer.wait_ended())
        return time.perf_counter() - last


def _check_landed(end: TransferOutcome) -> None:
    if end.kind is not OutcomeKind.LANDED:
        raise RuntimeError(
            f"the KV transfer should have succeeded, but ended with {end.kind}: {end.reason}"
        )


def _transport(kind: str) -> Transport:
    if kind == "tcp":
        from kvtransfer.transports.tcp import Tcp

        return Tcp()
    from kvtransfer.transports.shm import Shm

    return Shm()


def open_side(role: str, pool_bytes: int, settings: dict[str, Any]) -> Agents:
    return (Layers if settings.get("layers") else Agents)(role, pool_bytes, settings)
