"""Building what a configuration asks for, trying it, and putting it in force in one turn of the event loop.

Everything that can fail happens before the first change. What the old snapshot may still need goes when it is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from time import monotonic

from gateway.config import Config
from gateway.config.problems import Path
from gateway.gate import Room
from gateway.metrics import Metrics
from gateway.reload.generations import Generations
from gateway.reload.reachability import unreachable_pool
from gateway.roster import LiveEndpoint
from gateway.serve import Gateway
from gateway.snapshot import Plan, Snapshot, build
from gateway.watch.watcher import Watcher
from policies import run
from policies.model import Ask, Request

log = logging.getLogger("penstock")

TRIAL = Request("dry-run", "", "", 1000, 100)


class CannotServe(Exception):
    """A configuration that is well-formed and yet cannot be put in force; `path` says what of it."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


class Swap:
    """What is in force, and how it is replaced. One writer of `gateway.snapshot`."""

    def __init__(self, gateway: Gateway, watcher: Watcher, metrics: Metrics) -> None:
        self._gateway = gateway
        self._watcher = watcher
        self.discover: Callable[[Config], None] = lambda config: None
        self._metrics = metrics
        self._generations = Generations()
        self._left_in: dict[LiveEndpoint, int] = {}
        self._closed_in: dict[Room, int] = {}

    async def check_reachable(self, config: Config) -> None:
        """Raises CannotServe if no endpoint of a pool can be reached, and that is new."""
        staying = [live for live in self._gateway.endpoints.all() if not live.leaving]
        known = {live.endpoint.url for live in staying}
        available = {live.endpoint.url for live in staying if live.load.available}
        pool = await unreachable_pool(config, known, available)
        if pool is not None:
            text = "none of its endpoints accepts a connection; `penstock reload --force` takes it over all the same"
            raise CannotServe(("pools", pool), text)

    def plan(self, config: Config) -> Plan:
        """Build and try `config`. Changes nothing. Raises CannotServe."""
        gateway = self._gateway
        try:
            plan = build(config, gateway.endpoints, gateway.gate, discovered(gateway), gateway.snapshot)
        except ValueError as error:  # what only building shows; PolicyConfigError is one
            raise CannotServe(("pools",), str(error)) from error
        dry_run(plan, gateway.snapshot)
        return plan

    def carry_out(self, plan: Plan) -> int:
        """Put it in force. No await and nothing that fails: requests see either all of it or nothing.

        How many requests are at endpoints or in pools that leave: they finish there, nothing is cut.
        """
        gateway, config, generation = self._gateway, plan.snapshot.config, self._gateway.snapshot.generation
        moves = gateway.endpoints.adopt(plan.adoption)
        affected = sum(live.load.in_flight - live.load.others.in_flight for live in moves.left)
        closed = [room for room in gateway.gate.rooms() if room.name not in config.pools]
        affected += sum(room.waiting for room in closed if room not in self._closed_in)
        furnish(gateway, plan, self._metrics)
        self._generations.replaced(gateway.snapshot)
        log_unlisted(gateway.snapshot, plan.snapshot)
        gateway.snapshot = plan.snapshot
        self.discover(config)
        self._watcher.follow(config)
        self._retire(generation, moves.left, moves.names, closed)
        return affected

    def _retire(
        self, generation: int, left: Sequence[LiveEndpoint], names: Sequence[str], closed: Sequence[Room]
    ) -> None:
        """What goes once nobody holds this generation or an older one."""
        later = partial(self._generations.when_gone, generation)
        for live in left:
            self._left_in[live] = generation
            later(partial(self._release, live, generation))
        for name in names:
            later(partial(self._forget, name))
        for room in closed:
            if room not in self._closed_in:
                self._closed_in[room] = generation
                later(partial(self._close, room, generation))
        for room in [room for room in self._closed_in if room not in closed]:
            del self._closed_in[room]  # its pool came back

    def _release(self, live: LiveEndpoint, generation: int) -> None:
        if live.leaving and self._left_in.get(live) == generation:  # else it came back, and may have left again
            del self._left_in[live]
            self._gateway.endpoints.release(live)
            self._gateway.gate.refresh()

    def _forget(self, name: str) -> None:
        if self._gateway.endpoints.forget_name(name):
            self._gateway.accounts.forget(name)
            self._gateway.handoffs.removed(name)

    def _close(self, room: Room, generation: int) -> None:
        if self._closed_in.get(room) == generation:
            del self._closed_in[room]
            self._gateway.gate.close(room)
            self._metrics.waiting.forget("pool", room.name)
            self._metrics.queued_tokens.forget("pool", room.name)
            self._metrics.admission_price.forget("pool", room.name)
            self._metrics.admission_phi.forget("pool", room.name)
            self._metrics.queue_seconds.forget("pool", room.name)

    def sweep(self) -> None:
        """Give up what nobody can need any more."""
        self._generations.sweep()

    @property
    def retiring(self) -> int:
        """Endpoints, names and rooms kept for requests of older generations."""
        return self._generations.waiting


def furnish(gateway: Gateway, plan: Plan, metrics: Metrics) -> None:
    """Rooms, limits and modes as the plan's configuration has them."""
    config = plan.snapshot.config
    gateway.gate.configure(config)
    gateway.accounts.follow(config.observability)
    leaving = [live for live in gateway.endpoints.all() if live.leaving]
    for pool, opening in plan.rooms.items():
        room = opening.room
        gateway.gate.open(room)
        gateway.endpoints.believe(pool, opening.believes)
        room.govern(opening.admission, opening.shares)
        finishing = tuple(live.load for live in leaving if live.endpoint.pool == pool)
        room.configure(config.pools[pool].waiting_room, opening.serving, finishing)
        metrics.admission_price.labels(pool).follow(lambda room=room: room.price)  # type: ignore[misc]
        metrics.admission_phi.labels(pool).follow(lambda room=room: room.phi)  # type: ignore[misc]
        metrics.waiting.labels(pool).follow(lambda room=room: float(room.waiting))  # type: ignore[misc]
        metrics.queued_tokens.labels(pool).follow(lambda room=room: float(room.queued_tokens))  # type: ignore[misc]
    _try(gateway.snapshot, plan.snapshot, metrics)
    models = {route.name for route in plan.snapshot.routes.values()}
    splitting = gateway.handoffs.splitting
    for model in splitting.keys() - models:
        del splitting[model]


def _try(before: Snapshot, snapshot: Snapshot, metrics: Metrics) -> None:
    """Shadows and canaries that are new count from nothing. With those who are gone go their series, and requests of
    theirs that end later count nowhere."""
    for pool, tried in before.tried.items():
        now = snapshot.tried.get(pool)
        if tried.shadows is not None and (now is None or now.shadows is not tried.shadows):
            tried.shadows.leave(metrics)
        if tried.sides is not None and (now is None or now.sides is not tried.sides):
            tried.sides.leave(metrics)
    for tried in snapshot.tried.values():
        if tried.shadows is not None:
            tried.shadows.follow(metrics)
        if tried.sides is not None:
            tried.sides.follow(metrics)


def log_unlisted(before: Snapshot, after: Snapshot) -> None:
    """Log which model names no endpoint lists any more, and which are listed again."""
    for name, message in after.unlisted.items():
        if before.unlisted.get(name) != message:
            log.warning("model '%s' is answered with 404: %s", name, message)
    for name in before.unlisted.keys() & after.routes.keys():
        log.info("model '%s' is listed and served again", name)


def discovered(gateway: Gateway) -> Mapping[str, Sequence[str]]:
    """Model names per pool as the engines report them."""
    found: dict[str, list[str]] = {}
    for live in gateway.endpoints.all():
        if not live.leaving:
            names = found.setdefault(live.endpoint.pool, [])
            names += [name for name in live.models if name not in names]
    return found


def dry_run(plan: Plan, before: Snapshot) -> None:
    """One pick by every policy that is new, among its own candidates. Raises CannotServe when one fails at it."""
    known = {id(policy) for policy in before.policies.values()}
    known |= {id(policy) for tried in before.tried.values() for policy in tried.policies}
    wanted = [(pool, policy) for pool, policy in plan.snapshot.policies.items()]
    wanted += [(pool, policy) for pool, tried in plan.snapshot.tried.items() for policy in tried.policies]
    for pool, policy in wanted:
        if id(policy) in known:
            continue
        ask = Ask(TRIAL, monotonic(), Random(0))
        try:
            run.pick(policy, ask, plan.adoption.pools[pool])
        except Exception as error:  # a policy may be anybody's: whatever it does, the one in force stays
            raise CannotServe(("pools", pool, "policy"), f"{policy.name} failed at a trial pick: {error!r}") from error
