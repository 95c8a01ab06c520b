"""Converts the learned state of a gateway to messages, and restores it in the next process.

Momentary state (permits in use, waiting requests, timelines) is not included, because the old
process finishes its own requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING

from gateway.restart.channel import (
    EndpointState,
    Lengths,
    Place,
    PoolState,
    Slots,
    State,
    TenantState,
)
from policies import saved_state
from policies.admission.priced import PricedAdmission
from policies.engine.peer_load import NOTHING, Share
from policies.health.health import State as HealthState
from policies.ledger import own
from policies.saved_state import Blocks

if TYPE_CHECKING:
    from gateway.admission.controller import Gate
    from gateway.fleet.endpoint_registry import LiveEndpoint
    from gateway.route import Gateway

log = logging.getLogger("penstock")

MAX_BLOCKS = 1 << 22
"""Limit on restored index blocks; an index of 256 MiB has a third of that."""


def place_of(live: LiveEndpoint) -> Place:
    """Return the pool and URL of an endpoint."""
    return live.endpoint.pool, live.endpoint.url


def collect(gateway: Gateway) -> Iterator[State]:
    """Yield all learned state, in steps of less than a millisecond.

    Requests are served between the steps.
    """
    endpoints = [live for live in gateway.endpoints.all() if not live.leaving]
    index = gateway.endpoints.prefixes.index
    yield Slots([(live.load.slot, place_of(live)) for live in endpoints])
    yield from saved_state.index_blocks(index)
    holders = {holder.slot: holder for holder in saved_state.index_holders(index)}
    for live in endpoints:
        yield EndpointState(
            place_of(live),
            live.load.slot,
            live.health,
            live.drained,
            live.warm_from,
            saved_state.belief_state(live.load.belief),
            holders.get(live.load.slot),
        )
    yield from _collect_admission(gateway.gate)
    yield Lengths(saved_state.length_states(gateway.accounts.kept.lengths))


def _collect_admission(gate: Gate) -> Iterator[State]:
    for queue in gate.rooms():
        if isinstance(queue.admission, PricedAdmission):
            yield PoolState(queue.name, saved_state.admission_state(queue.admission))
    for tenant, quota in gate.quotas.by_tenant.items():
        yield TenantState(tenant, saved_state.quota_state(quota))


def booked(gateway: Gateway) -> list[tuple[Place, Share]]:
    """Return this process's own work at each endpoint, without endpoints that have none."""
    shares = ((place_of(live), own(live.load)) for live in gateway.endpoints.all())
    return [(place, share) for place, share in shares if share != NOTHING]


class Restorer:
    """Restores state in a gateway that serves no requests yet.

    State that has no counterpart there is ignored.
    """

    def __init__(self, gateway: Gateway, *, prefixes: bool) -> None:
        """Prepare to restore.

        `prefixes` is whether keys mean the same prompts in both prefix indexes.
        """
        self._gateway = gateway
        self._prefixes = prefixes
        self._live = {place_of(live): live for live in gateway.endpoints.all() if not live.leaving}
        self._slots: dict[int, int] = {}
        self.blocks = self.endpoints = self.ejected = 0

    def take(self, state: State) -> None:
        """Restore one message. Raises ValueError when it is inconsistent."""
        match state:
            case Slots(places):
                self._slots = {
                    slot: self._live[place].load.slot
                    for slot, place in places
                    if place in self._live
                }
            case Blocks():
                if self._prefixes and self.blocks < MAX_BLOCKS:
                    index = self._gateway.endpoints.prefixes.index
                    self.blocks += saved_state.restore_blocks(index, state, self._slots)
            case EndpointState():
                live = self._live.get(state.place)
                if live is not None:
                    self._endpoint(live, state)
            case PoolState(pool, admission):
                queue = next(
                    (
                        pool_queue
                        for pool_queue in self._gateway.gate.rooms()
                        if pool_queue.name == pool
                    ),
                    None,
                )
                if queue is not None and isinstance(queue.admission, PricedAdmission):
                    saved_state.restore_admission(queue.admission, admission)
            case TenantState(tenant, quota):
                live_quota = self._gateway.gate.quotas.by_tenant.get(tenant)
                if live_quota is not None:
                    saved_state.restore_quota(live_quota, quota)
            case Lengths(rows):
                saved_state.restore_lengths(self._gateway.accounts.kept.lengths, rows)

    def _endpoint(self, live: LiveEndpoint, state: EndpointState) -> None:
        endpoints, load, index = (
            self._gateway.endpoints,
            live.load,
            self._gateway.endpoints.prefixes.index,
        )
        saved_state.restore_belief(load.belief, state.belief)
        if load.believed:
            load.timeline.refresh(load, monotonic())
        if self._prefixes and state.holder is not None:
            saved_state.restore_holder(index, state.holder, load.slot)
            load.held_tokens, load.regret = index.held_tokens(load.slot), index.regret(load.slot)
        live.warm_from = state.warm_from
        endpoints.restore(live, state.health, drained=state.drained)
        self.endpoints += 1
        self.ejected += live.health.state in (HealthState.EJECTED, HealthState.DEAD)
