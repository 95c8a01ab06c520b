"""What tenants and sessions use of the fleet: our part in words for the others, and theirs taken into account.

Fair shares, quotas, and the sessions whose contexts fill the engines. Sans-IO; not here: the arithmetic (policies/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from gateway.config import Tenant
from gateway.gate import Gate
from gateway.shared import words
from gateway.shared.news import News
from policies.sessions import Member

MOST_ROWS = 1000
"""Of one message."""

T = TypeVar("T")


class Use:
    """Tenants, pools and sessions are named by `digest`."""

    def __init__(self, gate: Gate, news: News, digest: Callable[[str], int]) -> None:
        self._gate = gate
        self._news = news
        self._digest = digest
        self._tenants: dict[int, str] = {}

    def know(self, tenants: Sequence[Tenant]) -> None:
        """From now on these are configured."""
        self._tenants = {self._digest(each.name): each.name for each in tenants}

    # Telling

    def tell(self, now: float) -> Iterator[words.Charged | words.Taken | words.Inside]:
        """What was used since this was last asked."""
        digest, news = self._digest, self._news
        charged, news.charged = news.charged, {}
        for rows in some((digest(pool), digest(tenant), tokens) for (pool, tenant), tokens in charged.items()):
            yield words.Charged(rows)
        taken, news.taken = news.taken, {}
        quotas = self._gate.quotas.by_tenant
        for taking in some(
            (digest(tenant), quotas[tenant].spent(requests, tokens, now))
            for tenant, (requests, tokens) in taken.items()
            if tenant in quotas and (requests or tokens)
        ):
            yield words.Taken(taking)
        for room in self._gate.rooms():
            if room.sessions is not None:
                yield from self._inside(room.name, room.sessions.untold(now))

    def everybody(self, now: float) -> Iterator[words.Inside]:
        """All sessions that are in, at whichever gateway: for one who knows of none."""
        for room in self._gate.rooms():
            if room.sessions is not None:
                yield from self._inside(room.name, room.sessions.members(now))

    def forget(self) -> None:
        """Nobody can hear. What tenants took will have filled up again when somebody can; sessions wait to be told."""
        self._news.charged.clear()
        self._news.taken.clear()

    def _inside(self, pool: str, members: Iterable[Member]) -> Iterator[words.Inside]:
        for part in some(members):
            yield words.Inside(self._digest(pool), part)

    # Hearing

    def charged(self, message: words.Charged) -> None:
        """Other gateways worked for these tenants."""
        rooms = {self._digest(room.name): room for room in self._gate.rooms()}
        for pool, tenant, tokens in message.tenants:
            room, name = rooms.get(pool), self._tenants.get(tenant)
            if room is not None and name is not None:
                room.charged_elsewhere(name, tokens)

    def taken(self, message: words.Taken, now: float) -> None:
        """These tenants took something of their quotas at another gateway."""
        for tenant, spent in message.tenants:
            name = self._tenants.get(tenant, "")
            quota = self._gate.quotas.by_tenant.get(name)
            if quota is not None:
                quota.elsewhere(spent, quota.spent(*self._news.taken.get(name, (0, 0)), now))

    def inside(self, message: words.Inside, age_s: float, now: float) -> None:
        """These sessions were served at another gateway."""
        for room in self._gate.rooms():
            if room.sessions is not None and self._digest(room.name) == message.pool:
                room.sessions.elsewhere(message.members, age_s, now)


def some(rows: Iterable[T]) -> Iterator[list[T]]:
    """MOST_ROWS at a time."""
    left = iter(rows)
    while part := list(islice(left, MOST_ROWS)):
        yield part
