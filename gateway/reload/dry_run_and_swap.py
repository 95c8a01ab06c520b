"""Tests a planned snapshot by a dry run of its policies, replaces the current one, frees the old.

Everything that can fail happens before the first change. The replacement takes one turn of the
event loop. Planning before it, and the work after it that no request depends on, are done in parts,
because for a thousand endpoints they take many milliseconds. What the old snapshot needs is freed
once no request uses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from time import monotonic

from gateway.admission.pool_queue import PoolQueue
from gateway.admission.quota_charges import Quotas
from gateway.config import Config
from gateway.config.problems import Path
from gateway.fleet.endpoint_load_and_health import MeteredBefore, set_beliefs_steps
from gateway.fleet.health_checks import HealthChecker
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.metrics.catalogue import TENANT, Metrics
from gateway.reload.reachability import find_unreachable_pool
from gateway.reload.snapshot_gc import SnapshotGc
from gateway.reload.snapshot_plan import SnapshotPlan, plan_steps
from gateway.routes_and_snapshot import Gateway, Snapshot
from gateway.util.work_in_turns import Steps, WorkMeter, run_in_turns, slices
from policies import routing_algorithm
from policies.admission.concurrency_limit import ConcurrencyLimit
from policies.routing_types import Request, RoutingQuery

log = logging.getLogger("penstock")

RELEASE_ITEMS = 16
"""Items of a WorkMeter as which the release of an endpoint counts."""

TRIAL_REQUEST = Request("dry-run", "", "", 1000, 100)


class ConfigRejectedError(Exception):
    """Raised when a valid configuration cannot be applied because of the setting at `path`."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class Swap:
    """Replaces the running configuration snapshot by a planned one. No other class writes it.

    start_discovery  function that is called with each configuration that is applied
    """

    def __init__(self, gateway: Gateway, watcher: HealthChecker, metrics: Metrics) -> None:
        self._gateway = gateway
        self._watcher = watcher
        self.start_discovery: Callable[[Config], None] = lambda config: None
        self._metrics = metrics
        self._generations = SnapshotGc()
        self._change = asyncio.Lock()
        self._later: asyncio.Task[None] | None = None
        self._news: asyncio.Task[None] | None = None
        self._unused_names = set[str]()
        self._freeing = 0
        self._left_in: dict[LiveEndpoint, int] = {}
        self._removed_in: dict[PoolQueue, int] = {}

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Lock out other changes during an `async with` block, which plans and applies changes.

        Nothing that a plan uses is freed in the block, so a plan stays valid until it or another
        one is applied.
        """
        async with self._change:
            if self._later is not None:
                await asyncio.wait([self._later])
            yield

    async def check_reachable(self, config: Config) -> None:
        """Raise ConfigRejectedError if the change makes all endpoints of a pool unreachable."""
        staying = [live for live in self._gateway.endpoints.all() if not live.is_leaving]
        known = {live.endpoint.url for live in staying}
        available = {live.endpoint.url for live in staying if live.load.is_available}
        await asyncio.sleep(0)
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

    async def plan(self, config: Config) -> SnapshotPlan:
        """Build the plan of a configuration and test its policies, without changing live objects.

        Call it within exclusive(). Raises ConfigRejectedError if the configuration cannot be
        applied.
        """
        gateway = self._gateway
        steps = plan_steps(config, gateway.endpoints, gateway.gate, gateway.snapshot)
        try:
            plan = await run_in_turns(steps)
        except ValueError as error:  # includes PolicyConfigError
            raise ConfigRejectedError(("pools",), str(error)) from error
        await run_in_turns(dry_run_steps(plan, gateway.snapshot))
        return plan

    async def prepare(self, plan: SnapshotPlan) -> None:
        """Do the part of a change that does not affect requests yet. Call this before apply()."""
        for pool, admission_plan in plan.admissions.items():
            if admission_plan.uses_predictions:
                steps = set_beliefs_steps(plan.adoption.pools[pool], is_enabled=True)
                await run_in_turns(steps)
        await asyncio.sleep(0)  # give the swap a separate turn of the event loop

    def apply(self, plan: SnapshotPlan) -> int:
        """Apply a plan; return the number of running requests at removed endpoints or pools.

        These requests finish at their endpoints. The method has no await, and nothing in it can
        fail. Therefore a request sees either the whole change or none of it. A task does the rest
        of the work, which requests do not depend on.
        """
        gateway, config = self._gateway, plan.snapshot.config
        generation = gateway.snapshot.generation
        metered = gateway.endpoints.metered_settings(plan.adoption)
        changes = gateway.endpoints.switch(plan.adoption)
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
        self._retire(generation, changes.removed, changes.unused_names, removed)
        self._do_later(self._finish_steps(plan, metered))
        return affected

    def _do_later(self, steps: Steps[None]) -> None:
        # Do the rest of a change in parts. The next change waits for it.
        task = asyncio.get_running_loop().create_task(_log_errors(steps), name="finish a change")
        self._later = task
        task.add_done_callback(self._on_later_ended)

    def _on_later_ended(self, task: asyncio.Task[None]) -> None:
        if self._later is task:
            self._later = None

    def _finish_steps(self, plan: SnapshotPlan, metered: MeteredBefore) -> Steps[None]:
        endpoints = self._gateway.endpoints
        yield
        yield from endpoints.meter_steps(metered)
        yield from self._watcher.reconfigure_steps(plan.snapshot.config)
        for pool, admission_plan in plan.admissions.items():
            if not admission_plan.uses_predictions:
                yield from set_beliefs_steps(plan.adoption.pools[pool], is_enabled=False)

    async def rebuild(self, change: Callable[[], None] = lambda: None) -> None:
        """Apply newly discovered endpoints or models in the same way as a reload.

        change  function that changes the discovered endpoints; it is called when no other change is
                in progress

        Raises ValueError if a policy rejects them.
        """
        async with self.exclusive():
            change()
            plan = await self._plan_again()
            await self.prepare(plan)
            self.apply(plan)

    def rebuild_after_model_news(self) -> asyncio.Task[None]:
        """Start a task that rebuilds the routes after an engine's models or APIs have changed.

        If the configuration lists models, the routes are replaced only if a model gained or lost
        an endpoint or an API.
        """
        rebuild = self._rebuild_after_model_news()
        self._news = asyncio.get_running_loop().create_task(rebuild, name="rebuild the routes")
        return self._news

    async def _rebuild_after_model_news(self) -> None:
        try:
            async with self.exclusive():
                before, plan = self._gateway.snapshot, await self._plan_again()
                after = plan.snapshot
                is_same = (
                    after.slots_by_model == before.slots_by_model
                    and after.unlisted == before.unlisted
                    and after.translated == before.translated
                )
                if not before.config.models or not is_same:
                    await self.prepare(plan)
                    self.apply(plan)
        except Exception:
            log.exception("the routes could not be rebuilt after a change of an engine's models")

    async def _plan_again(self) -> SnapshotPlan:
        gateway = self._gateway
        before = gateway.snapshot
        steps = plan_steps(before.config, gateway.endpoints, gateway.gate, before)
        return await run_in_turns(steps)

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
            later(partial(self._unused_names.add, name))
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
        """Free endpoints, names and queues that no request uses any more. Call this regularly.

        A task frees them, in parts, unless a change of the configuration is in progress.
        """
        if self._change.locked() or self._later is not None:
            return
        due = self._generations.take_due()
        if due:
            self._freeing = len(due)
            self._do_later(self._free_steps(due))

    def _free_steps(self, actions: Sequence[Callable[[], None]]) -> Steps[None]:
        try:
            yield from self._do_free(actions)
        finally:
            self._freeing = 0

    def _do_free(self, actions: Sequence[Callable[[], None]]) -> Steps[None]:
        meter = WorkMeter()
        for action in actions:
            action()
            if meter.is_part_over(RELEASE_ITEMS):
                yield
        self._gateway.gate.refresh()
        names, self._unused_names = self._unused_names, set()
        unused = yield from self._gateway.endpoints.drop_series_steps(names)
        self._gateway.accounts.forget_endpoints(unused)
        for name in unused:
            self._gateway.handoffs.forget_endpoint(name)
            if meter.is_part_over():
                yield

    async def stop(self) -> None:
        """Cancel the work of changes that are in progress."""
        tasks = [task for task in (self._later, self._news) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def retiring(self) -> int:
        """Return how many removed endpoints, names and queues have not been freed yet.

        Requests that began before a change of the configuration may still use them.
        """
        return self._generations.pending_actions + self._freeing


async def _log_errors(steps: Steps[None]) -> None:
    try:
        await run_in_turns(steps)
    except Exception:
        log.exception("a change of the configuration was applied, but not finished")


def attach_metrics(gateway: Gateway, plan: SnapshotPlan, metrics: Metrics) -> None:
    """Apply a plan to the wait queues, limits and trial policies, and attach their metrics."""
    config = plan.snapshot.config
    gateway.gate.configure(config)
    gateway.accounts.configure(config.observability)
    leaving = [live for live in gateway.endpoints.all() if live.is_leaving]
    for pool, admission_plan in plan.admissions.items():
        queue = admission_plan.queue
        gateway.gate.add_queue(queue)
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


def dry_run_steps(plan: SnapshotPlan, before: Snapshot) -> Steps[None]:
    """Test the new policies of a plan: let each of them pick among all of its endpoints, in parts.

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
        for candidates in slices(plan.adoption.pools[pool]):
            query = RoutingQuery(TRIAL_REQUEST, monotonic(), Random(0))
            try:
                routing_algorithm.pick(policy, query, candidates)
            except Exception as error:  # a policy may be third-party code
                message = f"{policy.name} failed at a trial pick: {error!r}"
                raise ConfigRejectedError(("pools", pool, "policy"), message) from error
            yield
