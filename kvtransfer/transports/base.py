"""What a transport is: links between agents that carry small messages in order and windows of KV bytes.

A transport moves bytes and stops moving them; it decides nothing. Who may move what is the books' business,
which the owner of a link asks. Not here: any concrete transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from kvtransfer.lattice import Runs
from kvtransfer.regions import Region
from kvtransfer.reshard import Blocks

MOST_LANES = 16
STRANGER_BYTES = 24 << 10  # the most that is held of what a peer says that has proven nothing


class TransportError(Exception):
    """The peer cannot be reached, or not in this way. The message says why."""


class Verdict(StrEnum):
    """How a window arrived. STALE: the source's blocks were no longer its own while they were read."""

    OK = "ok"
    STALE = "stale"
    CORRUPT = "corrupt"


class WindowHead(msgspec.Struct, frozen=True, array_like=True):
    """What goes ahead of a window's bytes: runs [first, first + count) of one rank pair of one layer group.

    Never an address: both ends hold the same plan and look up their own offsets. `n_bytes` must equal the runs' sum.
    """

    transfer: int
    group: int
    pair: int
    first: int
    count: int
    n_bytes: int


class Slice(msgspec.Struct, frozen=True):
    """A window as one end's plan has it: which runs, and this end's region (the source's to send, the sink's to land).

    `current` says whether the source's blocks are still of the generation that was promised. A transport asks it right
    before and right after it has read the source's memory, on whichever side that happens; None on a sink.
    """

    runs: Runs
    region: Region
    src_rank: int
    dst_rank: int
    current: Callable[[], bool] | None = None


class Link(Protocol):
    """A connection between two agents: who dialled is the sink, who was dialled the source, for its whole life.

    All methods may be called from any thread, also with the owner's lock held: they do not block, and they never call
    the owner before they return. On a link that is closed or lost all but `fence` do nothing.
    """

    transport: str
    peer: str
    received_bytes: int
    """So many have come in from the peer, of whatever kind: as long as it grows, the peer is alive."""
    window_bytes: int
    """What a window should measure here at most: larger ones cost less, smaller ones are fairer."""
    one_sided: bool
    """The source's device writes the sink's memory by itself, once `grant` has registered it. So `grant` takes its time
    here and is called without any lock; and what has landed may change until the fence."""

    def send(self, message: bytes) -> None:
        """Queue a control message; it keeps its order among this side's messages and windows."""
        ...

    def put(self, head: WindowHead, window: Slice) -> None:
        """Queue a window of the source. The far owner hears `landed`, the near owner `sent`."""
        ...

    def drop(self, transfer: int) -> None:
        """Source: forget the transfer's queued windows. One whose bytes have begun ends with verdict STALE."""
        ...

    def grant(self, transfer: int, regions: Sequence[Region], blocks: Blocks) -> bytes:
        """Sink: let the peer write these blocks; the result travels in the invitation (rdma: keys; others: empty).

        Once for a transfer. Also after its fence was asked for: then nothing is let, and the result is empty."""
        ...

    def accept(self, transfer: int, grant: bytes) -> None:
        """Source: take the sink's grant (and, for shm, say how the sink may read us)."""
        ...

    def fence(self, transfer: int) -> None:
        """Sink: stop all writing into the transfer's blocks, whatever the peer does. `fenced` follows, soon and surely.

        Also on a link that is closed or lost, and for a transfer that was never granted: nothing else gives the blocks
        back. `landed` does not follow any more for windows that the fence has stopped.
        """
        ...

    def secure(self, window_key: bytes) -> None:
        """Both ends have proven who they are and share this key of 32 bytes, before the first window. A transport that
        seals windows seals them with it; control messages are sealed by the agents (session.py)."""
        ...

    def close(self) -> None:
        """Give up the connection. The owner hears `lost` unless it closed it itself."""
        ...


@runtime_checkable
class Laned(Protocol):
    """A link that can share its windows with more links to the same peer."""

    lanes: int
    """Links that are wanted here, this one among them. Whoever dials decides."""
    used: bool
    """As a lane: windows of the other link have gone by here. If it is lost, so may one of them be."""

    def widen(self, lane: Link) -> None:
        """From now on `lane`, proven and secured by the same peer, carries windows of this link as well. What it tells
        of them is told as this link's; its messages and its end are its own. Called on the lane's thread."""
        ...


class LinkOwner(Protocol):
    """Who hears from links. Called on the transport's own thread (or the simulation's), one call at a time per link;
    of windows one at a time per lane.

    None of the transport's locks may be held then: an owner calls links with its own lock held.
    """

    def linked(self, link: Link) -> None:
        """A peer dialled us, a moment ago. Nothing is known of it yet, not even whether the way will open."""
        ...

    def message(self, link: Link, data: bytes) -> None: ...

    def incoming(self, link: Link, head: WindowHead) -> Slice | None:
        """Sink: where this window goes. None: it is not (or no longer) expected; its bytes are read and thrown away,
        and neither `landed` nor anything else follows. Of a window that came twice the second is not expected."""
        ...

    def landed(self, link: Link, head: WindowHead, verdict: Verdict) -> None:
        """Sink: all bytes of a window are in place (OK), or what is in place must not be used."""
        ...

    def sent(self, link: Link, head: WindowHead) -> None:
        """Source: the window's bytes have been read from memory; its credit may be used again."""
        ...

    def fenced(self, link: Link, transfer: int) -> None: ...

    def lost(self, link: Link, reason: str) -> None: ...


class Transport(Protocol):
    """One way to reach peers. `sealed`: windows leave this host encrypted, or plain; None: they do not leave it."""

    name: str
    sealed: bool | None

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        """Listen (where that applies) and return the address peers dial. `regions`: one per local rank."""
        ...

    def dial(self, address: str) -> Link:
        """A link to the agent at `address`. Blocks at most a few seconds; raises TransportError."""
        ...

    def close(self) -> None:
        """Stop listening, close every link, end every thread."""
        ...
