"""The interface of KV transports: links that carry ordered messages and KV bytes between agents.

KV is sent in windows, pieces of a transfer that are acknowledged one by one. A transport moves
bytes and stops moving them; LinkOwner, which owns a link, decides who may move what. Concrete
transports are in kvtransfer/transports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.reshard import Blocks

MAX_LANES = 16
# The most bytes that are buffered from a peer without proof of identity.
MAX_UNPROVEN_BYTES = 24 << 10


class TransportError(Exception):
    """Raised when another agent cannot be reached over a transport; the message gives the
    reason.
    """


class WindowVerdict(StrEnum):
    """Whether the bytes of a window (a piece of a KV transfer) arrived intact.

    OK       they did
    STALE    the source's blocks changed owner while they were read
    CORRUPT  the bytes differ from those that were sent
    """

    OK = "ok"
    STALE = "stale"
    CORRUPT = "corrupt"


class WindowHead(msgspec.Struct, frozen=True, array_like=True):
    """The header of a window (piece of a KV transfer), which names the byte ranges in the window.

    transfer  number of the transfer
    group     number of the layer group (some layers that are sent together)
    pair      number of the pair of source rank and sink rank
    first     number of the first byte range (run) in the plan of that group and pair
    count     number of byte ranges
    n_bytes   sum of their lengths

    The header contains no addresses: both ends have computed the same plan, and look up their own
    offsets in it.
    """

    transfer: int
    group: int
    pair: int
    first: int
    count: int
    n_bytes: int


class WindowSlice(msgspec.Struct, frozen=True):
    """A window (a piece of a KV transfer) as one end sees it.

    runs        the window's byte ranges
    region      this end's memory to read from or write to
    src_rank    the source's rank: index of a region in its agent, which may have only one rank
    dst_rank    the sink's rank
    is_current  function that returns whether the source's blocks still have the promised
                generations; None on a sink. A transport calls it right before and right after it
                reads the source's memory, on whichever side that happens
    """

    runs: ByteRuns
    region: Region
    src_rank: int
    dst_rank: int
    is_current: Callable[[], bool] | None = None


class Link(Protocol):
    """A connection between two KV agents; the agent that opened it is always the sink (receiver).

    All methods may be called from any thread, also with the owner's lock held. They do not block,
    and never call the owner before they return. On a closed or lost link, all but `fence` do
    nothing.
    """

    transport: str
    peer: str
    window_bytes: int
    """The preferred maximum size in bytes of a window (a piece of a KV transfer).

    Larger windows cost less CPU per byte. Smaller ones let other transfers take their turn sooner.
    """
    is_one_sided: bool
    """Whether the source's device writes the sink's memory directly, once `grant` has registered
    it.

    `grant` then blocks, and is called without any lock. Bytes that have arrived may be overwritten
    until the fence.
    """

    @property
    def received_bytes(self) -> int:
        """Return the total bytes received from the peer.

        While this number grows, the peer counts as alive.
        """
        ...

    def send(self, message: bytes) -> None:
        """Queue a control message for the other agent.

        Messages and KV bytes of one side keep their order.
        """
        ...

    def put(self, head: WindowHead, window: WindowSlice) -> None:
        """Queue a window (a piece of a KV transfer) to be sent by the source.

        Then `on_landed` is called at the receiver and `on_sent` at the source.
        """
        ...

    def drop(self, transfer: int) -> None:
        """Remove the windows (pieces of KV) of a transfer from the send queue; only a source calls
        this.

        A window whose sending has begun ends as STALE.
        """
        ...

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        """Let the other agent write to these blocks of KV, and return data for the invitation; only
        a sink calls this.

        For rdma the data are memory keys. The method is called once per transfer. After the
        transfer's fence it grants nothing and returns b"".
        """
        ...

    def accept(self, transfer: int, grant: bytes) -> None:
        """Use the permission that the sink has granted to write to its memory; only a source calls
        this.

        transfer  number of the transfer
        grant     the data that the sink's `grant` returned

        For shared memory (shm), the call also shares the source's memory with the sink.
        """
        ...

    def fence(self, transfer: int) -> None:
        """Stop all writes into the transfer's blocks, whatever the other agent does; only a sink
        calls this.

        `on_fenced` always follows, also on a closed or lost link and for a transfer without a
        grant, because no other event returns the blocks. `on_landed` does not follow for windows
        that the fence stopped.
        """
        ...

    def secure(self, window_key: bytes) -> None:
        """Set the key with which a transport encrypts KV, before the first KV bytes.

        Both ends derive the same 32 bytes when they prove their identity. A transport without
        encryption ignores the key. Control messages are authenticated by the agents
        (kvtransfer/protocol/session.py).
        """
        ...

    def close(self) -> None:
        """Close the connection to the other agent. Its owner receives no `on_lost` call for it."""
        ...


@runtime_checkable
class MultiLaneLink(Protocol):
    """A connection to another agent that can share its KV traffic with parallel connections (lanes)
    to the same agent.
    """

    lanes: int
    """The number of parallel links wanted, including this one. The end that opened the connection
    decides."""
    has_carried_windows: bool
    """Whether this lane has carried windows of the link that owns it.

    If the lane fails, these windows may be lost with it.
    """

    def add_lane(self, lane: Link) -> None:
        """Let `lane`, a further connection to the same agent, carry KV for this link.

        The lane must be proven and secured. It reports the windows as this link's windows; its
        messages and its end remain its own. Called on the lane's thread.
        """
        ...


class LinkOwner(Protocol):
    """The interface of the object that receives the events of connections between KV agents.

    Called on the transport's thread, one call at a time per link and, for windows, per lane. The
    transport must hold no lock then, because an owner calls links with its own lock held.
    """

    def on_linked(self, link: Link) -> None:
        """Record a connection that another agent has just opened; that agent has not proven its
        identity yet.
        """
        ...

    def on_message(self, link: Link, data: bytes) -> None: ...

    def place_window(self, link: Link, head: WindowHead) -> WindowSlice | None:
        """Return where to write an arriving window (piece of a KV transfer); only called at a sink.

        None means that the window is not expected, or has arrived before. Its bytes are read and
        discarded, and no further call follows for it.
        """
        ...

    def on_landed(self, link: Link, head: WindowHead, verdict: WindowVerdict) -> None:
        """Record that a window (a piece of a KV transfer) has arrived.

        Its bytes may only be used if `verdict` is OK.
        """
        ...

    def on_sent(self, link: Link, head: WindowHead) -> None:
        """Record that the bytes of a queued window (piece of a KV transfer) have been read from the
        source's memory.
        """
        ...

    def on_fenced(self, link: Link, transfer: int) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None: ...


@runtime_checkable
class WindowForecaster(Protocol):
    """The interface of a LinkOwner that knows which windows (pieces of KV) will arrive next."""

    def following_windows(
        self, link: Link, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        """Return at most `most` windows that will probably follow the one with this header, in
        order.

        `place_window` has returned a place for that one, and not for any of the others. A transport
        may write the bytes of a window with exactly such a header before it calls `place_window`
        for it. If that then returns None, the rest of the bytes is discarded. As for any window,
        `on_fenced` follows only when nothing is written any more.
        """
        ...


class Transport(Protocol):
    """One way to reach peers, such as TCP or shared memory.

    is_sealed  whether KV leaves this host encrypted; None: it does not leave the host
    """

    name: str
    is_sealed: bool | None

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        """Listen for other agents, if the transport can, and return the address for them.

        There is one region of KV memory per local rank.
        """
        ...

    def dial(self, address: str) -> Link:
        """Listen for other agents, if the transport can, and return the address at which they reach
        it.

        There is one region of KV memory per local rank.
        """
        ...

    def close(self) -> None:
        """Stop listening, close every connection to other agents, and end every thread of the
        transport.
        """
        ...
