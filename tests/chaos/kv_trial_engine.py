"""A simulated engine for the randomized KV transfer trials, which checks every byte it receives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agent import Agent
from kvtransfer.layout.kv_layout import KvContent, KvDtype, KvLayout
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.outcomes import EndReason, OutcomeKind, TransferOutcome
from kvtransfer.transfer.handles import Landing, Offer, TransferHandle
from kvtransfer.transport_interface import Transport
from kvtransfer.util.agent_options import AgentOptions
from kvtransfer.util.clock import Clock

KEY = b"k" * 32
BASE = KvLayout(layers=4, kv_heads=4, head_dim=8, dtype=KvDtype.BF16, block_tokens=16, tp=1)
BLOCKS = 24


def by_block(layout: KvLayout, region: Region) -> NDArray[np.uint8]:
    if layout.order.is_block_outermost:
        return region.bytes.reshape(BLOCKS, layout.layers, -1)
    return region.bytes.reshape(layout.layers, BLOCKS, -1).swapaxes(0, 1)


def logical(
    layout: KvLayout, regions: Sequence[Region], blocks: Sequence[int], tokens: int
) -> NDArray[np.uint8]:
    # Return the KV of a request as (layer, part, head, token, byte).
    #
    # It uses plain indexing, independently of the tested code.
    inner = (layout.block_tokens, layout.head_dim * layout.dtype.n_bytes)
    heads_here = layout.kv_heads // layout.tp
    chosen = [by_block(layout, region)[list(blocks)] for region in regions]
    if layout.content is KvContent.HEADS:
        shape = (len(blocks), layout.layers, heads_here, 2, *inner)
        ranks = [memory.reshape(shape).swapaxes(2, 3) for memory in chosen]
    else:
        shape = (len(blocks), layout.layers, 2, heads_here, *inner)
        ranks = [memory.reshape(shape) for memory in chosen]
    heads = np.concatenate(ranks, axis=3)
    joined = np.moveaxis(heads, 0, 3)
    return joined.reshape(*joined.shape[:3], -1, joined.shape[-1])[:, :, :, :tokens]


@dataclass
class Request:
    name: str
    tokens: int
    skip: int
    blocks: list[int]
    content: NDArray[np.uint8] | None = None
    end: TransferOutcome | None = None


class TrialEngine:
    """A simulated engine for trials of KV transfer, which checks that received KV is right.

    It has a pool of KV blocks and a KV transfer agent. It overwrites blocks as soon as they are
    free again, so that late writes to them are detected.
    """

    def __init__(
        self,
        name: str,
        layout: KvLayout,
        transports: Sequence[Transport],
        clock: Clock,
        seed: int,
        pace: float = 1.0,
        budget_bytes: int = 6 << 10,
    ) -> None:
        self.layout, self.name, self.dead = layout, name, False
        self.rng = np.random.default_rng(seed)
        self.regions = [
            MemoryFileRegion.create(BLOCKS, layout.rank_block_bytes(rank), name=name)
            for rank in range(layout.ranks)
        ]
        waits = {
            "beat_s": 0.05 * pace,
            "handshake_s": (1.25 if transports[0].name == "rdma" else 0.3) * pace,
            "invite_wait_s": 0.6 * pace,
        }
        options = AgentOptions(window_bytes=2 << 10, budget_bytes=budget_bytes, **waits)
        self.agent = Agent(
            name, layout, self.regions, key=KEY, transports=transports, clock=clock, options=options
        )
        self.free = list(range(BLOCKS))
        self.stamp = np.zeros(BLOCKS, np.uint8)
        self.offers: dict[str, Request] = {}
        self.landings: dict[str, Request] = {}
        self.handles: dict[str, TransferHandle] = {}
        self.robbing = (
            threading.Lock()
        )  # ends come on link threads, so blocks are stolen either before or not at all
        self.wrong: list[str] = []
        # Whether the trial closes its agents. Calls that were due before may still come, if the
        # process was stopped meanwhile.
        self.is_over = False
        self.expected: Callable[[str], NDArray[np.uint8] | None] = lambda name: None

    def allocate(self, tokens: int) -> list[int] | None:
        need = -(-tokens // self.layout.block_tokens)
        if need > len(self.free):
            return None
        return [self.free.pop(int(self.rng.integers(len(self.free)))) for _ in range(need)]

    def give(self, name: str, tokens: int, ttl_s: float, layered: bool) -> Offer | None:
        # Fill blocks with random KV and offer them; None if no blocks are free.
        blocks = self.allocate(tokens)
        if blocks is None or self.dead:
            return None
        for region in self.regions:
            for block in blocks:
                self.fill(
                    region, block, self.rng.integers(0, 256, region.block_bytes, dtype=np.uint8)
                )
        self.offers[name] = Request(
            name, tokens, 0, blocks, logical(self.layout, self.regions, blocks, tokens).copy()
        )
        try:
            offer = self.agent.offer(
                name, blocks, tokens, ttl_s=ttl_s, ready_layers=0 if layered else None, public=True
            )
        except RuntimeError:
            self.give_up(self.offers, name)
            return None
        self.handles["offer " + name] = offer
        return offer

    def take(
        self, address: str, name: str, tokens: int, skip: int, ticket: str | None, timeout_s: float
    ) -> Landing | None:
        blocks = self.allocate(tokens)
        if blocks is None or self.dead:
            return None
        self.landings[name] = Request(name, tokens, skip, blocks)
        try:
            landing = self.agent.fetch(
                address, name, blocks, tokens, skip_tokens=skip, ticket=ticket, timeout_s=timeout_s
            )
        except RuntimeError:
            self.give_up(self.landings, name)
            return None
        self.handles["landing " + name] = landing
        return landing

    def give_up(self, requests: dict[str, Request], name: str) -> None:
        # Free the blocks of a request that a closed agent refused.
        if not self.is_over:
            self.wrong.append(f"{name} was refused before the end of the trial")
        self.reuse(requests.pop(name).blocks)

    def on_change(self, handle: TransferHandle) -> None:
        if handle.outcome is None:
            return
        request = (self.offers if isinstance(handle, Offer) else self.landings)[handle.name]
        with self.robbing:
            if request.end is not None:
                self.wrong.append(f"{handle.name} ended twice: {request.end} and {handle.outcome}")
            request.end = handle.outcome
        if not isinstance(handle.outcome.reason, EndReason):
            self.wrong.append(f"{handle.name} ended without a named reason")
        if isinstance(handle, Landing) and handle.outcome.kind is OutcomeKind.LANDED:
            self.verify(request)
        self.reuse(request.blocks)

    def steal(self) -> None:
        # Overwrite blocks that are still offered; only their generation number reveals it.
        for request in list(self.offers.values()):
            with self.robbing:
                if request.end is None and not self.dead:
                    for region in self.regions:
                        region.bump(request.blocks)
                        for block in request.blocks:
                            self.fill(region, block, np.uint8(0xEE))

    def verify(self, request: Request) -> None:
        wanted = self.expected(request.name)
        actual = logical(self.layout, self.regions, request.blocks, request.tokens)
        if wanted is None or not np.array_equal(
            actual[:, :, :, request.skip :], wanted[:, :, :, request.skip : request.tokens]
        ):
            self.wrong.append(f"{request.name} landed with bytes that are not its own")

    def reuse(self, blocks: Sequence[int]) -> None:
        # Overwrite returned blocks as their next owner would, and free them.
        #
        # The new bytes must stay unchanged until the blocks are reserved again.
        for block in blocks:
            self.stamp[block] = self.stamp[block] % 251 + 1
            for region in self.regions:
                self.fill(region, block, self.stamp[block])
        self.free += blocks

    def fill(self, region: Region, block: int, content: NDArray[np.uint8] | np.uint8) -> None:
        memory = by_block(self.layout, region)[block]
        memory[:] = content.reshape(memory.shape) if isinstance(content, np.ndarray) else content

    def check(self) -> None:
        # Check that nothing is reserved and that returned blocks are free and unchanged.
        #
        # Adds errors to `wrong`.
        if self.dead:
            return
        for what, handle in self.handles.items():
            if handle.outcome is None:
                self.wrong.append(f"{what} has not ended")
        figures = self.agent.stats()
        holding = {
            **figures["leases"],
            **figures["reservations"],
            "credit": figures["under_way_bytes"],
        }
        if any(holding.values()):
            self.wrong.append(
                f"held: { ({state: count for state, count in holding.items() if count}) }"
            )
        if sorted(self.free) != list(range(BLOCKS)):
            self.wrong.append("blocks leaked")
        for region in self.regions:
            if (by_block(self.layout, region) != self.stamp[:, None, None]).any():
                self.wrong.append("blocks that had been given back were written")
        if figures["faults"].get("owner"):
            self.wrong.append("an owner failed")
