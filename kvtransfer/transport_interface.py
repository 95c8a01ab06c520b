"""The interface between an agent and its transports, which move bytes to and from other agents.

A connection to another agent is a link. It carries messages, and KV in windows: units of some byte
ranges that are verified and acknowledged one by one. A transport moves bytes and stops moving them.
The agent decides what may be moved; it implements LinkOwner, and gets the events of links. The
transports are in kvtransfer/transports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import Region
from kvtransfer.layout.transfer_plan import Blocks

MAX_LANES = 16
# The most bytes that are buffered from a peer without proof of identity.
MAX_UNPROVEN_BYTES = 24 << 10


class TransportError(Exception):
    """Raised if another agent cannot be reached over a transport. The message has the reason."""


class WindowVerdict(StrEnum):
    """Whether a unit of KV (window) arrived intact.

    OK       it is intact
    STALE    the source's blocks were released for reuse while they were read
    CORRUPT  the bytes differ from those that were sent
    """

    OK = "ok"
    STALE = "stale"
    CORRUPT = "corrupt"


class WindowHead(msgspec.Struct, frozen=True, array_like=True):
    """The header of a window, a unit in which KV is sent. It says which bytes of a transfer follow.

    transfer  number of the transfer
    group     number of the group of layers, which are sent together
    pair      number of the pair of source rank and sink rank
    first     number of the first byte range in the plan of that group and pair
    count     number of byte ranges
    n_bytes   sum of their lengths

    It contains no addresses. Source and sink have computed the same plan, from which each takes its
    own addresses.
    """

    transfer: int
    group: int
    pair: int
    first: int
    count: int
    n_bytes: int


class WindowSlice(msgspec.Struct, frozen=True):
    """Where one unit of KV (window) lies in memory, at one of the two agents.

    runs        its byte ranges
    region      the memory to read from or to write to
    src_rank    rank of the source, as an index of its agent's regions
    dst_rank    rank of the sink, as an index of its agent's regions
    is_current  function that returns whether the source's blocks were not released for reuse; None
                at a sink. A transport calls it right before and right after the blocks are read
    """

    runs: ByteRuns
    region: Region
    src_rank: int
    dst_rank: int
    is_current: Callable[[], bool] | None = None


class Link(Protocol):
    """A connection between two KV agents, of any transport. The agent that opened it receives KV.

    That agent is the sink, the other one the source. All methods may be called from any thread,
    also with the owner's lock held. They do not block, and call no method of the owner before they
    return. On a closed or lost link, all methods except `fence` do nothing.
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
        """Return the number of bytes received from the other agent.

        While it grows, the other agent counts as alive.
        """
        ...

    def send(self, message: bytes) -> None:
        """Queue a control message for the other agent.

        Messages and KV that one agent sends arrive in order.
        """
        ...

    def put(self, head: WindowHead, window: WindowSlice) -> None:
        """Queue a unit of KV (window) for sending. Only the sending agent calls this.

        head    which bytes of the transfer it has
        window  where they are in memory

        `on_sent` is called here when the memory has been read. `on_landed` is called at the other
        agent when the window has arrived.
        """
        ...

    def drop(self, transfer: int) -> None:
        """Send no more of a KV transfer: drop what is queued. Only the sending agent calls this.

        A window that has already been sent in part ends as STALE, that is, useless.
        """
        ...

    def expect_windows(self) -> None:
        """Prepare to send or receive KV soon, for example by keeping threads awake.

        Both agents call this when a transfer is agreed on. It only affects speed.
        """
        ...

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        """Let the other agent write to these blocks. Only the receiving agent calls this, once per
        transfer.

        Returns data that the other agent needs to write, such as memory keys (rdma); they are sent
        in the invitation. After the fence (the end of writes) of the transfer, the call permits
        nothing and returns b"".
        """
        ...

    def accept(self, transfer: int, grant: bytes) -> None:
        """Store the permission to write to the receiver's memory. Only the sending agent calls
        this.

        transfer  number of the transfer
        grant     the data that `grant` returned at the receiver

        For shared memory, this also lets the receiver read the sender's memory.
        """
        ...

    def fence(self, transfer: int) -> None:
        """Stop all writes to a transfer's blocks, whatever the other agent does.

        Only the receiving agent calls this, before it returns the blocks to the engine. `on_fenced`
        always follows, even on a lost link and without a permission, because no other event returns
        the blocks. `on_landed` does not follow for windows that were stopped.
        """
        ...

    def secure(self, window_key: bytes) -> None:
        """Set the key with which KV is encrypted, before the first KV is sent.

        Both agents derive the same 32 bytes when they prove their identity. A transport without
        encryption ignores the key. Control messages are signed by the agents themselves
        (kvtransfer/protocol/session_authentication.py).
        """
        ...

    def close(self) -> None:
        """Close the connection to the other agent. Its owner receives no `on_lost` call for it."""
        ...


@runtime_checkable
class MultiLaneLink(Protocol):
    """A connection to another agent that can share its KV with parallel ones (lanes)."""

    lanes: int
    """The number of parallel links wanted, including this one, as decided by the end that opened
    the connection."""
    has_carried_windows: bool
    """Whether this lane has carried windows of the link that owns it.

    If the lane fails, these windows may be lost with it.
    """

    def add_lane(self, lane: Link) -> None:
        """Let the connection `lane` carry KV of this one in parallel.

        The other agent must have proven its identity on the lane. Received KV is reported as KV of
        this connection, but the lane reports its own messages and its own end. Call this on the
        lane's thread.
        """
        ...


class LinkOwner(Protocol):
    """The methods of an agent that its connections (links) call to report events.

    They are called on a thread of the transport, one at a time per link. KV is reported one window
    at a time per parallel connection (lane). The transport must hold no lock at that time, because
    an agent calls links with its own lock held.
    """

    def on_linked(self, link: Link) -> None:
        """Handle that another agent has opened a connection; its identity is not proven yet."""
        ...

    def on_message(self, link: Link, data: bytes) -> None: ...

    def place_window(self, link: Link, head: WindowHead) -> WindowSlice | None:
        """Return where to write a unit of KV (window) that begins to arrive, or None to discard it.

        Called at the receiving agent only. A window is discarded if it is not expected or has
        arrived before. Nothing further is reported about it.
        """
        ...

    def on_landed(self, link: Link, head: WindowHead, verdict: WindowVerdict) -> None:
        """Handle that a unit of KV (window) has arrived; it is usable only if `verdict` is OK."""
        ...

    def on_sent(self, link: Link, head: WindowHead) -> None:
        """Handle that the memory of a queued unit of KV (window) has been read."""
        ...

    def on_fenced(self, link: Link, transfer: int) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None: ...


@runtime_checkable
class WindowForecaster(Protocol):
    """The methods of an agent by which a connection learns which KV will probably arrive on it
    next.

    A transport can then receive several units of KV (windows) at once.
    """

    def following_windows(
        self, link: Link, head: WindowHead, most: int
    ) -> Sequence[tuple[WindowHead, WindowSlice]]:
        """Return the units of KV (windows) that will probably follow the one with this header, in
        order.

        At most `most` are returned. The given window has begun or landed; none of the returned ones
        has begun.

        A transport may write the bytes of a window with exactly such a header before it calls
        `place_window` for it. If that call then returns None, the remaining bytes are discarded.
        `on_fenced` is still called only when nothing is written any more.
        """
        ...

    def on_intact_windows(self, link: Link, heads: Sequence[WindowHead]) -> None:
        """Handle that several units of KV (windows) of one transfer have arrived intact, in order.

        This replaces a call of `on_landed` with the verdict OK for each of them.
        """
        ...


class Transport(Protocol):
    """The interface of a way to reach other agents, such as TCP or shared memory.

    is_sealed  whether KV is encrypted when it leaves this host; None: it does not leave the host
    """

    name: str
    is_sealed: bool | None

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        """Listen for other agents, if the transport can, and return the address for them.

        owner    the agent, which gets the events of connections
        regions  the KV memory of each local rank
        """
        ...

    def dial(self, address: str) -> Link:
        """Open a connection to the agent at `address`, and return it.

        Raises TransportError if the agent cannot be reached.
        """
        ...

    def close(self) -> None:
        """Stop listening, close every connection to other agents, and end every thread of the
        transport.
        """
        ...
