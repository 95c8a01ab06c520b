"""Collects what a gateway has learned as messages, in steps, and restores it in the next process.

The state of running and waiting requests is not included, because the old process finishes its own
requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING

from gateway.restart.handover_messages import (
    EndpointKey,
    EndpointState,
    LearnedState,
    OutputLengthState,
    PoolState,
    SlotMap,
    TenantState,
)
from policies import restart_state
from policies.admission.cap_admission import SessionCap
from policies.admission.priced_admission import PricedAdmission
from policies.engine.peer_load import NOTHING, PeerShare
from policies.health.endpoint_health import HealthState as HealthState
from policies.load_ledger import own_load
from policies.restart_state import AdmissionState, Blocks, DriftState, SessionTurns

if TYPE_CHECKING:
    from gateway.admission.admission_controller import AdmissionController
    from gateway.drift.drift_monitor import DriftMonitor
    from gateway.fleet.live_endpoint import LiveEndpoint
    from gateway.routes_and_snapshot import Gateway

log = logging.getLogger("penstock")

MAX_BLOCKS = 1 << 22
"""Maximum number of restored index blocks; an index of 256 MiB has a third as many."""


def endpoint_key(live: LiveEndpoint) -> EndpointKey:
    """Return the pool and the address of an endpoint, which identify it in both processes."""
    return live.endpoint.key


def collect_state(gateway: Gateway, drift: DriftMonitor | None = None) -> Iterator[LearnedState]:
    """Yield the gateway's learned state as messages, in steps of less than a millisecond.

    The event loop serves requests between two steps.
    """
    endpoints = [live for live in gateway.endpoints.all() if not live.is_leaving]
    index = gateway.endpoints.prefixes.index
    yield SlotMap([(live.load.slot, endpoint_key(live)) for live in endpoints])
    yield from restart_state.index_blocks(index)
    holders = {holder.slot: holder for holder in restart_state.index_holders(index)}
    for live in endpoints:
        yield EndpointState(
            endpoint_key(live),
            live.load.slot,
            live.health,
            live.is_drained,
            live.slow_start_at,
            restart_state.belief_state(live.load.belief),
            holders.get(live.load.slot),
        )
    yield from _collect_admission(gateway.gate)
    output_lengths = gateway.accounts.slo_tracker.output_lengths
    yield OutputLengthState(restart_state.length_states(output_lengths))
    if drift is not None:
        yield from drift.states()


def _collect_admission(gate: AdmissionController) -> Iterator[LearnedState]:
    for queue in gate.pool_queues():
        if isinstance(queue.admission, PricedAdmission | SessionCap):
            yield PoolState(queue.name, restart_state.admission_state(queue.admission))
    for tenant, quota in gate.quotas.by_tenant.items():
        yield TenantState(tenant, restart_state.quota_state(quota))


def remaining_work(gateway: Gateway) -> list[tuple[EndpointKey, PeerShare]]:
    """Return the work of this process's running requests at each endpoint, if there is any.

    The successor process adds it to the endpoints' loads.
    """
    shares = ((endpoint_key(live), own_load(live.load)) for live in gateway.endpoints.all())
    return [(place, share) for place, share in shares if share != NOTHING]


class Restorer:
    """Restores what the previous process learned, in a gateway that serves no requests yet.

    State of endpoints, pools and tenants that are not configured is ignored.
    """

    def __init__(
        self, gateway: Gateway, drift: DriftMonitor | None = None, *, has_same_keys: bool
    ) -> None:
        """Prepare to restore learned state in this gateway.

        gateway        the gateway
        drift          the drift monitor whose counts are restored, or None
        has_same_keys  whether both processes hash prompts with the same key. Otherwise the prefix
                       index cannot be restored
        """
        self._gateway, self._drift = gateway, drift
        self._has_same_keys = has_same_keys
        self._live = {
            endpoint_key(live): live for live in gateway.endpoints.all() if not live.is_leaving
        }
        self._slots: dict[int, int] = {}
        self._tables: dict[bytes, int] = {}
        self._unknown: set[int] = set()
        self.blocks = self.endpoints = self.ejected = 0

    def restore(self, state: LearnedState) -> None:
        """Restore the learned state in one message. Raises ValueError if it is inconsistent."""
        match state:
            case SlotMap(places):
                self._slots = {
                    slot: self._live[place].load.slot
                    for slot, place in places
                    if place in self._live
                }
                self._unknown = set(self._slots.values())
            case Blocks():
                if self._has_same_keys and self.blocks < MAX_BLOCKS:
                    index = self._gateway.endpoints.prefixes.index
                    self.blocks += restart_state.restore_blocks(
                        index, state, self._slots, self._tables
                    )
            case EndpointState():
                live = self._live.get(state.key)
                if live is not None:
                    self._endpoint(live, state)
            case PoolState(pool, admission):
                self._admission(pool, admission)
            case TenantState(tenant, quota):
                live_quota = self._gateway.gate.quotas.by_tenant.get(tenant)
                if live_quota is not None:
                    restart_state.restore_quota(live_quota, quota)
            case DriftState() | SessionTurns():
                if self._drift is not None:
                    self._drift.restore(state)
            case OutputLengthState(rows):
                output_lengths = self._gateway.accounts.slo_tracker.output_lengths
                restart_state.restore_lengths(output_lengths, rows)

    def finish(self) -> None:
        """Drop restored blocks if the state ended before that of all endpoints that hold them.

        The ages of their holders cannot be known then. Call it once, after the last message.
        """
        if self.blocks and self._unknown:
            self._gateway.endpoints.prefixes.index.clear()
            self.blocks = 0

    def _admission(self, pool: str, state: AdmissionState) -> None:
        for queue in self._gateway.gate.pool_queues():
            if queue.name == pool and isinstance(queue.admission, PricedAdmission | SessionCap):
                restart_state.restore_admission(queue.admission, state)

    def _endpoint(self, live: LiveEndpoint, state: EndpointState) -> None:
        endpoints = self._gateway.endpoints
        load = live.load
        index = self._gateway.endpoints.prefixes.index
        restart_state.restore_belief(load.belief, state.belief)
        if load.is_modelled:
            load.timeline.refresh_forecast(load, monotonic())
        if self._has_same_keys and state.holder is not None:
            restart_state.restore_holder(index, state.holder, load.slot)
            load.prefix_cache_tokens, load.eviction_regret = (
                index.cached_tokens(load.slot),
                index.eviction_regret(load.slot),
            )
        self._unknown.discard(load.slot)
        live.slow_start_at = state.slow_start_at
        endpoints.restore_health(live, state.health, is_drained=state.is_drained)
        self.endpoints += 1
        self.ejected += live.health.state in (HealthState.EJECTED, HealthState.DEAD)
