"""Commands of the source and the sink, which the agent executes in order under its lock."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.contract import Link, WindowHead, WindowSlice
from kvtransfer.protocol.messages import Invite, Message
from kvtransfer.protocol.outcomes import TransferOutcome


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message over the link."""

    link: Link
    message: Message


class SendInvite(msgspec.Struct, frozen=True):
    """Grant the peer access to these blocks, add the grant to the invitation, and send it."""

    link: Link
    invite: Invite
    blocks: NDArray[np.int64]


class AcceptGrant(msgspec.Struct, frozen=True):
    """Source: hand the sink's grant to the link."""

    link: Link
    transfer: int
    grant: bytes


class PutWindow(msgspec.Struct, frozen=True):
    """Source: queue a window."""

    link: Link
    head: WindowHead
    window: WindowSlice


class DropWindows(msgspec.Struct, frozen=True):
    """Source: drop the transfer's queued windows."""

    link: Link
    transfer: int


class FenceTransfer(msgspec.Struct, frozen=True):
    """Sink: stop all writes of the transfer."""

    link: Link
    transfer: int


class BumpGenerations(msgspec.Struct, frozen=True):
    """Source: increment the generations of blocks that change owner.

    Always before their Resolve.
    """

    blocks: NDArray[np.int64]


class ResolveHandle(msgspec.Struct, frozen=True):
    """Report the outcome of an offer or a landing to the engine. The last command of each."""

    number: int
    end: TransferOutcome


class ReportLayers(msgspec.Struct, frozen=True):
    """Sink: report that the first `layers` layers of a landing are complete."""

    number: int
    layers: int


class DialPeer(msgspec.Struct, frozen=True):
    """Sink: dial the agent at this address."""

    address: str


class EndGroup(msgspec.Struct, frozen=True):
    """Source: end all offers, because a rank of the group is lost."""

    detail: str


class ComputePlan(msgspec.Struct, frozen=True):
    """Run `work` without the agent's lock, then call its result under the lock.

    The result is called with the current time and returns commands. The state may have changed in
    the meantime.
    """

    work: Callable[[], Callable[[float], list[Command]]]


Command = (
    SendMessage
    | SendInvite
    | AcceptGrant
    | PutWindow
    | DropWindows
    | FenceTransfer
    | BumpGenerations
    | ResolveHandle
    | ReportLayers
    | DialPeer
    | EndGroup
    | ComputePlan
)

# Larger plans take more than about a millisecond, and are computed without the agent's lock.
_MAX_INLINE_BLOCKS = 4096
_MAX_INLINE_PAIRS = 1024


def plan_or_defer(
    blocks: int, pairs: int, work: Callable[[], Callable[[float], list[Command]]], now: float
) -> list[Command]:
    """Compute a plan of this many blocks and rank pairs with `work`.

    Returns the commands of a small plan, and a command to compute a large one.
    """
    short = blocks <= _MAX_INLINE_BLOCKS and pairs <= _MAX_INLINE_PAIRS
    return work()(now) if short else [ComputePlan(work)]
