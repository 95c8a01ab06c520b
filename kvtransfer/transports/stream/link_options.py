"""The options of a connection between two agents over a stream socket."""

from __future__ import annotations

import msgspec

from kvtransfer.protocol.frame import MAX_PAYLOAD_BYTES
from kvtransfer.transport_interface import MAX_LANES


class LinkOptions(msgspec.Struct, frozen=True):
    """The options of a connection between two agents over a stream socket.

    checked       whether windows (pieces of KV) have xxh3-64 checksums. The source computes them
                  over its memory, the sink over its own
    sealed        whether windows are encrypted and authenticated (AES-128-GCM); both agents must
                  use the same value
    spin_s        seconds to poll before sleeping, below 1; four times as long after a sleep that
                  longer polling would have avoided, and 0 while other threads want the core
    window_bytes  preferred maximum size of a window
    native        whether to use the pump (C code) if it is compiled (pump.py)
    lanes         number of connections that this agent opens to another one in parallel (tcp), so
                  that more than one core can copy
    switch_interval_s  maximum of Python's switch interval (sys.setswitchinterval) in seconds while
                  windows move, so that a thread that computes in Python does not slow them down; 0:
                  it is not changed
    """

    checked: bool = True
    sealed: bool = False
    spin_s: float = 50e-6
    window_bytes: int = 8 << 20
    native: bool = True
    lanes: int = 1
    switch_interval_s: float = 100e-6

    def __post_init__(self) -> None:
        if not 0 < self.window_bytes <= MAX_PAYLOAD_BYTES or not 0.0 <= self.spin_s < 1.0:
            raise ValueError(
                f"window_bytes must be 1 to {MAX_PAYLOAD_BYTES} and spin_s below 1 s, got {self}"
            )
        if not 1 <= self.lanes <= MAX_LANES:
            raise ValueError(
                f"the number of lanes (parallel connections) must be 1 to {MAX_LANES}, got {self}"
            )
        if self.switch_interval_s and not 1e-6 <= self.switch_interval_s <= 1.0:
            raise ValueError(f"switch_interval_s must be 0, or 1 µs to 1 s, got {self}")
