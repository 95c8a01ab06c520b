"""The options of a KV transfer agent: times and limits, with their defaults."""

from __future__ import annotations

import msgspec

from kvtransfer.protocol.frame import MAX_PAYLOAD_BYTES

# Windows in flight by default. A sink expects half of them in one batch, and a batch takes the
# interpreter lock once at either end.
_WINDOWS = 8


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Time and size limits of a KV transfer agent.

    beat_s                    seconds between heartbeats; equal at both agents
    max_missed_beats          number of missed heartbeats after which a connection counts as lost;
                              equal at both agents
    handshake_s               seconds in which both agents must prove their identity on a new
                              connection
    window_bytes              maximum size of a window (piece of KV) to send; a connection may
                              prefer smaller ones
    budget_bytes              maximum number of bytes in flight to this agent on one connection; 0:
                              eight windows, so that four can move in one batch
    invite_wait_s             maximum seconds for which another agent's invitation to send KV waits
                              until that KV is offered
    name_memory_s             seconds for which the name of an ended or unwanted offer is remembered
    max_waiting_invites       maximum number of invitations that wait at this agent
    max_unproven_links        maximum number of connections whose peer has not yet proven that it
                              has the key; a further one closes the oldest
    max_unproven_per_address  maximum number of such connections from one IPv4 address or IPv6 /64
    family                    text that must be equal at both agents: weights, quantisation
    host                      identifier that is equal exactly for agents that can share memory;
                              None: it is detected; "": memory is never shared
    """

    beat_s: float = 0.25
    max_missed_beats: int = 3
    handshake_s: float = 2.0
    window_bytes: int = 8 << 20
    budget_bytes: int = 0
    invite_wait_s: float = 60.0
    name_memory_s: float = 30.0
    max_waiting_invites: int = 1024
    max_unproven_links: int = 64
    max_unproven_per_address: int = 32
    family: str = ""
    host: str | None = None

    def __post_init__(self) -> None:
        if not (self.beat_s >= 0.001 and self.max_missed_beats >= 1 and self.handshake_s > 0.0):
            raise ValueError(
                f"beat_s, max_missed_beats and handshake_s must be positive, got {self}"
            )
        if not 0 < self.window_bytes <= MAX_PAYLOAD_BYTES or self.budget_bytes < 0:
            raise ValueError(
                f"window_bytes must be 1 to {MAX_PAYLOAD_BYTES} and budget_bytes not negative, got "
                f"{self}"
            )
        if not self.budget_bytes:
            msgspec.structs.force_setattr(self, "budget_bytes", _WINDOWS * self.window_bytes)
        if not self.max_unproven_per_address >= 1 or not self.max_unproven_links >= 1:
            raise ValueError(f"the limits of unproven links must be at least 1, got {self}")

    @property
    def silence_s(self) -> float:
        """Return for how many seconds another agent may be silent before it counts as lost."""
        return self.beat_s * self.max_missed_beats
