"""The gateway's admission control: wait queues by pool, quotas, body memory and retries.

Each part has its own module: pool_queue.py, quota_charges.py, body_memory_budget.py and
retry_turns.py.
"""

from __future__ import annotations

from gateway.admission.body_memory_budget import BodyBudget
from gateway.admission.pool_queue import PoolQueue
from gateway.admission.quota_charges import Quotas
from gateway.admission.retry_turns import RetryTurns
from gateway.config import Config
from gateway.fleet.updates_for_peers import OutgoingUpdates
from policies.health.retry_budget import RetryLimits


class AdmissionController:
    """Holds the parts that decide whether a request may run, wait, or be refused.

    There is one object per gateway, which a reload of the configuration keeps.

    bodies   the memory budget for request bodies
    quotas   the quotas of tenants
    retries  the retries that the gateway permits at the same time (the retry budget)
    """

    __slots__ = ("_queues", "_updates", "bodies", "quotas", "retries")

    def __init__(self, config: Config) -> None:
        self._queues: dict[str, PoolQueue] = {}
        self._updates: OutgoingUpdates | None = None
        self.bodies = BodyBudget(config.limits.body_budget)
        self.quotas = Quotas()
        self.retries = RetryTurns(lambda: self.active_requests)
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Apply the limits of a new configuration.

        Running requests keep the capacity that they hold.
        """
        self.quotas.configure(config.tenants)
        self.bodies.limit_bytes = config.limits.body_budget
        self.retries.configure(RetryLimits(config.retries.budget, config.retries.floor))

    def pool_queue(self, pool: str) -> PoolQueue:
        """Return the wait queue of a pool.

        For a new pool, this is a new queue, which the caller must register with add_queue().
        """
        return self._queues.get(pool) or PoolQueue(pool)

    def add_queue(self, queue: PoolQueue) -> None:
        """Register the wait queue of a pool, once the pool's configuration is in use."""
        queue.publish_to_peers(self._updates)
        self._queues[queue.name] = queue

    def publish_to_peers(self, updates: OutgoingUpdates) -> None:
        """From now on, record what tenants use in `updates`, which is sent to other gateways.

        Tenants' limits then apply to all gateways together. What is recorded: used quotas, tokens
        computed for tenants, and active sessions.
        """
        self._updates = self.quotas.updates = updates
        for queue in self._queues.values():
            queue.publish_to_peers(updates)

    def remove_queue(self, queue: PoolQueue) -> None:
        """Remove the wait queue of a pool that is no longer configured and has no requests left."""
        if self._queues.get(queue.name) is queue:
            del self._queues[queue.name]

    def pool_queues(self) -> list[PoolQueue]:
        return list(self._queues.values())

    def tick(self, now: float) -> None:
        """Run the periodic work of the rules that admit or refuse requests, for every pool.

        Call it about every 100 ms.
        """
        for queue in self._queues.values():
            queue.tick(now)

    def refresh(self) -> None:
        """Recompute how many requests pools may run, after an endpoint's availability changed."""
        for queue in self._queues.values():
            queue.refresh()

    @property
    def active_requests(self) -> int:
        return sum(queue.in_flight for queue in self._queues.values())
