"""Requests of other agents for KV that this agent has not offered yet.

Such a request is an invitation: the other agent invites this one to write KV into its blocks. This
module also remembers the names of offers that have ended or are not wanted. source.py decides who
may fetch an offer, and answers the invitations. The caller passes the time `now`, which never
decreases. No I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from kvtransfer.protocol.agent_messages import Invite
from kvtransfer.protocol.outcomes import EndReason
from kvtransfer.transport_interface import Link
from kvtransfer.util.agent_options import AgentOptions

T = TypeVar("T")
_MOST = 4096


class PendingInvite(msgspec.Struct, frozen=True):
    """Another agent's request for KV that is not offered yet; it waits until `deadline`."""

    link: Link
    invite: Invite
    rank: int
    deadline: float


class PendingInvites:
    """The requests (invitations) of other agents that wait until this agent offers the KV.

    There is one per name of an offer and fetching rank, and at most
    AgentOptions.max_waiting_invites in total.

    deadline_count  number of deadlines that were set so far
    """

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._waiting: dict[str, dict[int, PendingInvite]] = {}
        self._names: dict[tuple[Link, int], tuple[str, int]] = {}
        self._deadlines: list[tuple[float, str, int]] = []
        self.deadline_count = 0
        self._ended: TtlMap[EndReason] = TtlMap(options.name_memory_s)
        self._unwanted: TtlMap[str] = TtlMap(options.name_memory_s)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the offers for which other agents wait."""
        return iter(self._waiting)

    def next_deadline(self) -> float | None:
        """Return when to call `take_expired` next; None if no invitation is waiting.

        The result may be earlier than the earliest deadline, never later.
        """
        while self._deadlines and self._find(*self._deadlines[0][1:]) is None:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _find(self, name: str, rank: int) -> PendingInvite | None:
        return self._waiting.get(name, {}).get(rank)

    def add(self, link: Link, invite: Invite, rank: int, now: float) -> EndReason | None:
        """Store another agent's request until its KV is offered. Return None, or why it is refused.

        link    connection to that agent
        invite  the request (invitation to write KV)
        rank    the only rank that the agent serves; -1: all ranks
        now     time in seconds
        """
        ended = self._ended.get(invite.name, now)
        if ended is not None:
            return ended
        ranks = self._waiting.get(invite.name, {})
        # Either one agent waits for all ranks, or several wait for one each.
        if rank in ranks or (ranks and -1 in (rank, *ranks)):
            return EndReason.NAME_TAKEN
        if len(self._names) >= self._options.max_waiting_invites:
            return EndReason.TOO_MANY_WAITING
        self._unwanted.pop(invite.name, now)
        until = now + min(invite.wait_s, self._options.invite_wait_s)
        self._waiting.setdefault(invite.name, {})[rank] = PendingInvite(link, invite, rank, until)
        self._names[link, invite.transfer] = invite.name, rank
        heapq.heappush(self._deadlines, (until, invite.name, rank))
        self.deadline_count += 1
        return None

    def take_for_offer(self, name: str, now: float) -> tuple[list[PendingInvite], str | None]:
        """Remove and return the invitations that wait for the offer `name`, which is made now.

        The second result is the name of an agent that recently stopped waiting for this offer, or
        None. If an agent is named, the offer is useless.
        """
        self._ended.pop(name, now)
        return self.remove(name), self._unwanted.pop(name, now)

    def remove(self, name: str) -> list[PendingInvite]:
        removed = list(self._waiting.pop(name, {}).values())
        for pending in removed:
            del self._names[pending.link, pending.invite.transfer]
        return removed

    def _remove_one(self, name: str, rank: int) -> None:
        ranks = self._waiting[name]
        pending = ranks.pop(rank)
        del self._names[pending.link, pending.invite.transfer]
        if not ranks:
            del self._waiting[name]

    def withdraw(self, link: Link, transfer: int, agent: str | None, now: float) -> bool:
        """Remove an agent's invitation, because the agent does not want the KV any more.

        link      connection to that agent
        transfer  that agent's number of the transfer
        agent     its name, if it will also ignore a later offer of this KV; otherwise None
        now       time in seconds

        Returns False if no such invitation is waiting.
        """
        waiting = self._names.get((link, transfer))
        if waiting is None:
            return False
        name, rank = waiting
        self._remove_one(name, rank)
        if agent is not None:
            self.mark_unwanted(name, agent, now)
        return True

    def mark_unwanted(self, name: str, agent: str, now: float) -> None:
        """Remember that `agent` does not want the KV `name` any more, which may be offered later.

        Does nothing if a request waits for the name. This only saves memory and is not reliable:
        one agent is recorded per name, for a limited number of names.
        """
        if name not in self._waiting:
            self._unwanted.put(name, agent, now)

    def remove_link(self, link: Link) -> None:
        for waiting in [
            waiting for (invited_over, _), waiting in self._names.items() if invited_over is link
        ]:
            self._remove_one(*waiting)

    def mark_ended(self, name: str, reason: EndReason, now: float) -> None:
        """Refuse all later invitations for the offer `name`, because it has ended.

        reason  why it has ended

        The name is remembered for AgentOptions.name_memory_s seconds.
        """
        self._ended.put(name, reason, now)

    def take_expired(self, now: float) -> list[PendingInvite]:
        """Remove and return the waiting invitations whose deadline has passed at `now`."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name, rank = heapq.heappop(self._deadlines)
            pending = self._find(name, rank)
            if pending is not None and pending.deadline <= now:
                self._remove_one(name, rank)
                expired.append(pending)
        return expired


class TtlMap(Generic[T]):
    """A map from names to values, each of which is forgotten `ttl_s` seconds after it was set.

    It holds at most `max_entries` values; above that, the oldest is dropped. Not thread-safe.
    """

    def __init__(self, ttl_s: float, max_entries: int = _MOST) -> None:
        self._keep_s, self._most = ttl_s, max_entries
        self._entries: dict[str, tuple[float, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, name: str, value: T, now: float) -> None:
        """Set the value of `name` in the map. It expires `ttl_s` seconds from now."""
        self._entries.pop(name, None)
        self._entries[name] = (now + self._keep_s, value)
        while len(self._entries) > self._most or next(iter(self._entries.values()))[0] <= now:
            del self._entries[next(iter(self._entries))]
            if not self._entries:
                break

    def get(self, name: str, now: float) -> T | None:
        """Return the value of `name`, or None if there is none or it has expired."""
        expires, value = self._entries.get(name, (now, None))
        return value if now < expires else None

    def pop(self, name: str, now: float) -> T | None:
        """Remove `name` and return its value, or None if there is none or it has expired."""
        value = self.get(name, now)
        self._entries.pop(name, None)
        return value
