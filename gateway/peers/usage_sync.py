"""Exchanges the usage of tenants and sessions between gateways. No I/O.

It covers fair shares, quotas, and the sessions whose contexts fill the engines' KV memory. The
arithmetic is in policies/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from gateway.admission.admission_controller import AdmissionController
from gateway.config import Tenant
from gateway.fleet.updates_for_peers import OutgoingUpdates
from gateway.peers import peer_messages
from policies.admission.adaptive_session_limit import SessionUpdate
from policies.admission.peer_quota_usage import apply_peer_usage, quota_usage

MAX_ROWS = 1000
"""Maximum number of rows in one message."""

T = TypeVar("T")


class UsageSync:
    """Converts this gateway's usage to messages for other gateways, and applies their messages.

    Messages contain keyed hashes of names (digests) instead of the names.

    digest   function that returns the digest of a tenant, pool or session, for outgoing messages
    digests  function that returns all digests of a name that incoming messages may contain: there
             are two while gateways change to a new secret
    """

    def __init__(
        self,
        gate: AdmissionController,
        updates: OutgoingUpdates,
        digest: Callable[[str], int],
        digests: Callable[[str], tuple[int, ...]],
    ) -> None:
        self._admission = gate
        self._updates = updates
        self._digest, self._digests = digest, digests
        self._tenants: dict[int, str] = {}

    def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Set the configured tenants, so that digests in messages can be mapped to their names."""
        self._tenants = {
            digest: tenant.name for tenant in tenants for digest in self._digests(tenant.name)
        }

    # Outgoing

    def usage_messages(
        self, now: float
    ) -> Iterator[
        peer_messages.TenantCharges | peer_messages.QuotaUse | peer_messages.ActiveSessions
    ]:
        """Yield messages with the usage of tenants and sessions since the last call."""
        digest, updates = self._digest, self._updates
        charges, updates.charges = updates.charges, {}
        for rows in batches(
            (digest(pool), digest(tenant), tokens) for (pool, tenant), tokens in charges.items()
        ):
            yield peer_messages.TenantCharges(rows)
        taken, updates.quota_use = updates.quota_use, {}
        quotas = self._admission.quotas.by_tenant
        for quota_rows in batches(
            (digest(tenant), quota_usage(quotas[tenant], requests, tokens, now))
            for tenant, (requests, tokens) in taken.items()
            if tenant in quotas and (requests or tokens)
        ):
            yield peer_messages.QuotaUse(quota_rows)
        for queue in self._admission.pool_queues():
            if queue.sessions is not None:
                yield from self._session_messages(queue.name, queue.sessions.take_updates(now))

    def all_sessions(self, now: float) -> Iterator[peer_messages.ActiveSessions]:
        """Yield messages with all gateways' active sessions, for a gateway that just started."""
        for queue in self._admission.pool_queues():
            if queue.sessions is not None:
                yield from self._session_messages(queue.name, queue.sessions.all_sessions(now))

    def discard(self) -> None:
        """Discard collected charges and quota use, because the bus is disconnected.

        Both are out of date after a reconnect, because quotas have been refilled by then. Session
        updates are kept and sent later.
        """
        self._updates.charges.clear()
        self._updates.quota_use.clear()

    def _session_messages(
        self, pool: str, members: Iterable[SessionUpdate]
    ) -> Iterator[peer_messages.ActiveSessions]:
        for part in batches(members):
            yield peer_messages.ActiveSessions(self._digest(pool), part)

    def requests_in_progress(self) -> list[tuple[int, int]]:
        """Return how many requests of each tenant run here, by the digest of the tenant's name.

        Tenants without requests, or without a limit on them, are left out.
        """
        quotas = self._admission.quotas.by_tenant
        return [
            (self._digest(tenant), quota.concurrency.own)
            for tenant, quota in quotas.items()
            if quota.concurrency is not None and quota.concurrency.own
        ]

    # Incoming

    def on_charges(self, message: peer_messages.TenantCharges) -> None:
        """Charge tenants for tokens that another gateway has computed for them.

        Without this, a tenant could get its fair share once from every gateway.
        """
        queues = {
            digest: queue
            for queue in self._admission.pool_queues()
            for digest in self._digests(queue.name)
        }
        for pool, tenant, tokens in message.tenants:
            queue, name = queues.get(pool), self._tenants.get(tenant)
            if queue is not None and name is not None:
                queue.add_peer_charge(name, tokens)

    def on_quota_use(self, message: peer_messages.QuotaUse, now: float) -> None:
        """Deduct the quota that tenants have used at another gateway, as its message reports."""
        for tenant, spent in message.tenants:
            name = self._tenants.get(tenant, "")
            quota = self._admission.quotas.by_tenant.get(name)
            if quota is not None:
                own = self._updates.quota_use.get(name, (0, 0))
                apply_peer_usage(quota, spent, quota_usage(quota, *own, now))

    def on_requests_in_progress(self, sender: bytes, rows: Sequence[tuple[int, int]]) -> None:
        """Set how many requests of each tenant are in progress at another gateway.

        Tenants that are not in `rows` have none there.
        """
        counts = {self._tenants.get(tenant, ""): requests for tenant, requests in rows}
        for name, quota in self._admission.quotas.by_tenant.items():
            if quota.concurrency is not None:
                quota.concurrency.set_peer(sender, counts.get(name, 0))

    def on_sessions(self, message: peer_messages.ActiveSessions, age_s: float, now: float) -> None:
        """Add sessions that another gateway has reported to the sessions of their pool.

        age_s  seconds since the message was sent, which count as the time since the last use
        """
        for queue in self._admission.pool_queues():
            if queue.sessions is not None and message.pool in self._digests(queue.name):
                queue.sessions.apply_peer_sessions(message.members, age_s, now)


def batches(rows: Iterable[T]) -> Iterator[list[T]]:
    """Split `rows` into lists of at most MAX_ROWS rows, which is the size of one message."""
    iterator = iter(rows)
    while part := list(islice(iterator, MAX_ROWS)):
        yield part
