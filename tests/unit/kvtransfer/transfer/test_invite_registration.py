"""Tests that memory is registered with a network card before another agent may write KV to it.

This happens on another thread, in order, and only if needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtransfer.protocol.agent_messages import Invite
from kvtransfer.transfer.commands import SendInvite
from kvtransfer.transfer.invite_registration import InviteRegistration
from kvtransfer.transport_interface import TransportError
from kvtransfer.util.agent_lock import AgentLock
from kvtransfer.util.clock import ThreadClock


class SlowGrantLink:
    """A fake connection that registers memory only after the event `go` is set.

    It does not know transfer 3, and raises an error for transfer 2.
    """

    peer = "p"

    def __init__(self) -> None:
        self.go = threading.Event()

    def grant(self, transfer: int, regions: object, blocks: object) -> bytes:
        assert self.go.wait(20)
        if transfer == 2:
            raise OSError("the test lets the registration of transfer 2 fail")
        if transfer == 3:
            raise TransportError("the test refuses to register the memory of transfer 3")
        return b"%d" % transfer


class Host:
    def __init__(self, clock: Any) -> None:
        self.hold, self.said, self.link = AgentLock(), list[tuple[int, object]](), SlowGrantLink()
        self.all = threading.Event()
        self.inviting = InviteRegistration([], clock, self.hold, self.say, self.say)

    def say(self, command: SendInvite, what: object) -> None:
        self.said.append((command.invite.transfer, what))
        if len(self.said) == 4:
            self.all.set()

    def put(self, transfer: int) -> None:
        invite = Invite(transfer, "r", b"", 1, 0, 1.0, 1.0, 0, 1)
        with self.hold:
            self.inviting.add(SendInvite(self.link, invite, np.zeros(0, np.int64)))  # type: ignore[arg-type]


def test_grants_run_without_the_lock_and_are_sent_in_order() -> None:
    clock = ThreadClock()
    host = Host(clock)
    for transfer in (1, 2, 3, 4):
        host.put(transfer)  # this call would wait for ever if the lock were held
    host.link.go.set()
    assert host.all.wait(20)
    assert host.said == [
        (1, b"1"),
        (2, "the test lets the registration of transfer 2 fail"),
        (3, "the test refuses to register the memory of transfer 3"),
        (4, b"4"),
    ]
    clock.close()


def test_without_a_thread_an_invitation_fails_at_once() -> None:
    class ThreadlessClock:
        def run_in_thread(self, call: Callable[[], None]) -> None:
            raise RuntimeError("can't start new thread")

    host = Host(ThreadlessClock())
    host.put(1)
    assert host.said == [(1, "can't start new thread")]
