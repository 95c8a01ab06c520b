"""Invitations that wait for their offers, and names whose offers have ended or are unwanted.

Sans-IO: the caller passes `now`, which never goes back. Not here: who may fetch an offer, and the
answers to invitations (kvtransfer/transfer/source.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from kvtransfer.contract import Link
from kvtransfer.protocol.messages import Invite
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.util.options import AgentOptions
from kvtransfer.util.ttl_map import TtlMap


class PendingInvite(msgspec.Struct, frozen=True):
    """An invitation that waits for its offer, until `deadline` at most."""

    link: Link
    invite: Invite
    deadline: float


class PendingInvites:
    """The waiting invitations: one per name, bounded in total. Owned by TransferSource."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._waiting: dict[str, PendingInvite] = {}
        self._names: dict[tuple[Link, int], str] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._ended: TtlMap[EndReason] = TtlMap(options.name_memory_s)
        self._unwanted: TtlMap[str] = TtlMap(options.name_memory_s)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the awaited names."""
        return iter(self._waiting)

    def next_deadline(self) -> float | None:
        """Return a time at or before the earliest deadline; None: nothing waits."""
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def add(self, link: Link, invite: Invite, now: float) -> EndReason | None:
        """Add an invitation. Returns None, or the reason for refusing it."""
        ended = self._ended.get(invite.name, now)
        if ended is not None:
            return ended
        if invite.name in self._waiting:
            return EndReason.NAME_TAKEN
        if len(self._waiting) >= self._options.max_waiting_invites:
            return EndReason.TOO_MANY_WAITING
        self._unwanted.pop(invite.name, now)
        until = now + min(invite.wait_s, self._options.invite_wait_s)
        self._waiting[invite.name] = PendingInvite(link, invite, until)
        self._names[link, invite.transfer] = invite.name
        heapq.heappush(self._deadlines, (until, invite.name))
        return None

    def take_for_offer(self, name: str, now: float) -> tuple[PendingInvite | None, str | None]:
        """Take the invitation that waits for `name`, now that it is offered.

        Also returns the agent that recently waited for the name and gave up. Both may be None.
        """
        self._ended.pop(name, now)
        return self.remove(name), self._unwanted.pop(name, now)

    def remove(self, name: str) -> PendingInvite | None:
        """Remove and return the invitation that waits for `name`, if any."""
        guest = self._waiting.pop(name, None)
        if guest is not None:
            del self._names[guest.link, guest.invite.transfer]
        return guest

    def withdraw(self, link: Link, transfer: int, agent: str | None, now: float) -> bool:
        """Remove the invitation of this transfer. Returns False if there is none.

        `agent`: the sink that does not want the offer later either; None: it may.
        """
        name = self._names.get((link, transfer))
        if name is None:
            return False
        self.remove(name)
        if agent is not None:
            self.mark_unwanted(name, agent, now)
        return True

    def mark_unwanted(self, name: str, agent: str, now: float) -> None:
        """Remember that `agent` does not want a later offer of this name.

        No-op if an invitation waits for the name. This only saves memory and is not reliable: one
        agent is remembered per name, for a bounded number of names.
        """
        if name not in self._waiting:
            self._unwanted.put(name, agent, now)

    def remove_link(self, link: Link) -> None:
        """Remove all invitations that came over this link."""
        for name in [
            name for (invited_over, _), name in self._names.items() if invited_over is link
        ]:
            self.remove(name)

    def mark_ended(self, name: str, reason: EndReason, now: float) -> None:
        """Refuse later invitations for this name with `reason`, for a while."""
        self._ended.put(name, reason, now)

    def take_expired(self, now: float) -> list[str]:
        """Remove expired deadlines, and return the names whose invitations have expired."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            waiting = self._waiting.get(name)
            if waiting is not None and waiting.deadline <= now:
                expired.append(name)
        return expired
