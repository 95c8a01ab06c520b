"""What to send next to one agent: the units of KV (windows) of all transfers to it, in order.

leased_offer.py has the offers that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import GenerationCheck, Region, local_rank
from kvtransfer.layout.transfer_plan import MAX_RUNS, TransferPlan
from kvtransfer.protocol.agent_messages import AgentCard
from kvtransfer.transfer.bandwidth_meter import ThroughputMeter
from kvtransfer.transfer.commands import PutWindow
from kvtransfer.transfer.leased_offer import LeasedOffer
from kvtransfer.transfer.send_credits import SendCredits, in_flight_limit
from kvtransfer.transfer.transfer_order import TransferOrder
from kvtransfer.transport_interface import Link, WindowHead, WindowSlice


class SendQueue:
    """The KV transfers to one agent over one connection, and what to send next.

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
        """Record that the other agent fetches an offer of KV, as its transfer number `transfer`.

        It is not known yet which bytes are copied; see claim().
        """
        self.claimed[transfer] = offer
        offer.link, offer.transfer = self._link, transfer

    def unassign(self, offer: LeasedOffer) -> None:
        """Undo `assign`: the transfer could not begin, so the offer may be fetched again."""
        del self.claimed[offer.transfer]
        offer.link, offer.transfer = None, 0

    def claim(self, offer: LeasedOffer, plan: TransferPlan, window_bytes: int) -> None:
        """Set which bytes of an offer are sent, as windows (units) of up to `window_bytes` bytes.

        plan  which bytes are copied to which rank
        """
        offer.plan, offer.window_bytes = plan, window_bytes
        offer.windows = _windows(offer, plan)

    def release(self, offer: LeasedOffer, now: float, *, landed: bool) -> None:
        """Remove an offer whose transfer has ended, so that other transfers may send more bytes.

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
        """Add an offer to the queue for sending, if it has KV that can be sent now."""
        if offer.peek() is not None:
            self._turns.add(offer.transfer, offer.priority, offer.urgent_at, now)

    def next_windows(self, now: float) -> list[PutWindow]:
        """Return which KV to send now, the most urgent transfer first.

        The result respects the limit of bytes in flight. It has at most about MAX_RUNS byte ranges,
        so that other connections do not wait long. Call again when bytes have been received.
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
    """Return the numbers of the blocks from which these byte ranges are read, in order.

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
