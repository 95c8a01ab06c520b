"""Sync of tenants' and sessions' use: sends this gateway's part to the others and applies theirs.

Covers fair shares, quotas, and the sessions whose contexts fill the engines. Sans-IO; the
arithmetic is in policies/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from gateway.admission.controller import Gate
from gateway.config import Tenant
from gateway.fleet.outgoing_updates import News
from gateway.peers import messages
from policies.admission.sessions import Member

MOST_ROWS = 1000
"""Rows of one message at most."""

T = TypeVar("T")


class Use:
    """Converts use to messages and back. Tenants, pools and sessions are named by `digest`."""

    def __init__(self, gate: Gate, updates: News, digest: Callable[[str], int]) -> None:
        self._admission = gate
        self._updates = updates
        self._digest = digest
        self._tenants: dict[int, str] = {}

    def know(self, tenants: Sequence[Tenant]) -> None:
        """Set the configured tenants."""
        self._tenants = {self._digest(tenant.name): tenant.name for tenant in tenants}

    # Outgoing

    def tell(self, now: float) -> Iterator[messages.Charged | messages.Taken | messages.Inside]:
        """Yield the use since the last call."""
        digest, updates = self._digest, self._updates
        charges, updates.charged = updates.charged, {}
        for rows in some(
            (digest(pool), digest(tenant), tokens) for (pool, tenant), tokens in charges.items()
        ):
            yield messages.Charged(rows)
        taken, updates.taken = updates.taken, {}
        quotas = self._admission.quotas.by_tenant
        for quota_rows in some(
            (digest(tenant), quotas[tenant].spent(requests, tokens, now))
            for tenant, (requests, tokens) in taken.items()
            if tenant in quotas and (requests or tokens)
        ):
            yield messages.Taken(quota_rows)
        for queue in self._admission.rooms():
            if queue.sessions is not None:
                yield from self._session_messages(queue.name, queue.sessions.untold(now))

    def everybody(self, now: float) -> Iterator[messages.Inside]:
        """Yield all active sessions of all gateways, for a gateway that has just started."""
        for queue in self._admission.rooms():
            if queue.sessions is not None:
                yield from self._session_messages(queue.name, queue.sessions.members(now))

    def forget(self) -> None:
        """Discard charges and quota use while the bus is disconnected; sessions are sent later.

        By the time of a reconnect the quotas have filled up again.
        """
        self._updates.charged.clear()
        self._updates.taken.clear()

    def _session_messages(self, pool: str, members: Iterable[Member]) -> Iterator[messages.Inside]:
        for part in some(members):
            yield messages.Inside(self._digest(pool), part)

    # Incoming

    def charged(self, message: messages.Charged) -> None:
        """Charge tenants for work that other gateways have done for them."""
        queues = {self._digest(queue.name): queue for queue in self._admission.rooms()}
        for pool, tenant, tokens in message.tenants:
            queue, name = queues.get(pool), self._tenants.get(tenant)
            if queue is not None and name is not None:
                queue.charged_elsewhere(name, tokens)

    def taken(self, message: messages.Taken, now: float) -> None:
        """Deduct the quota that tenants have used at another gateway."""
        for tenant, spent in message.tenants:
            name = self._tenants.get(tenant, "")
            quota = self._admission.quotas.by_tenant.get(name)
            if quota is not None:
                own = self._updates.taken.get(name, (0, 0))
                quota.elsewhere(spent, quota.spent(*own, now))

    def inside(self, message: messages.Inside, age_s: float, now: float) -> None:
        """Count sessions that were served at another gateway."""
        for queue in self._admission.rooms():
            if queue.sessions is not None and self._digest(queue.name) == message.pool:
                queue.sessions.elsewhere(message.members, age_s, now)


def some(rows: Iterable[T]) -> Iterator[list[T]]:
    """Yield the rows in lists of at most MOST_ROWS."""
    iterator = iter(rows)
    while part := list(islice(iterator, MOST_ROWS)):
        yield part
