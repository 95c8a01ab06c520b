"""Tests of the relay that injects faults into KV connections of mock engines.

One end of the connection leaves early or comes late.
"""

from __future__ import annotations

from typing import Any

from mockgpu.handoff.faulty_link import FaultyRelay, RelayConnection


class Transport:
    def __init__(self) -> None:
        self.written, self.aborted = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


def connected(end: RelayConnection) -> Any:
    transport = Transport()
    end.connection_made(transport)
    return transport


def test_a_peer_that_leaves_while_the_agent_is_dialled_leaves_no_connection_behind() -> None:
    wire = FaultyRelay("127.0.0.1")
    near = RelayConnection(wire, lambda end: None)
    connected(near)
    near.connection_lost(None)
    assert connected(RelayConnection(wire, None, near)).aborted


def test_what_came_before_the_agent_was_reached_is_carried_then() -> None:
    wire = FaultyRelay("127.0.0.1")
    near = RelayConnection(wire, lambda end: None)
    connected(near)
    near.data_received(b"early")
    far = connected(RelayConnection(wire, None, near))
    assert (far.written, far.aborted) == (b"early", False)
