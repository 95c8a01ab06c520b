"""Tests a planned snapshot by a dry run of its policies, replaces the current one, frees the old.

Everything that can fail happens before the first change. The replacement takes one iteration of the
event loop. What the old snapshot needs is freed once no request uses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from time import monotonic

from gateway.admission.pool_queue import PoolQueue
from gateway.admission.quota_charges import Quotas
from gateway.config import Config
from gateway.config.problems import Path
from gateway.fleet.health_checks import HealthChecker
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.metrics.catalogue import TENANT, Metrics
from gateway.reload.reachability import find_unreachable_pool
from gateway.reload.snapshot_gc import SnapshotGc
from gateway.reload.snapshot_plan import SnapshotPlan, build_plan
from gateway.routes_and_snapshot import Gateway, Snapshot
from policies import routing_algorithm
from policies.admission.concurrency_limit import ConcurrencyLimit
from policies.routing_types import Request, RoutingQuery

log = logging.getLogger("penstock")

TRIAL_REQUEST = Request("dry-run", "", "", 1000, 100)


class ConfigRejectedError(Exception):
    """Raised when a valid configuration cannot be applied because of the setting at `path`."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class Swap:
    """Replaces the current snapshot; only this class writes `Gateway.snapshot`.

    start_discovery  function that is called with each configuration that is applied
    """

    def __init__(self, gateway: Gateway, watcher: HealthChecker, metrics: Metrics) -> None:
        self._gateway = gateway
        self._watcher = watcher
        self.start_discovery: Callable[[Config], None] = lambda config: None
        self._metrics = metrics
        self._generations = SnapshotGc()
        self._left_in: dict[LiveEndpoint, int] = {}
        self._removed_in: dict[PoolQueue, int] = {}

    async def check_reachable(self, config: Config) -> None:
        """Raise ConfigRejectedError if the change makes all endpoints of a pool unreachable."""
        staying = [live for live in self._gateway.endpoints.all() if not live.is_leaving]
        known = {live.endpoint.url for live in staying}
        available = {live.endpoint.url for live in staying if live.load.is_available}
        pool = await find_unreachable_pool(config, known, available)
        if pool is not None:
            text = (
                "none of its endpoints accepts a connection; `penstock reload --force` applies it"
            )
            raise ConfigRejectedError(("pools", pool), text)
        await self._read_moved_lists(config, staying)

    async def _read_moved_lists(self, config: Config, staying: Sequence[LiveEndpoint]) -> None:
        # Read the model lists of engines that move to another pool, for check_listed().
        known = {(live.endpoint.pool, live.endpoint.url) for live in staying}
        new = {(name, spec.url) for name, pool in config.pools.items() for spec in pool.endpoints}
        urls = {url for _, url in new - known}
        moved = [live for live in staying if live.endpoint.url in urls]
        await asyncio.gather(*(self._watcher.read_models(live) for live in moved))

    def check_listed(self, plan: SnapshotPlan) -> None:
        """Raise ConfigRejectedError if a model that is served now would be listed by no endpoint.

        A mistyped `served_model` would otherwise lead to a 404 for every request.
        """
        unlisted = plan.snapshot.unlisted
        for index, model in enumerate(plan.snapshot.config.models):
            if model.name in unlisted and model.name in self._gateway.snapshot.routes:
                text = (
                    f"{unlisted[model.name]} It is served now; `penstock reload --force` applies "
                    "the change"
                )
                raise ConfigRejectedError(("models", index), text)

    def plan(self, config: Config) -> SnapshotPlan:
        """Build the plan of a configuration and test its policies, without changing live objects.

        Raises ConfigRejectedError if the configuration cannot be applied.
        """
        gateway = self._gateway
        try:
            plan = build_plan(config, gateway.endpoints, gateway.gate, gateway.snapshot)
        except ValueError as error:  # includes PolicyConfigError
            raise ConfigRejectedError(("pools",), str(error)) from error
        dry_run(plan, gateway.snapshot)
        return plan

    def is_valid(self, plan: SnapshotPlan) -> bool:
        """Return whether the plan can be applied: no other plan was applied since it was built."""
        return plan.snapshot.generation == self._gateway.snapshot.generation + 1

    def apply(self, plan: SnapshotPlan) -> int:
        """Apply a plan; return the number of running requests at removed endpoints or pools.

        These requests finish at their endpoints. The method has no await, and nothing in it can
        fail. Therefore a request sees either the whole change or none of it.
        """
        gateway, config = self._gateway, plan.snapshot.config
        generation = gateway.snapshot.generation
        changes = gateway.endpoints.apply(plan.adoption)
        affected = sum(
            live.load.in_flight - live.load.peer_load.in_flight for live in changes.removed
        )
        removed = [queue for queue in gateway.gate.pool_queues() if queue.name not in config.pools]
        affected += sum(queue.queue_length for queue in removed if queue not in self._removed_in)
        attach_metrics(gateway, plan, self._metrics)
        self._generations.track(gateway.snapshot)
        log_unlisted(gateway.snapshot, plan.snapshot)
        gateway.snapshot = plan.snapshot
        self.start_discovery(config)
        self._watcher.reconfigure(config)
        self._retire(generation, changes.removed, changes.unused_names, removed)
        return affected

    def rebuild(self) -> None:
        """Apply newly discovered endpoints or models in the same way as a reload.

        This happens in the next iteration of the event loop, because a plan for a thousand
        endpoints takes milliseconds to build and to apply.
        """
        asyncio.get_running_loop().call_soon(self._apply_rebuilt, self._plan_again())

    def _apply_rebuilt(self, plan: SnapshotPlan) -> None:
        if self.is_valid(plan):
            self.apply(plan)
        else:
            self.rebuild()

    def rebuild_after_model_news(self) -> None:
        """Rebuild the routes after an engine's list of models or APIs has changed.

        With configured models, nothing is replaced if no model gained or lost an endpoint or an
        API.
        """
        before, plan = self._gateway.snapshot, self._plan_again()
        after = plan.snapshot
        is_same = (after.slots_by_model, after.unlisted) == (before.slots_by_model, before.unlisted)
        is_same = is_same and after.translated == before.translated
        if not before.config.models or not is_same:
            self.apply(plan)

    def _plan_again(self) -> SnapshotPlan:
        gateway = self._gateway
        before = gateway.snapshot
        return build_plan(before.config, gateway.endpoints, gateway.gate, before)

    def _retire(
        self,
        generation: int,
        endpoints: Sequence[LiveEndpoint],
        names: Sequence[str],
        queues: Sequence[PoolQueue],
    ) -> None:
        later = partial(self._generations.when_gone, generation)
        for live in endpoints:
            self._left_in[live] = generation
            later(partial(self._release, live, generation))
        for name in names:
            later(partial(self._drop_series, name))
        for queue in queues:
            if queue not in self._removed_in:
                self._removed_in[queue] = generation
                later(partial(self._remove, queue, generation))
        for queue in [queue for queue in self._removed_in if queue not in queues]:
            del self._removed_in[queue]  # the pool of this queue has been added again

    def _release(self, live: LiveEndpoint, generation: int) -> None:
        # Release the endpoint, unless it was added again, or added and removed by a later
        # generation.
        if live.is_leaving and self._left_in.get(live) == generation:
            del self._left_in[live]
            self._gateway.endpoints.release(live)
            self._gateway.gate.refresh()

    def _drop_series(self, name: str) -> None:
        if self._gateway.endpoints.drop_series(name):
            self._gateway.accounts.forget_endpoint(name)
            self._gateway.handoffs.forget_endpoint(name)

    def _remove(self, queue: PoolQueue, generation: int) -> None:
        if self._removed_in.get(queue) == generation:
            del self._removed_in[queue]
            self._gateway.gate.remove_queue(queue)
            metrics = self._metrics
            metrics.waiting.remove_children("pool", queue.name)
            metrics.queued_tokens.remove_children("pool", queue.name)
            metrics.admission_price.remove_children("pool", queue.name)
            metrics.admission_phi.remove_children("pool", queue.name)
            metrics.queue_seconds.remove_children("pool", queue.name)

    def sweep(self) -> None:
        """Free endpoints, names and queues that no request uses any more. Call this regularly."""
        self._generations.sweep()

    @property
    def retiring(self) -> int:
        """Return how many removed endpoints, names and queues have not been freed yet.

        Requests that began before a change of the configuration may still use them.
        """
        return self._generations.pending_actions


def attach_metrics(gateway: Gateway, plan: SnapshotPlan, metrics: Metrics) -> None:
    """Configure wait queues, limits and trial policies by the plan, and attach their metrics."""
    config = plan.snapshot.config
    gateway.gate.configure(config)
    gateway.accounts.configure(config.observability)
    leaving = [live for live in gateway.endpoints.all() if live.is_leaving]
    for pool, admission_plan in plan.admissions.items():
        queue = admission_plan.queue
        gateway.gate.add_queue(queue)
        gateway.endpoints.set_beliefs_enabled(pool, admission_plan.uses_predictions)
        queue.set_admission(admission_plan.admission, admission_plan.shares)
        finishing = tuple(live.load for live in leaving if live.endpoint.pool == pool)
        queue.configure(config.pools[pool].waiting_room, admission_plan.serving, finishing)
        _attach_gauges(queue, metrics)
    _attach_tenants(gateway.gate.quotas, metrics)
    _attach_trials(gateway.snapshot, plan.snapshot, metrics)
    models = {route.name for route in plan.snapshot.routes.values()}
    splitting = gateway.handoffs.splitting
    for model in splitting.keys() - models:
        del splitting[model]


def _attach_tenants(quotas: Quotas, metrics: Metrics) -> None:
    # Show the requests in progress of each tenant whose number is limited.
    family = metrics.tenant_inflight
    family.clear()
    limited = {tenant: quota.concurrency for tenant, quota in quotas.by_tenant.items()}
    shown = [(tenant, limit) for tenant, limit in limited.items() if limit is not None]
    for tenant, limit in shown[: TENANT.max_values]:
        family.labels(tenant).set_function(partial(_own_requests, limit))


def _own_requests(limit: ConcurrencyLimit) -> float:
    return float(limit.own)


def _attach_gauges(queue: PoolQueue, metrics: Metrics) -> None:
    pool = queue.name
    metrics.admission_price.labels(pool).set_function(lambda: queue.price)
    metrics.admission_phi.labels(pool).set_function(lambda: queue.session_memory_share)
    metrics.waiting.labels(pool).set_function(lambda: float(queue.queue_length))
    metrics.queued_tokens.labels(pool).set_function(lambda: float(queue.queued_tokens))


def _attach_trials(before: Snapshot, snapshot: Snapshot, metrics: Metrics) -> None:
    # Attach metrics to new shadows and canaries; remove the series of ended ones.
    for pool, trials in before.trials.items():
        now = snapshot.trials.get(pool)
        if trials.shadows is not None and (now is None or now.shadows is not trials.shadows):
            trials.shadows.remove_series(metrics)
        if trials.arms is not None and (now is None or now.arms is not trials.arms):
            trials.arms.remove_series(metrics)
    for trials in snapshot.trials.values():
        if trials.shadows is not None:
            trials.shadows.count_in(metrics)
        if trials.arms is not None:
            trials.arms.count_in(metrics)


def log_unlisted(before: Snapshot, after: Snapshot) -> None:
    """Log which model names no endpoint lists any more, and which are listed again."""
    for name, message in after.unlisted.items():
        if before.unlisted.get(name) != message:
            log.warning("requests for model '%s' get status 404 from now on: %s", name, message)
    for name in before.unlisted.keys() & after.routes.keys():
        log.info("model '%s' is listed by an endpoint again, so requests for it are served", name)


def dry_run(plan: SnapshotPlan, before: Snapshot) -> None:
    """Test the new policies of a plan: let each of them pick an endpoint once.

    Raises ConfigRejectedError if a policy fails.
    """
    known = {id(policy) for policy in before.policies.values()}
    known |= {id(policy) for trials in before.trials.values() for policy in trials.policies}
    wanted = [(pool, policy) for pool, policy in plan.snapshot.policies.items()]
    wanted += [
        (pool, policy)
        for pool, trials in plan.snapshot.trials.items()
        for policy in trials.policies
    ]
    for pool, policy in wanted:
        if id(policy) in known:
            continue
        query = RoutingQuery(TRIAL_REQUEST, monotonic(), Random(0))
        try:
            routing_algorithm.pick(policy, query, plan.adoption.pools[pool])
        except Exception as error:  # a policy may be third-party code
            message = f"{policy.name} failed at a trial pick: {error!r}"
            raise ConfigRejectedError(("pools", pool, "policy"), message) from error
