"""Registers memory with the network card (RDMA) before another agent is invited to write to it.

A card can only write to registered memory. Registration is slow, so it runs on other threads; the
invitations are then sent in their original order. sink.py decides whether a fetch is still wanted.
transports/rdma/memory_grants.py registers memory.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from kvtransfer.layout.memory_regions import Region
from kvtransfer.transfer.commands import SendInvite
from kvtransfer.transport_interface import Link, TransportError
from kvtransfer.util.agent_lock import AgentLock
from kvtransfer.util.clock import Clock

log = logging.getLogger("penstock")


class InviteRegistration:
    """Registers memory with a network card (RDMA), so that another agent can write KV to it.

    There is one thread per connection, which keeps the order of the invitations. The other agents
    require this order, because they accept only increasing transfer numbers.

    granted  function called under the lock with an invitation and the data that permit the writes
    failed   function called under the lock with an invitation whose memory cannot be registered,
             and the reason
    """

    def __init__(
        self,
        regions: Sequence[Region],
        clock: Clock,
        lock: AgentLock,
        granted: Callable[[SendInvite, bytes], None],
        failed: Callable[[SendInvite, str], None],
    ) -> None:
        self._regions, self._clock, self._lock = regions, clock, lock
        self._granted, self._failed = granted, failed
        self._queued: dict[Link, deque[SendInvite]] = {}

    def add(self, command: SendInvite) -> None:
        """Register the memory for an invitation in the background; `granted` is called when that is
        done.

        Call this with the agent's lock held.
        """
        if command.link in self._queued:
            self._queued[command.link].append(command)
            return
        self._queued[command.link] = deque([command])
        try:
            self._clock.run_in_thread(lambda: self._work(command.link))
        except RuntimeError as error:
            # No thread can be started.
            for queued in self._queued.pop(command.link):
                self._failed(queued, str(error))

    def _work(self, link: Link) -> None:
        while True:
            with self._lock:
                if not self._queued[link]:
                    del self._queued[link]
                    return
                command = self._queued[link].popleft()
            try:
                grant = link.grant(command.invite.transfer, self._regions, command.blocks)
            except Exception as error:
                # The queued invitations must be handled after any error.
                if not isinstance(error, TransportError):
                    log.exception("kv: registering memory for the link to %s failed", link.peer)
                with self._lock:
                    self._failed(command, str(error))
            else:
                with self._lock:
                    self._granted(command, grant)
