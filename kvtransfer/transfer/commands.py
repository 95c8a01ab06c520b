"""What the agent must do after an event of a KV transfer: send a message, stop writes, and so on.

The logic in source.py (sending) and sink.py (receiving) does no I/O. It returns these commands, and
the agent executes them in order, under its lock.
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
    """Command to give another agent access to these blocks, then to ask it to write KV there."""

    link: Link
    invite: Invite
    blocks: NDArray[np.int64]


class AcceptGrant(msgspec.Struct, frozen=True):
    """Command of the sending agent to store the permission to write to the receiver's memory."""

    link: Link
    transfer: int
    grant: bytes


class PutWindow(msgspec.Struct, frozen=True):
    """Command of the sending agent to queue some bytes of a KV transfer (a window) for sending.

    head    which bytes of the transfer they are
    window  where they are in memory
    """

    link: Link
    head: WindowHead
    window: WindowSlice


class DropWindows(msgspec.Struct, frozen=True):
    """Command of the sending agent to send no more of a KV transfer.

    Its queued windows, the units in which KV is sent, are dropped.
    """

    link: Link
    transfer: int


class FenceTransfer(msgspec.Struct, frozen=True):
    """Command of the receiving agent to stop all writes of a transfer into its blocks.

    Only then may the engine use the blocks again.
    """

    link: Link
    transfer: int


class BumpGenerations(msgspec.Struct, frozen=True):
    """Command of the sending agent to raise the reuse counters (generations) of blocks.

    So late reads of these blocks are detected. A later command returns the blocks to the engine.
    """

    blocks: NDArray[np.int64]


class ResolveHandle(msgspec.Struct, frozen=True):
    """Command to report to the engine how an offer or a fetch of KV has ended.

    It is always the last command of a transfer.

    number  number of the offer or fetch
    end     the outcome
    """

    number: int
    end: TransferOutcome


class ReportLayers(msgspec.Struct, frozen=True):
    """Command of the receiving agent to report to the engine that some layers of KV are complete.

    number  number of the fetch
    layers  how many layers, from the first one on
    """

    number: int
    layers: int


class DialPeer(msgspec.Struct, frozen=True):
    """Command of the receiving agent to open a connection to the agent at this address."""

    address: str


class EndGroup(msgspec.Struct, frozen=True):
    """Command to end all offers of KV of this agent, because the agent of another rank is lost.

    The KV of an engine is useful only as a whole.
    """

    detail: str


class ComputePlan(msgspec.Struct, frozen=True):
    """Command to compute which bytes a KV transfer copies; slow, so done without the agent's lock.

    The agent calls `work` without its lock. With its lock, it then calls the returned function with
    the current time, which returns further commands. Meanwhile the agent's state may have changed.
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
    """Compute which bytes a KV transfer copies, now if that is quick, otherwise by a command.

    blocks  number of blocks to copy
    pairs   number of pairs of ranks between which they are copied
    work    function that does the computation. It returns a function of the time that returns
            commands

    Returns these commands if `work` was done now. Otherwise returns one ComputePlan command, with
    which the agent calls `work` later, without its lock.
    """
    short = blocks <= _MAX_INLINE_BLOCKS and pairs <= _MAX_INLINE_PAIRS
    return work()(now) if short else [ComputePlan(work)]
