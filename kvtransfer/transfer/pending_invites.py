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
from kvtransfer.protocol.outcomes import Reason
from kvtransfer.util.options import Options
from kvtransfer.util.ttl_map import Remembered


class Guest(msgspec.Struct, frozen=True):
    """An invitation that waits for its offer, until `until` at most."""

    link: Link
    invite: Invite
    until: float


class Guests:
    """The waiting invitations: one per name, bounded in total. Owned by TransferSource."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._waiting: dict[str, Guest] = {}
        self._names: dict[tuple[Link, int], str] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._ended: Remembered[Reason] = Remembered(options.memory_s)
        self._unwanted: Remembered[str] = Remembered(options.memory_s)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the awaited names."""
        return iter(self._waiting)

    def due(self) -> float | None:
        """Return a time at or before the earliest deadline; None: nothing waits."""
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def seat(self, link: Link, invite: Invite, now: float) -> Reason | None:
        """Add an invitation. Returns None, or the reason for refusing it."""
        ended = self._ended.look(invite.name, now)
        if ended is not None:
            return ended
        if invite.name in self._waiting:
            return Reason.NAME_TAKEN
        if len(self._waiting) >= self._options.most_waiting:
            return Reason.TOO_MANY_WAITING
        self._unwanted.take(invite.name, now)
        until = now + min(invite.wait_s, self._options.patience_s)
        self._waiting[invite.name] = Guest(link, invite, until)
        self._names[link, invite.transfer] = invite.name
        heapq.heappush(self._deadlines, (until, invite.name))
        return None

    def offered(self, name: str, now: float) -> tuple[Guest | None, str | None]:
        """Take the invitation that waits for `name`, now that it is offered.

        Also returns the agent that recently waited for the name and gave up. Both may be None.
        """
        self._ended.take(name, now)
        return self.leave(name), self._unwanted.take(name, now)

    def leave(self, name: str) -> Guest | None:
        """Remove and return the invitation that waits for `name`, if any."""
        guest = self._waiting.pop(name, None)
        if guest is not None:
            del self._names[guest.link, guest.invite.transfer]
        return guest

    def give_up(self, link: Link, transfer: int, agent: str | None, now: float) -> bool:
        """Remove the invitation of this transfer. Returns False if there is none.

        `agent`: the sink that does not want the offer later either; None: it may.
        """
        name = self._names.get((link, transfer))
        if name is None:
            return False
        self.leave(name)
        if agent is not None:
            self.unwanted(name, agent, now)
        return True

    def unwanted(self, name: str, agent: str, now: float) -> None:
        """Remember that `agent` does not want a later offer of this name.

        No-op if an invitation waits for the name. This only saves memory and is not reliable: one
        agent is remembered per name, for a bounded number of names.
        """
        if name not in self._waiting:
            self._unwanted.put(name, agent, now)

    def lost(self, link: Link) -> None:
        """Remove all invitations that came over this link."""
        for name in [
            name for (invited_over, _), name in self._names.items() if invited_over is link
        ]:
            self.leave(name)

    def ended(self, name: str, reason: Reason, now: float) -> None:
        """Refuse later invitations for this name with `reason`, for a while."""
        self._ended.put(name, reason, now)

    def overdue(self, now: float) -> list[str]:
        """Remove expired deadlines, and return the names whose invitations have expired."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            waiting = self._waiting.get(name)
            if waiting is not None and waiting.until <= now:
                expired.append(name)
        return expired
