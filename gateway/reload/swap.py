"""Builds a configuration, dry-runs it, and puts it in force in one turn of the event loop.

Everything that can fail happens before the first change. What the old snapshot may still need is
freed once no request holds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from time import monotonic

from gateway.admission.controller import Room
from gateway.config import Config
from gateway.config.problems import Path
from gateway.fleet.endpoint_registry import LiveEndpoint
from gateway.fleet.health_checks import Watcher
from gateway.metrics.catalogue import Metrics
from gateway.reload.reachability import unreachable_pool
from gateway.reload.snapshot import Plan, build
from gateway.reload.snapshot_gc import Generations
from gateway.route import Gateway, Snapshot
from policies import run
from policies.model import Ask, Request

log = logging.getLogger("penstock")

TRIAL = Request("dry-run", "", "", 1000, 100)


class CannotServe(Exception):
    """A valid configuration that cannot be put in force because of the setting at `path`."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class Swap:
    """Replaces the snapshot in force. The only writer of `gateway.reload.snapshot`.

    start_discovery  called with each configuration that is put in force
    """

    def __init__(self, gateway: Gateway, watcher: Watcher, metrics: Metrics) -> None:
        self._gateway = gateway
        self._watcher = watcher
        self.discover: Callable[[Config], None] = lambda config: None
        self._metrics = metrics
        self._generations = Generations()
        self._left_in: dict[LiveEndpoint, int] = {}
        self._removed_in: dict[Room, int] = {}

    async def check_reachable(self, config: Config) -> None:
        """Raise CannotServe if the change makes all endpoints of a pool unreachable."""
        staying = [live for live in self._gateway.endpoints.all() if not live.leaving]
        known = {live.endpoint.url for live in staying}
        available = {live.endpoint.url for live in staying if live.load.available}
        pool = await unreachable_pool(config, known, available)
        if pool is not None:
            text = (
                "none of its endpoints accepts a connection; `penstock reload --force` applies it"
            )
            raise CannotServe(("pools", pool), text)

    def plan(self, config: Config) -> Plan:
        """Build and dry-run `config`. Changes nothing. Raises CannotServe."""
        gateway = self._gateway
        try:
            plan = build(
                config, gateway.endpoints, gateway.gate, discovered(gateway), gateway.snapshot
            )
        except ValueError as error:  # includes PolicyConfigError
            raise CannotServe(("pools",), str(error)) from error
        dry_run(plan, gateway.snapshot)
        return plan

    def carry_out(self, plan: Plan) -> int:
        """Put a plan in force; return the number of requests at removed endpoints or pools.

        There is no await and nothing that can fail, so requests see all of the change or nothing.
        The affected requests finish where they are.
        """
        gateway, config = self._gateway, plan.snapshot.config
        generation = gateway.snapshot.generation
        changes = gateway.endpoints.adopt(plan.adoption)
        affected = sum(live.load.in_flight - live.load.others.in_flight for live in changes.left)
        removed = [queue for queue in gateway.gate.rooms() if queue.name not in config.pools]
        affected += sum(queue.waiting for queue in removed if queue not in self._removed_in)
        furnish(gateway, plan, self._metrics)
        self._generations.replaced(gateway.snapshot)
        log_unlisted(gateway.snapshot, plan.snapshot)
        gateway.snapshot = plan.snapshot
        self.discover(config)
        self._watcher.follow(config)
        self._retire(generation, changes.left, changes.names, removed)
        return affected

    def _retire(
        self,
        generation: int,
        endpoints: Sequence[LiveEndpoint],
        names: Sequence[str],
        queues: Sequence[Room],
    ) -> None:
        """Free what was removed once no request holds this generation or an older one."""
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
            del self._removed_in[queue]  # its pool has been added again

    def _release(self, live: LiveEndpoint, generation: int) -> None:
        # Otherwise the endpoint has been re-added, and perhaps removed again by a later generation.
        if live.leaving and self._left_in.get(live) == generation:
            del self._left_in[live]
            self._gateway.endpoints.release(live)
            self._gateway.gate.refresh()

    def _drop_series(self, name: str) -> None:
        if self._gateway.endpoints.forget_name(name):
            self._gateway.accounts.forget(name)
            self._gateway.handoffs.removed(name)

    def _remove(self, queue: Room, generation: int) -> None:
        if self._removed_in.get(queue) == generation:
            del self._removed_in[queue]
            self._gateway.gate.close(queue)
            metrics = self._metrics
            metrics.waiting.forget("pool", queue.name)
            metrics.queued_tokens.forget("pool", queue.name)
            metrics.admission_price.forget("pool", queue.name)
            metrics.admission_phi.forget("pool", queue.name)
            metrics.queue_seconds.forget("pool", queue.name)

    def sweep(self) -> None:
        """Free what no request can use any more. Call it regularly."""
        self._generations.sweep()

    @property
    def retiring(self) -> int:
        """Endpoints, names and queues kept for requests of older generations."""
        return self._generations.waiting


def furnish(gateway: Gateway, plan: Plan, metrics: Metrics) -> None:
    """Configure queues, limits and trials as the plan requires, and attach their metrics."""
    config = plan.snapshot.config
    gateway.gate.configure(config)
    gateway.accounts.follow(config.observability)
    leaving = [live for live in gateway.endpoints.all() if live.leaving]
    for pool, admission_plan in plan.rooms.items():
        queue = admission_plan.room
        gateway.gate.open(queue)
        gateway.endpoints.believe(pool, admission_plan.believes)
        queue.govern(admission_plan.admission, admission_plan.shares)
        finishing = tuple(live.load for live in leaving if live.endpoint.pool == pool)
        queue.configure(config.pools[pool].waiting_room, admission_plan.serving, finishing)
        _attach_gauges(queue, metrics)
    _attach_trials(gateway.snapshot, plan.snapshot, metrics)
    models = {route.name for route in plan.snapshot.routes.values()}
    splitting = gateway.handoffs.splitting
    for model in splitting.keys() - models:
        del splitting[model]


def _attach_gauges(queue: Room, metrics: Metrics) -> None:
    pool = queue.name
    metrics.admission_price.labels(pool).follow(lambda: queue.price)
    metrics.admission_phi.labels(pool).follow(lambda: queue.phi)
    metrics.waiting.labels(pool).follow(lambda: float(queue.waiting))
    metrics.queued_tokens.labels(pool).follow(lambda: float(queue.queued_tokens))


def _attach_trials(before: Snapshot, snapshot: Snapshot, metrics: Metrics) -> None:
    """Attach metrics to new shadows and canaries; remove the series of ended ones."""
    for pool, trials in before.tried.items():
        now = snapshot.tried.get(pool)
        if trials.shadows is not None and (now is None or now.shadows is not trials.shadows):
            trials.shadows.leave(metrics)
        if trials.sides is not None and (now is None or now.sides is not trials.sides):
            trials.sides.leave(metrics)
    for trials in snapshot.tried.values():
        if trials.shadows is not None:
            trials.shadows.follow(metrics)
        if trials.sides is not None:
            trials.sides.follow(metrics)


def log_unlisted(before: Snapshot, after: Snapshot) -> None:
    """Log which model names no endpoint lists any more, and which are listed again."""
    for name, message in after.unlisted.items():
        if before.unlisted.get(name) != message:
            log.warning("requests for model '%s' get 404: %s", name, message)
    for name in before.unlisted.keys() & after.routes.keys():
        log.info("model '%s' is listed and served again", name)


def discovered(gateway: Gateway) -> Mapping[str, Sequence[str]]:
    """Return the model names that the engines of each pool report."""
    models: dict[str, list[str]] = {}
    for live in gateway.endpoints.all():
        if not live.leaving:
            names = models.setdefault(live.endpoint.pool, [])
            names += [name for name in live.models if name not in names]
    return models


def dry_run(plan: Plan, before: Snapshot) -> None:
    """Let every new policy pick once among its candidates. Raises CannotServe when one fails."""
    known = {id(policy) for policy in before.policies.values()}
    known |= {id(policy) for trials in before.tried.values() for policy in trials.policies}
    wanted = [(pool, policy) for pool, policy in plan.snapshot.policies.items()]
    wanted += [
        (pool, policy) for pool, trials in plan.snapshot.tried.items() for policy in trials.policies
    ]
    for pool, policy in wanted:
        if id(policy) in known:
            continue
        query = Ask(TRIAL, monotonic(), Random(0))
        try:
            run.pick(policy, query, plan.adoption.pools[pool])
        except Exception as error:  # a policy may be third-party code
            message = f"{policy.name} failed at a trial pick: {error!r}"
            raise CannotServe(("pools", pool, "policy"), message) from error
