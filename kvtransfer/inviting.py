"""Inviting: invitations over links whose sink must register memory first. Registered aside, said in order.

Not here: whether a landing is still wanted (sink.py), what registering is (transports/rdma_grants.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from kvtransfer.clock import Clock
from kvtransfer.commands import SendInvite
from kvtransfer.hold import Hold
from kvtransfer.regions import Region
from kvtransfer.transports.base import Link, TransportError

log = logging.getLogger("penstock")


class Inviting:
    """One thread a link, for as long as there is something to register: a source takes numbers of transfers only as
    they grow. `granted` and `failed` are called under the lock."""

    def __init__(
        self,
        regions: Sequence[Region],
        clock: Clock,
        hold: Hold,
        granted: Callable[[SendInvite, bytes], None],
        failed: Callable[[SendInvite, str], None],
    ) -> None:
        self._regions, self._clock, self._hold = regions, clock, hold
        self._granted, self._failed = granted, failed
        self._due: dict[Link, deque[SendInvite]] = {}

    def put(self, command: SendInvite) -> None:
        """Under the lock."""
        if command.link in self._due:
            self._due[command.link].append(command)
            return
        self._due[command.link] = deque([command])
        try:
            self._clock.aside(lambda: self._work(command.link))
        except RuntimeError as wrong:  # there is no thread to be had
            for left in self._due.pop(command.link):
                self._failed(left, str(wrong))

    def _work(self, link: Link) -> None:
        while True:
            with self._hold:
                if not self._due[link]:
                    del self._due[link]
                    return
                command = self._due[link].popleft()
            try:
                grant = link.grant(command.invite.transfer, self._regions, command.blocks)
            except (
                Exception
            ) as wrong:  # whatever a card says: the invitations behind it are still to be worked
                if not isinstance(wrong, TransportError):
                    log.exception("kv: the link to %s cannot register memory", link.peer)
                with self._hold:
                    self._failed(command, str(wrong))
            else:
                with self._hold:
                    self._granted(command, grant)
