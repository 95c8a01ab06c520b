"""Commands: what the books (source.py, sink.py) return. The agent carries them out, in order, under its lock.

Not here: deciding on any of it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.ends import End
from kvtransfer.messages import Invite, Message
from kvtransfer.transports.base import Link, Slice, WindowHead


class Send(msgspec.Struct, frozen=True):
    link: Link
    message: Message


class SendInvite(msgspec.Struct, frozen=True):
    """Open these blocks of ours to the peer, put the grant into the invitation, and send it."""

    link: Link
    invite: Invite
    blocks: NDArray[np.int64]


class Admit(msgspec.Struct, frozen=True):
    """Source: take the sink's grant."""

    link: Link
    transfer: int
    grant: bytes


class Put(msgspec.Struct, frozen=True):
    link: Link
    head: WindowHead
    window: Slice


class Drop(msgspec.Struct, frozen=True):
    link: Link
    transfer: int


class Fence(msgspec.Struct, frozen=True):
    link: Link
    transfer: int


class Bump(msgspec.Struct, frozen=True):
    """Source: these blocks have changed hands. Always before the Resolve that says so to the engine."""

    blocks: NDArray[np.int64]


class Resolve(msgspec.Struct, frozen=True):
    """Tell the engine how its offer or landing ended. The last command of each."""

    number: int
    end: End


class Progress(msgspec.Struct, frozen=True):
    """Sink: the first `layers` layers of a landing are complete."""

    number: int
    layers: int


class Dial(msgspec.Struct, frozen=True):
    address: str


class Reckon(msgspec.Struct, frozen=True):
    """Long work, to be done without the agent's lock. What it returns is called under it, with the time it is then, and
    says what is due: much may have happened meanwhile."""

    work: Callable[[], Callable[[float], list[Command]]]


Command = Send | SendInvite | Admit | Put | Drop | Fence | Bump | Resolve | Progress | Dial | Reckon

_AT_ONCE_BLOCKS = 4096  # a plan of so many is made in a millisecond
_AT_ONCE_PAIRS = 1024  # and one between so many ranks


def reckoned(
    blocks: int, pairs: int, work: Callable[[], Callable[[float], list[Command]]], now: float
) -> list[Command]:
    """What `work` comes to, a plan of so many blocks and pairs of ranks: at once where it is short, else what it takes
    to have it done."""
    short = blocks <= _AT_ONCE_BLOCKS and pairs <= _AT_ONCE_PAIRS
    return work()(now) if short else [Reckon(work)]
