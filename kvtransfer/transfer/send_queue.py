"""The windows (pieces of KV) to send to one agent, and their order.

The main classes are LeasedOffer and SendQueue. source.py decides whether an offer may be fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.byte_ranges import ByteRuns, sorted_distinct
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.memory_regions import GenerationCheck, Region, local_rank
from kvtransfer.layout.reshard import MAX_RUNS, TransferPlan
from kvtransfer.protocol.agent_messages import AgentCard
from kvtransfer.protocol.lease import Lease
from kvtransfer.transfer.commands import PutWindow
from kvtransfer.transfer.send_credits import SendCredits, in_flight_limit
from kvtransfer.transfer.transfer_order import Priority, TransferOrder
from kvtransfer.transport_interface import Link, WindowHead, WindowSlice

_NONE = np.empty(0, np.int64)
# Tickets of one offer that are valid at the same time. Renewal keeps earlier tickets valid, because
# they may be in transit.
_MAX_TICKETS = 8


class OfferSpec(msgspec.Struct, frozen=True):
    """An engine's offer of the KV of `tokens` tokens, which is stored in `blocks`.

    ready_layers  number of layers that are already computed
    ttl_s         seconds until the lease ends
    sink          the only agent that may fetch the KV, with a ticket or by name; None: any agent
                  with a ticket
    public        whether any agent may also fetch the KV by name
    nonce         16 random bytes for the first ticket
    order         indices that sort `blocks`, computed here
    distinct      the distinct block numbers, computed here
    """

    name: str
    blocks: NDArray[np.int64]
    tokens: int
    ttl_s: float
    ready_layers: int
    nonce: bytes
    sink: str | None = None
    public: bool = False
    order: NDArray[np.int64] = _NONE
    distinct: NDArray[np.int64] = _NONE

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "order", np.argsort(self.blocks, kind="stable"))
        msgspec.structs.force_setattr(self, "distinct", sorted_distinct(self.blocks))


class LeasedOffer:
    """An offer of KV, with the lease that protects its blocks from reuse.

    generations    the blocks' generations (owner counters) per rank when the offer was made
    sorted_blocks  its block numbers in ascending order, for fast searches
    lease          the lease; setting one that has ended clears `lease_flag`
    lease_flag     uint32 array (1,): 1 until the lease ends, for native code
    nonces         nonces of its latest tickets
    link           connection to the agent that fetches it; None: it is not being fetched
    transfer       that agent's number of the transfer
    plan           the transfer plan; None until it is computed
    shares         parts of the offer by rank of the fetching engine, once a rank has fetched
                   (offer_division.py)
    claimed_by     the engine that shares the offer among its ranks, and its layout
    whole          for one rank's part: the whole offer; otherwise None
    rank           for one rank's part: the rank that may fetch it; otherwise -1
    """

    __slots__ = (
        "_lease",
        "claimed_by",
        "generations",
        "head",
        "lease_flag",
        "link",
        "nonces",
        "number",
        "plan",
        "priority",
        "put_bytes",
        "rank",
        "ready_layers",
        "shares",
        "sorted_blocks",
        "spec",
        "started_at",
        "ticket",
        "transfer",
        "urgent_at",
        "whole",
        "window_bytes",
        "windows",
    )  # fmt: skip

    def __init__(
        self, number: int, spec: OfferSpec, generations: list[NDArray[np.uint32]], now: float
    ) -> None:
        self.number, self.spec, self.generations, self.started_at = number, spec, generations, now
        self.sorted_blocks = spec.blocks[spec.order]
        self.lease_flag = np.ones(1, np.uint32)
        self.lease = Lease(spec.name, now + spec.ttl_s)
        self.ticket = ""
        self.nonces = deque([spec.nonce], _MAX_TICKETS)
        self.ready_layers = spec.ready_layers
        self.link: Link | None = None
        self.transfer = 0
        self.priority, self.urgent_at = Priority.INTERACTIVE, now
        self.plan: TransferPlan | None = None
        self.window_bytes = 0
        self.windows: Iterator[WindowHead | None] = iter(())
        self.head: WindowHead | None = None
        self.put_bytes = 0
        self.shares: dict[int, LeasedOffer] = {}
        self.whole: LeasedOffer | None = None
        self.rank = -1
        self.claimed_by: tuple[str, KvLayout] | None = None

    @property
    def is_unclaimed(self) -> bool:
        """Return whether no part of the offer is being fetched or was fetched.

        Returns False for one rank's part of an offer.
        """
        return self.plan is None and self.claimed_by is None and self.whole is None

    @property
    def lease(self) -> Lease:
        return self._lease

    @lease.setter
    def lease(self, lease: Lease) -> None:
        self._lease = lease
        if lease.ended_from is not None:
            self.lease_flag[0] = 0

    @property
    def is_live(self) -> bool:
        return self._lease.ended_from is None

    def peek(self) -> WindowHead | None:
        """Return the header of the next window (piece of KV) to send.

        Returns None if all have been sent, or if the next layers are not computed yet.
        """
        if self.head is None:
            self.head = next(self.windows, None)
        return self.head


class ThroughputMeter:
    """Measures how fast KV is sent, counting only the time in which bytes are in flight.

    When no bytes are in flight, or after `most_s` seconds, `on_measured` is called with the bytes
    and seconds.
    """

    def __init__(self, on_measured: Callable[[int, float], None], most_s: float = 0.1) -> None:
        self._seen, self._most_s = on_measured, most_s
        self._since: float | None = None
        self._bytes = 0

    def start(self, now: float) -> None:
        """Start to measure at the time `now`, unless a measurement has already begun."""
        if self._since is None:
            self._since = now

    def count(self, n_bytes: int, now: float, *, idle: bool) -> None:
        """Count bytes of KV that the receiving agent has received.

        idle  whether no other bytes are in flight, which ends the measurement
        """
        self._bytes += n_bytes
        if self._since is None or not (idle or now - self._since > self._most_s):
            return
        if self._bytes:
            self._seen(self._bytes, now - self._since)
        self._since, self._bytes = None if idle else now, 0


class SendQueue:
    """The windows (pieces of KV) to send to one agent over one connection.

    claimed  the offers that the agent is fetching, by number of the transfer
    newest   the latest number of a transfer. Numbers only grow, so a late message about an old
             transfer is never mistaken for one about a new transfer
    """

    def __init__(
        self,
        link: Link,
        card: AgentCard,
        budget_bytes: int,
        regions: list[Region],
        on_measured: Callable[[int, float], None],
    ) -> None:
        self.card = card
        self.claimed: dict[int, LeasedOffer] = {}
        self.newest = -1
        self.credits = SendCredits(max(1, budget_bytes))
        self._link, self._regions = link, regions
        self._turns = TransferOrder()
        self._flow = ThroughputMeter(on_measured)

    def assign(self, offer: LeasedOffer, transfer: int) -> None:
        """Assign an offer of KV to a transfer to this peer, before the transfer's plan is
        computed.
        """
        self.claimed[transfer] = offer
        offer.link, offer.transfer = self._link, transfer

    def unassign(self, offer: LeasedOffer) -> None:
        """Undo `assign` because the transfer could not begin, so that the offer is available
        again.
        """
        del self.claimed[offer.transfer]
        offer.link, offer.transfer = None, 0

    def claim(self, offer: LeasedOffer, plan: TransferPlan, window_bytes: int) -> None:
        """Record the plan by which an offer is sent, and divide it into windows of this size."""
        offer.plan, offer.window_bytes = plan, window_bytes
        offer.windows = _windows(offer, plan)

    def release(self, offer: LeasedOffer, now: float, *, landed: bool) -> None:
        """Remove an offer that has ended, and free its bytes in flight for other transfers.

        landed  whether the receiving agent has received all of it
        """
        del self.claimed[offer.transfer]
        self._turns.remove(offer.transfer)
        left = self.credits.forget(offer.transfer)
        self._flow.count(left if landed else 0, now, idle=not self.credits.in_flight_bytes)

    def put_back(self, transfer: int, n_bytes: int, now: float) -> None:
        """Record that the receiving agent has received bytes, so that more may be sent.

        Raises ValueError if these bytes were not in flight.
        """
        self.credits.put_back(transfer, n_bytes)
        self._flow.count(n_bytes, now, idle=not self.credits.in_flight_bytes)

    def enqueue(self, offer: LeasedOffer, now: float) -> None:
        """Queue the offer for sending, if it has windows of KV to send."""
        if offer.peek() is not None:
            self._turns.add(offer.transfer, offer.priority, offer.urgent_at, now)

    def next_windows(self, now: float) -> list[PutWindow]:
        """Return the windows (pieces of KV) to send now, in order of urgency.

        The limit on bytes in flight applies. At most about MAX_RUNS byte ranges are returned,
        because other connections wait in the meantime. Call again when bytes have been received.
        """
        puts: list[PutWindow] = []
        runs = 0
        while runs < MAX_RUNS and (transfer := self._turns.next(now)) is not None:
            offer = self.claimed[transfer]
            head = offer.peek()
            if head is None:
                self._turns.remove(transfer)
            elif self.credits.try_acquire(transfer, head.n_bytes, self._limit_bytes(offer)):
                self._flow.start(now)
                puts.append(self._put(offer, head))
                runs += head.count
            else:
                break
        return puts

    def _limit_bytes(self, offer: LeasedOffer) -> int:
        return in_flight_limit(self.credits.budget_bytes, offer.window_bytes, offer.priority)

    def _put(self, offer: LeasedOffer, head: WindowHead) -> PutWindow:
        assert offer.plan is not None
        offer.head = None
        offer.put_bytes += head.n_bytes
        src_rank, dst_rank = offer.plan.pairs(head.group)[head.pair]
        runs = offer.plan.runs(head.group, head.pair).cut(head.first, head.count)
        src, dst = (
            local_rank(src_rank, len(self._regions) > 1),
            local_rank(dst_rank, self.card.only_rank is None),
        )
        region = self._regions[src]
        blocks = offer.spec.distinct
        if blocks.size > 1 and offer.plan.src.order.is_block_outermost:
            blocks = blocks_of(runs, region.block_bytes)
        current = _still_current(offer, region, src, blocks)
        return PutWindow(self._link, head, WindowSlice(runs, region, src, dst, current))


def blocks_of(runs: ByteRuns, block_bytes: int) -> NDArray[np.int64]:
    """Return the numbers of the blocks that these byte ranges read, in order.

    Equal neighbours are returned once. This is valid only if blocks are the outermost dimension in
    memory. Otherwise an offset does not identify a block.
    """
    if runs.count == 1:
        begin, size = runs.src.item(), runs.length.item()
        return np.arange(begin // block_bytes, (begin + size - 1) // block_bytes + 1)
    first, last = runs.src // block_bytes, (runs.src + runs.length - 1) // block_bytes
    longest = int((last - first).max())
    if longest:
        steps = np.arange(longest + 1)
        first = (first[:, None] + steps)[steps <= (last - first)[:, None]]
    return first[np.flatnonzero(np.diff(first, prepend=-1))]


def _windows(offer: LeasedOffer, plan: TransferPlan) -> Iterator[WindowHead | None]:
    # Yield every window of an offer's KV in order, and None while the next one is not computed.
    for group in range(plan.groups):
        while plan.ready_groups(offer.ready_layers) <= group:
            yield None
        for window in plan.windows(group, offer.window_bytes):
            yield WindowHead(offer.transfer, group, *window)


def _still_current(
    offer: LeasedOffer, region: Region, rank: int, blocks: NDArray[np.int64]
) -> Callable[[], bool]:
    if offer.spec.blocks.size == 1:
        block, generation = offer.spec.blocks.item(), offer.generations[rank].item()
        return lambda: offer.is_live and region.generations.item(block) == generation
    promised = offer.generations[rank][
        offer.spec.order[np.searchsorted(offer.sorted_blocks, blocks)]
    ]
    return GenerationCheck(region, blocks, promised, offer.lease_flag)
