"""Outlet: one link over which a peer fetches from us. Which window of which offer goes next, and where it lies.

Not here: whether an offer may be fetched at all (source.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.commands import Put
from kvtransfer.credits import Credits, Klass, Turns
from kvtransfer.lattice import Runs, distinct
from kvtransfer.lease import Lease
from kvtransfer.messages import Card
from kvtransfer.regions import Region
from kvtransfer.reshard import MOST_RUNS, Plan
from kvtransfer.transports.base import Link, Slice, WindowHead

_NONE = np.empty(0, np.int64)
_MOST_TICKETS = 8  # of one offer that are good at a time: a renewed one does not end those that are on their way


class Ware(msgspec.Struct, frozen=True):
    """What an engine offers: the KV of `tokens` tokens in `blocks`, of which `ready_layers` are computed.

    `sink`: the only agent that may have it, by ticket or by name; None: any of the fleet, by ticket. `public`: then
    also by name. `nonce`: 16 random bytes for the first ticket. `order`, `distinct`: of the blocks, found out here.
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
        msgspec.structs.force_setattr(self, "distinct", distinct(self.blocks))


class Offer:
    """One offer and the lease that protects it. `generations`: of its blocks, by rank, as they were promised;
    `sorted_blocks`: to find a block's promise in microseconds, once per window; `nonces`: of its latest tickets.
    `link`, `transfer`: whose it is. Its `plan` comes after that, and with it the claim is good."""

    __slots__ = (
        "began", "generations", "head", "klass", "lease", "link", "nonces", "number", "plan", "put_bytes",
        "ready_layers", "sorted_blocks", "ticket", "transfer", "urgent_at", "ware", "window_bytes", "windows",
    )  # fmt: skip

    def __init__(
        self, number: int, ware: Ware, generations: list[NDArray[np.uint32]], now: float
    ) -> None:
        self.number, self.ware, self.generations, self.began = number, ware, generations, now
        self.sorted_blocks = ware.blocks[ware.order]
        self.lease = Lease(ware.name, now + ware.ttl_s)
        self.ticket = ""
        self.nonces = deque([ware.nonce], _MOST_TICKETS)
        self.ready_layers = ware.ready_layers
        self.link: Link | None = None
        self.transfer = 0
        self.klass, self.urgent_at = Klass.INTERACTIVE, now
        self.plan: Plan | None = None
        self.window_bytes = 0
        self.windows: Iterator[WindowHead | None] = iter(())
        self.head: WindowHead | None = None
        self.put_bytes = 0

    @property
    def live(self) -> bool:
        return self.lease.left is None

    def peek(self) -> WindowHead | None:
        """The next window; None while nothing more is computed, or when all has been sent."""
        if self.head is None:
            self.head = next(self.windows, None)
        return self.head


class Flow:
    """How fast bytes go while any are under way: a spell ends when none are, or after `most_s` to begin another."""

    def __init__(self, seen: Callable[[int, float], None], most_s: float = 0.1) -> None:
        self._seen, self._most_s = seen, most_s
        self._since: float | None = None
        self._bytes = 0

    def begun(self, now: float) -> None:
        """Something is under way."""
        if self._since is None:
            self._since = now

    def arrived(self, n_bytes: int, now: float, *, idle: bool) -> None:
        """So much has been taken in; `idle`: and nothing else is under way."""
        self._bytes += n_bytes
        if self._since is None or not (idle or now - self._since > self._most_s):
            return
        if self._bytes:
            self._seen(self._bytes, now - self._since)
        self._since, self._bytes = None if idle else now, 0


class Outlet:
    """`claimed`: by transfer; `newest`: the last transfer's number, for numbers only grow: what is said of an old one
    is never taken for a new one's."""

    def __init__(
        self,
        link: Link,
        card: Card,
        budget_bytes: int,
        regions: list[Region],
        seen: Callable[[int, float], None],
    ) -> None:
        self.card = card
        self.claimed: dict[int, Offer] = {}
        self.newest = -1
        self.credits = Credits(max(1, budget_bytes))
        self._link, self._regions = link, regions
        self._turns = Turns()
        self._flow = Flow(seen)

    def take(self, offer: Offer, transfer: int) -> None:
        """The offer is this peer's from now on, and nobody else's, if there is a plan for it."""
        self.claimed[transfer] = offer
        offer.link, offer.transfer = self._link, transfer

    def let_go(self, offer: Offer) -> None:
        """There is none: it is on offer again."""
        del self.claimed[offer.transfer]
        offer.link, offer.transfer = None, 0

    def claim(self, offer: Offer, plan: Plan, window_bytes: int) -> None:
        """This is how it moves."""
        offer.plan, offer.window_bytes = plan, window_bytes
        offer.windows = _windows(offer, plan)

    def release(self, offer: Offer, now: float, *, landed: bool) -> None:
        """The offer is over: its place in line and its credit are free."""
        del self.claimed[offer.transfer]
        self._turns.remove(offer.transfer)
        left = self.credits.forget(offer.transfer)
        self._flow.arrived(left if landed else 0, now, idle=not self.credits.taken_bytes)

    def give(self, transfer: int, n_bytes: int, now: float) -> None:
        """The peer has taken in so much. ValueError if it was never sent so much."""
        self.credits.give(transfer, n_bytes)
        self._flow.arrived(n_bytes, now, idle=not self.credits.taken_bytes)

    def line_up(self, offer: Offer, now: float) -> None:
        """The offer may have windows to send."""
        if offer.peek() is not None:
            self._turns.add(offer.transfer, offer.klass, offer.urgent_at, now)

    def pump(self, now: float) -> list[Put]:
        """The windows that may go now: the most urgent first, as many as the peer takes. And no more than so many runs:
        other links wait meanwhile. As something is under way then, credit comes back and asks again."""
        puts: list[Put] = []
        runs = 0
        while runs < MOST_RUNS and (transfer := self._turns.next(now)) is not None:
            offer = self.claimed[transfer]
            head = offer.peek()
            if head is None:
                self._turns.remove(transfer)
            elif self.credits.take(transfer, head.n_bytes):
                self._flow.begun(now)
                puts.append(self._put(offer, head))
                runs += head.count
            else:
                break
        return puts

    def _put(self, offer: Offer, head: WindowHead) -> Put:
        assert offer.plan is not None
        offer.head = None
        offer.put_bytes += head.n_bytes
        src_rank, dst_rank = offer.plan.pairs(head.group)[head.pair]
        runs = offer.plan.runs(head.group, head.pair).cut(head.first, head.count)
        region = self._regions[src_rank]
        current = _still(offer, region, src_rank, blocks_of(runs, region.block_bytes))
        return Put(self._link, head, Slice(runs, region, src_rank, dst_rank, current))


def blocks_of(runs: Runs, block_bytes: int) -> NDArray[np.int64]:
    """The source's blocks that these runs read, in their order; a block that several runs in a row read once."""
    first, last = runs.src // block_bytes, (runs.src + runs.length - 1) // block_bytes
    longest = int((last - first).max())
    if longest:
        steps = np.arange(longest + 1)
        first = (first[:, None] + steps)[steps <= (last - first)[:, None]]
    return first[np.flatnonzero(np.diff(first, prepend=-1))]


def _windows(offer: Offer, plan: Plan) -> Iterator[WindowHead | None]:
    """Every window in order; None as long as the next group is not computed."""
    for group in range(plan.groups):
        while plan.groups_ready(offer.ready_layers) <= group:
            yield None
        for window in plan.windows(group, offer.window_bytes):
            yield WindowHead(offer.transfer, group, *window)


def _still(
    offer: Offer, region: Region, rank: int, blocks: NDArray[np.int64]
) -> Callable[[], bool]:
    """Whether these blocks are still the offer's: its lease runs, and nobody has raised a generation."""
    promised = offer.generations[rank][
        offer.ware.order[np.searchsorted(offer.sorted_blocks, blocks)]
    ]
    return lambda: offer.live and region.current(blocks, promised)
