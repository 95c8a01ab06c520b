"""Commands that the logic of KV transfers returns. The agent executes them in order, under its
lock.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.protocol.agent_messages import Invite, Message
from kvtransfer.protocol.outcomes import TransferOutcome
from kvtransfer.transport_interface import Link, WindowHead, WindowSlice


class SendMessage(msgspec.Struct, frozen=True):
    """The command to send `message` to another KV agent over `link`."""

    link: Link
    message: Message


class SendInvite(msgspec.Struct, frozen=True):
    """Command to let another agent write to these blocks, and then to invite it to do so."""

    link: Link
    invite: Invite
    blocks: NDArray[np.int64]


class AcceptGrant(msgspec.Struct, frozen=True):
    """Command of the source: keep the sink's permission (grant) to write into its memory."""

    link: Link
    transfer: int
    grant: bytes


class PutWindow(msgspec.Struct, frozen=True):
    """Command of the source to queue a window (piece of a KV transfer) for sending."""

    link: Link
    head: WindowHead
    window: WindowSlice


class DropWindows(msgspec.Struct, frozen=True):
    """Command of the source to drop the queued windows (pieces) of a KV transfer."""

    link: Link
    transfer: int


class FenceTransfer(msgspec.Struct, frozen=True):
    """Command of the sink to stop all writes of a transfer into the sink's blocks."""

    link: Link
    transfer: int


class BumpGenerations(msgspec.Struct, frozen=True):
    """Command of the source to increment the generations (owner counters) of blocks.

    It precedes the command that returns these blocks to the engine.
    """

    blocks: NDArray[np.int64]


class ResolveHandle(msgspec.Struct, frozen=True):
    """Command to report the outcome of an offer or a fetch of KV to the engine.

    It is always the last command of a transfer.
    """

    number: int
    end: TransferOutcome


class ReportLayers(msgspec.Struct, frozen=True):
    """Command of the sink to report that the first `layers` layers of fetched KV are complete."""

    number: int
    layers: int


class DialPeer(msgspec.Struct, frozen=True):
    """Command of the sink to open a connection to the agent at this address."""

    address: str


class EndGroup(msgspec.Struct, frozen=True):
    """Command of the source to end all of its offers, because a rank of its engine is lost.

    The KV of an engine is useful only as a whole.
    """

    detail: str


class ComputePlan(msgspec.Struct, frozen=True):
    """Command to run a long computation, `work`, without the agent's lock.

    `work` returns a function. The agent calls this function with the current time and with the lock
    held, and it returns commands. The state may have changed since the computation began.
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

# Largest plan that is computed while the agent's lock is held. A larger one takes more than about a
# millisecond.
_MAX_INLINE_BLOCKS = 4096
_MAX_INLINE_PAIRS = 1024


def plan_or_defer(
    blocks: int, pairs: int, work: Callable[[], Callable[[float], list[Command]]], now: float
) -> list[Command]:
    """Compute a transfer plan now if it is small; otherwise return a command to compute it later.

    blocks  number of blocks in the plan
    pairs   number of rank pairs in the plan
    work    function that computes the plan; it returns a function of the time that returns commands

    For a small plan, the commands that follow from it are returned. Otherwise the result is one
    ComputePlan, which runs without the agent's lock.
    """
    short = blocks <= _MAX_INLINE_BLOCKS and pairs <= _MAX_INLINE_PAIRS
    return work()(now) if short else [ComputePlan(work)]
