"""Guests: invitations that came before their offers, and what was said lately of names, so that nobody waits for what
will not come. Sans-IO: `now` is given, and never goes back.

Not here: whom an offer is for, or what is answered (source.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from kvtransfer.ends import Reason
from kvtransfer.messages import Invite
from kvtransfer.options import Options
from kvtransfer.remembered import Remembered
from kvtransfer.transports.base import Link


class Guest(msgspec.Struct, frozen=True):
    """An invitation that waits, until `until` at most."""

    link: Link
    invite: Invite
    until: float


class Guests:
    """One to a name, and so many in all. Owned by the SourceBook."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._seated: dict[str, Guest] = {}
        self._names: dict[tuple[Link, int], str] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._ended: Remembered[Reason] = Remembered(options.memory_s)
        self._unwanted: Remembered[str] = Remembered(options.memory_s)

    def __len__(self) -> int:
        return len(self._seated)

    def __iter__(self) -> Iterator[str]:
        """The names that are waited for."""
        return iter(self._seated)

    def due(self) -> float | None:
        """When somebody may have waited long enough, or earlier."""
        while self._deadlines and self._deadlines[0][1] not in self._seated:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def seat(self, link: Link, invite: Invite, now: float) -> Reason | None:
        """Let it wait. Or why it cannot."""
        ended = self._ended.look(invite.name, now)
        if ended is not None:
            return ended
        if invite.name in self._seated:
            return Reason.NAME_TAKEN
        if len(self._seated) >= self._options.most_waiting:
            return Reason.TOO_MANY_WAITING
        self._unwanted.take(invite.name, now)
        until = now + min(invite.wait_s, self._options.patience_s)
        self._seated[invite.name] = Guest(link, invite, until)
        self._names[link, invite.transfer] = invite.name
        heapq.heappush(self._deadlines, (until, invite.name))
        return None

    def offered(self, name: str, now: float) -> tuple[Guest | None, str | None]:
        """The name is on offer: who waits for it, no longer; and the agent that lately waited for it and gave up."""
        self._ended.take(name, now)
        return self.leave(name), self._unwanted.take(name, now)

    def leave(self, name: str) -> Guest | None:
        """Who waits for it need not any more."""
        guest = self._seated.pop(name, None)
        if guest is not None:
            del self._names[guest.link, guest.invite.transfer]
        return guest

    def give_up(self, link: Link, transfer: int, agent: str | None, now: float) -> bool:
        """This one waits no longer; `agent`: it does not want the offer either. False: it did not wait."""
        name = self._names.get((link, transfer))
        if name is None:
            return False
        self.leave(name)
        if agent is not None:
            self.unwanted(name, agent, now)
        return True

    def unwanted(self, name: str, agent: str, now: float) -> None:
        """This agent does not want what may yet be offered by that name; who waits for it there does. A word that
        spares memory, not one to rely on: the latest agent's counts, and so many names are remembered."""
        if name not in self._seated:
            self._unwanted.put(name, agent, now)

    def lost(self, link: Link) -> None:
        """Whoever came by this link has gone."""
        for name in [name for (came_by, _), name in self._names.items() if came_by is link]:
            self.leave(name)

    def ended(self, name: str, reason: Reason, now: float) -> None:
        """No such offer will come: whoever comes to wait for it is told so."""
        self._ended.put(name, reason, now)

    def overdue(self, now: float) -> list[str]:
        """The names for which somebody has waited too long."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            guest = self._seated.get(name)
            if guest is not None and guest.until <= now:
                found.append(name)
        return found
