"""The state of one offer of KV at the sending agent, with the lease that keeps its blocks.

The lease is the promise that the blocks are not reused until the KV is fetched or time is up.
source.py decides whether an offer may be fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.byte_ranges import sorted_distinct
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.transfer_plan import TransferPlan
from kvtransfer.protocol.lease import Lease
from kvtransfer.transfer.transfer_order import Priority
from kvtransfer.transport_interface import Link, WindowHead

_NONE = np.empty(0, np.int64)
# Maximum number of valid tickets of one offer. Renewing a ticket keeps earlier ones valid, because
# a message with one of them may be in transit.
_MAX_TICKETS = 8


class OfferSpec(msgspec.Struct, frozen=True):
    """What an engine offers: the KV of `tokens` tokens, which is in `blocks`, and to whom.

    ready_layers  number of layers that are already computed
    ttl_s         seconds until the offer ends unless it is being fetched
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
    """The state of one offer of KV at the sending agent.

    If each rank of the fetching engine fetches separately, the offer is divided into shares. A
    share is also an object of this class.

    generations    the blocks' generations (reuse counters) per rank when the offer was made
    sorted_blocks  its block numbers in ascending order, for fast searches
    lease          the promise to keep its blocks; setting one that has ended clears `lease_flag`
    lease_flag     uint32 array (1,): 1 until the lease ends, for native code
    nonces         nonces of its latest tickets
    link           connection to the agent that fetches it; None: it is not being fetched
    transfer       that agent's number of the transfer
    plan           which bytes are copied; None until it is computed
    shares         the shares by rank of the fetching engine, once a rank has fetched
                   (offer_division.py)
    claimed_by     the engine that shares the offer among its ranks, and its layout
    whole          for a share: the whole offer; otherwise None
    rank           for a share: the rank that may fetch it; otherwise -1
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
        """Return whether no agent has begun to fetch any part of the offer.

        Returns False for the share of one rank, which is a part of another offer.
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
        """Return which bytes of the offered KV are sent next, or None if there are none.

        There are none if all have been sent, or if the next layers are not computed yet.
        """
        if self.head is None:
            self.head = next(self.windows, None)
        return self.head
