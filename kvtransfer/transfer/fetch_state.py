"""The state of one fetch of KV at the receiving agent (sink), and the engine's request for it.

sink.py decides how the state changes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.transfer_plan import TransferPlan
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.transfer.receive_tracker import ReceiveTracker
from kvtransfer.transfer.transfer_order import Priority
from kvtransfer.transfer.window_forecast import WindowForecast
from kvtransfer.transport_interface import Link


class FetchRequest(msgspec.Struct, frozen=True):
    """An engine's request to its agent to fetch the KV of tokens [skip_tokens, tokens) into
    `blocks`.

    address  address of the agent that offers the KV
    name     name of the offer
    """

    address: str
    name: str
    blocks: NDArray[np.int64]
    tokens: int
    skip_tokens: int
    timeout_s: float
    priority: Priority = Priority.INTERACTIVE
    ticket: str | None = None


class SinkState(StrEnum):
    """The states of a fetch of KV at the receiving agent.

    WAITING  the fetch waits for a connection to the other agent
    INVITED  the other agent may write into the blocks
    MOVING   the other agent is writing into the blocks
    FENCING  the fetch is over, but a late write may still arrive; the blocks are not free yet
    """

    WAITING = "waiting"
    INVITED = "invited"
    MOVING = "moving"
    FENCING = "fencing"


class BlockReservation:
    """One fetch of KV at the receiving agent: the blocks that it writes to, and its progress.

    Only TransferSink uses it.
    """

    __slots__ = (
        "deadline",
        "end",
        "forecast",
        "is_invited",
        "layers",
        "layout",
        "link",
        "moving_since",
        "number",
        "peer",
        "plan",
        "request",
        "source_rank",
        "started_at",
        "state",
        "tracker",
    )  # fmt: skip

    def __init__(self, number: int, request: FetchRequest, now: float) -> None:
        self.number, self.request = number, request
        self.started_at, self.deadline = now, now + request.timeout_s
        self.state = SinkState.WAITING
        self.link: Link | None = None
        self.is_invited = False
        self.peer = ""
        self.layout: KvLayout | None = None
        self.source_rank: int | None = None
        self.plan: TransferPlan | None = None
        self.tracker: ReceiveTracker | None = None
        self.forecast: WindowForecast | None = None
        self.moving_since = now
        self.layers = 0
        self.end: tuple[EndReason, str] | None = None
