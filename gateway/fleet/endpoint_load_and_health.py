"""Changes of endpoints' load and health: the table applies reservations, failures, scrapes, drains.

Only this table writes an endpoint's EndpointLoad. policies.health.endpoint_health has the rules for
health states; the table applies what they decide.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from random import Random
from time import monotonic

from gateway.config import Config
from gateway.fleet import temporary_limits
from gateway.fleet.endpoint_registry import (
    EndpointRegistry,
    MeteredSettings,
    RegistryChanges,
    RegistryPlan,
)
from gateway.fleet.engine_metrics import UNKNOWN_PROGRESS, ScrapedLoad
from gateway.fleet.kv_events.event_verification import CacheExpectation
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.fleet.reservation import DecodeReservation, PullReservation, Reservation
from gateway.fleet.speed_monitor import SpeedMonitor, describe_slowness, find_healthy_peer
from gateway.fleet.speed_recovery import accept_returned
from gateway.fleet.updates_for_peers import OutgoingUpdates
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics
from gateway.metrics.metric_types import Counter
from gateway.protocol.upstream_error import (
    MODEL_GONE,
    REFUSED_FOR_NOW,
    SHUTDOWN,
    UpstreamError,
    health_event,
)
from gateway.util.work_in_turns import Steps, WorkMeter, run_at_once
from policies import load_ledger, scraped_load
from policies.endpoint_load import EndpointLoad
from policies.health import endpoint_health
from policies.health.endpoint_health import Health, HealthEvent, HealthLimits, HealthState
from policies.health.endpoint_speed import SpeedVerdict
from policies.health.speed_outlier import SlowLimits
from policies.prefix.fingerprint import Fingerprint
from policies.routing_types import NONE_FAILED, Candidate, Pick, Request, Role, RoutingQuery

log = logging.getLogger("penstock")

# A stalled engine sends nothing although its /health is fine. An engine that computes a long prompt
# is silent too. Silence therefore counts as a stall only beyond PREFILL_MARGIN times the duration
# of its backlog at this rate, which is slow for an engine on current GPUs.
PREFILL_TOKENS_PER_S = 10_000
PREFILL_MARGIN = 3

# How many items of a WorkMeter the gauges of an endpoint, and the model of its engine, count as.
GAUGES_OF_ENDPOINT, MODEL_OF_ENGINE = 16, 16

MeteredBefore = dict[LiveEndpoint, MeteredSettings | None]
"""The settings of endpoints on which their gauges depend, before a change; None: it is new."""


CONNECTIONS_PER_ITEM = 8
"""Number of connections whose timeouts are checked in the time of one item of other work."""

OUT_OF_ROTATION = (endpoint_health.HealthState.EJECTED, endpoint_health.HealthState.DEAD)


class EndpointTable:
    """All live endpoints of the gateway, with their load, health and connections.

    on_change      called when an endpoint has become available or unavailable
    on_model_gone  called with an endpoint whose engine denies having a model that it listed
    on_ejected     called with an endpoint that was taken out of rotation or found dead
    defer          calls a function, or arranges that the event loop calls it soon
    probe_health   requests an endpoint's /health: True if healthy, None if it did not answer
    """

    __slots__ = (
        *("_by_slot", "_hits", "_limits", "_looked_up", "_metrics", "_pools", "_progress_s"),
        *("_ramp_s", "_registry", "_returned_to", "_updates", "defer", "discovered", "on_change"),
        *("on_ejected", "on_model_gone", "prefixes", "probe_health", "rng", "speed_monitor"),
    )

    def __init__(
        self,
        config: Config,
        prefixes: PrefixCacheView,
        metrics: Metrics,
        rng: Random,
        write_queue: WriteQueue,
    ) -> None:
        self.prefixes = prefixes
        self.rng = rng
        self.on_change: Callable[[], None] = lambda: None
        self.on_model_gone: Callable[[LiveEndpoint], None] = lambda live: None
        self.on_ejected: Callable[[LiveEndpoint], None] = lambda live: None
        self.probe_health: Callable[[LiveEndpoint], Awaitable[bool | None]] = _assume_healthy
        self.defer: Callable[[Callable[[], None]], object] = _call
        self._returned_to = set[str]()
        self._updates: OutgoingUpdates | None = None
        self._metrics = metrics
        self._looked_up: Counter = metrics.prefix_lookup_tokens_total
        self._hits: Counter = metrics.prefix_hit_tokens_total
        self._limits = _health_limits(config)
        self._progress_s, self._ramp_s = config.health.progress, config.health.slow_start
        self.speed_monitor = SpeedMonitor(SlowLimits(config.health.slow_factor))
        self._registry = EndpointRegistry(write_queue)
        self._by_slot = self._registry.by_slot
        self.discovered = self._registry.discovered
        self._pools: Mapping[str, tuple[Candidate, ...]] = {}

    def plan(self, config: Config) -> RegistryPlan:
        """Return which endpoints `config` would add, keep and remove, without changing anything."""
        return self._registry.plan(config)

    def plan_steps(self, config: Config) -> Steps[RegistryPlan]:
        """Do the work of plan() in parts: yield after each. The configuration must not change."""
        return self._registry.plan_steps(config)

    def apply(self, plan: RegistryPlan) -> RegistryChanges:
        """Carry out a plan from plan(), and return the added and removed endpoints.

        A removed endpoint stays usable for older requests until release().
        """
        metered = self.metered_settings(plan)
        changes = self.switch(plan)
        run_at_once(self.meter_steps(metered))
        return changes

    def metered_settings(self, plan: RegistryPlan) -> MeteredBefore:
        """Return the present settings of the endpoints that the plan changes; None for new ones.

        Call this before switch(), and pass the result to meter_steps().
        """
        before: MeteredBefore = {m.live: MeteredSettings.of(m.live) for m in plan.changed}
        return before | {m.live: None for m in plan.entering}

    def switch(self, plan: RegistryPlan) -> RegistryChanges:
        """Apply the parts of a plan that requests use, all in one turn of the event loop."""
        config = plan.config
        changes = self._registry.apply(plan)
        self._limits, self._progress_s = _health_limits(config), config.health.progress
        self._ramp_s = config.health.slow_start
        self.speed_monitor.limits = SlowLimits(config.health.slow_factor)
        self._pools = plan.pools
        for pool in plan.pools:
            self._update_availability(pool)
        return changes

    def meter_steps(self, before: MeteredBefore) -> Steps[None]:
        """Set the gauges and the KV capacity of new and changed endpoints; yield after each part.

        before  the endpoints' settings before switch(), from metered_settings()
        """
        meter = WorkMeter()
        for live, was in before.items():
            is_now = MeteredSettings.of(live)
            if is_now != was:
                self._attach_gauges(live)
            if is_now.kv_tokens is not None and (was is None or is_now.kv_tokens != was.kv_tokens):
                self.prefixes.index.set_capacity(live.load.slot, is_now.kv_tokens)
                live.load.kv_tokens = is_now.kv_tokens
            if meter.is_part_over(GAUGES_OF_ENDPOINT):
                yield

    def _attach_gauges(self, live: LiveEndpoint) -> None:
        load, name, metrics = live.load, live.endpoint.name, self._metrics
        metrics.inflight.labels(name).set_function(
            lambda: float(load.in_flight - load.peer_load.in_flight)
        )
        metrics.endpoint_up.labels(name).set_function(lambda: float(load.is_available))
        if live.spec.kv_events is not None:
            exact, slot = self.prefixes.exact, load.slot
            metrics.endpoint_cache_exact.labels(name).set_function(
                lambda: float(exact.is_exact(slot))
            )
        metrics.endpoint_slowness.labels(name).set_function(
            lambda: 0.0 if live.speed.slowness is None else live.speed.slowness.ratio
        )
        metrics.runtime_gauges.attach_endpoint(live, monotonic)

    def release(self, live: LiveEndpoint) -> None:
        """Close the connections of an endpoint that left the configuration; free its slot number.

        Does nothing if the endpoint has been added again.
        """
        if not live.is_leaving:
            return
        live.load.is_available = False
        live.load.mark_changed()
        live.upstream.close()
        self.prefixes.remove_endpoint(live.load.slot)
        self._registry.release(live)

    def drop_series_steps(self, names: Collection[str]) -> Steps[frozenset[str]]:
        """Remove the metric series of those `names` that no endpoint has any more, in parts.

        Yields after each part, and returns the names whose series were removed.
        """
        used = {live.endpoint.name for live in self.all() if not live.is_leaving}
        unused = frozenset(names) - used
        if unused:
            yield from self._metrics.remove_endpoints_steps(unused)
        return unused

    def all(self) -> tuple[LiveEndpoint, ...]:
        """Return all live endpoints, including those that are leaving the configuration."""
        return self._registry.all()

    def publish_to_peers(self, updates: OutgoingUpdates) -> None:
        """Collect prompts, cache reports and health changes for other gateways from now on."""
        self._updates = self.prefixes.updates = updates

    # Routing

    def build_query(
        self,
        request: Request,
        fingerprint: Fingerprint | None,
        tried: Sequence[str],
        *,
        in_order: bool = False,
    ) -> RoutingQuery:
        """Return the request and its cached tokens by endpoint, for a policy to pick an endpoint.

        tried     names of endpoints that the policy must not pick
        in_order  whether the policy keeps its candidates sorted; then the query may list only the
                  endpoints that have cached tokens
        """
        cached: Sequence[int] = ()
        if fingerprint is not None:
            if in_order and not tried:
                cached = self.prefixes.holders(fingerprint, request.prompt_tokens)
            else:
                cached = self.prefixes.cached_tokens(fingerprint, request.prompt_tokens)
        failed = frozenset(tried) if tried else NONE_FAILED
        return RoutingQuery(request, monotonic(), self.rng, cached, failed, fingerprint)

    def reserve(self, pick: Pick, request: Request, fingerprint: Fingerprint | None) -> Reservation:
        """Reserve capacity at the picked endpoint, and record its prompt in the prefix index."""
        live: LiveEndpoint = self._by_slot[pick.candidate.load.slot]
        expected: CacheExpectation | None = None
        if fingerprint is not None:
            prefixes = self.prefixes
            if prefixes.exact.endpoints:
                expected = prefixes.expect_cached(fingerprint, live, request.prompt_tokens)
            self._looked_up.value += request.prompt_tokens
            self._hits.value += pick.cached_tokens
            live.sent_tokens += request.prompt_tokens
            live.hit_tokens += pick.cached_tokens
            prefixes.learn_sent(fingerprint, live, request.prompt_tokens)
        reservation = Reservation(self, live, pick, request, fingerprint)
        reservation.expected_cache = expected
        return reservation

    def reserve_decode(
        self,
        pick: Pick,
        request: Request,
        fingerprint: Fingerprint | None,
        pulled_tokens: int = 0,
    ) -> DecodeReservation:
        """Reserve capacity for decoding a prompt that another endpoint prefills.

        If `pulled_tokens` is not 0, only so many tokens of its beginning come from there.
        """
        live = self._by_slot[pick.candidate.load.slot]
        if not pulled_tokens:
            return DecodeReservation(self, live, pick, request, fingerprint)
        reservation = PullReservation(self, live, pick, request, fingerprint)
        reservation.pulled_tokens = pulled_tokens
        return reservation

    # Health events

    def on_failure(self, live: LiveEndpoint, error: UpstreamError) -> None:
        """Record a failed request in the endpoint's health and in the metrics."""
        self._metrics.upstream_errors_total.labels(live.endpoint.name, error.kind).inc()
        if error.kind == MODEL_GONE:
            self.on_model_gone(live)
        elif error.kind in REFUSED_FOR_NOW:
            temporary_limits.hold_back(live, error.wait_s, monotonic())
        self.on_event(live, health_event(error))

    def on_probe(self, live: LiveEndpoint, status: int | None) -> None:
        """Record the HTTP status of a health check; None if the endpoint did not answer.

        vLLM answers with 503 when its engine is dead, for example after the loss of one rank.
        """
        if status == 503:
            self.on_event(live, HealthEvent.ENGINE_DEAD)
        elif status == 200:
            is_needed = self.is_needed(live)
            self.on_event(live, HealthEvent.PROBE_OK_NEEDED if is_needed else HealthEvent.PROBE_OK)
        else:
            self.on_event(live, HealthEvent.PROBE_FAILED)

    async def check_health(self, candidate: Candidate) -> bool | None:
        """Request an endpoint's /health page: True if healthy, None if it did not answer."""
        return await self.probe_health(self._by_slot[candidate.load.slot])

    def is_needed(self, live: LiveEndpoint) -> bool:
        """Return whether no endpoint of this pool and role is available, so this one is needed."""
        pool = self._pools.get(live.endpoint.pool, ())
        role = live.endpoint.role
        return not any(peer.load.is_available for peer in pool if peer.endpoint.role is role)

    def on_connection_refused(self, live: LiveEndpoint) -> None:
        """Eject an endpoint immediately, because it refused the connection of a health check."""
        self.on_event(live, HealthEvent.CONNECT_FAILED)

    def silence_limit_s(self, live: LiveEndpoint) -> float:
        """Return for how many seconds an endpoint with running requests may send nothing.

        After this time it is checked for a stall. A large backlog of prompts makes the time longer.
        """
        prefill_s = live.backlog_tokens / PREFILL_TOKENS_PER_S
        return max(self._progress_s, PREFILL_MARGIN * prefill_s)

    def on_progress(self, live: LiveEndpoint) -> None:
        """Record that the endpoint's engine is generating: it has just produced a token."""
        live.upstream.last_body_at = monotonic()
        live.is_stalled = False

    def predict_first_byte_s(self, slot: int, request: Request, tokens: int) -> float | None:
        """Predict the seconds until the endpoint in `slot` sends the first byte of an answer."""
        return self.speed_monitor.predict_first_byte_s(self._by_slot[slot], request, tokens)

    def find_peer(self, live: LiveEndpoint) -> LiveEndpoint | None:
        """Return another healthy endpoint of the same pool and role, to compare this one with.

        Endpoints with the same hardware are preferred. Returns None if there is none.
        """
        candidates = self._pools.get(live.endpoint.pool, ())
        return find_healthy_peer(
            live, [self._by_slot[candidate.load.slot] for candidate in candidates]
        )

    def on_stall(self, live: LiveEndpoint) -> None:
        """Mark a silent endpoint as dead, because a test request for one token failed."""
        live.is_stalled = True
        self.on_event(live, HealthEvent.ENGINE_DEAD)

    def on_scrape(self, live: LiveEndpoint, reading: ScrapedLoad) -> None:
        """Store the load that the engine reported in a scrape of its metrics."""
        load, now = live.load, monotonic()
        running, waiting = reading.running, reading.waiting
        scraped_load.record_scrape(load, running, waiting, reading.kv_usage, reading.kv_tokens, now)
        if reading.progress not in (UNKNOWN_PROGRESS, live.progress):
            live.progress = reading.progress
            live.upstream.last_body_at = now
        live.kv_received_bytes = reading.kv_received_bytes
        if reading.kv_tokens is not None:
            self.prefixes.index.set_capacity(load.slot, reading.kv_tokens)

    def on_event(self, live: LiveEndpoint, event: HealthEvent) -> None:
        """Apply an event, such as a failure, to the endpoint's health.

        A change of the health state may take the endpoint out of rotation or return it.
        """
        before = live.health
        after = endpoint_health.next_health(before, event, monotonic(), self.rng, self._limits)
        if after is before:
            return
        live.health = after
        live.load.is_proven = endpoint_health.is_proven(after)
        if after.state is not before.state:
            self._on_state_change(live, before, after)
        elif endpoint_health.is_unreachable(after) and not endpoint_health.is_unreachable(before):
            self._update_availability(live.endpoint.pool)
            self.on_change()

    def _on_state_change(self, live: LiveEndpoint, before: Health, after: Health) -> None:
        name, cause = live.endpoint.name, after.cause or "new"
        log.warning(
            "endpoint %s: health changes from %s to %s (%s)", name, before.state, after.state, cause
        )
        if self._updates is not None:
            self._updates.health_changes.append(
                (live.endpoint, str(after.state), str(after.cause or ""))
            )
        if after.state in OUT_OF_ROTATION:
            self._metrics.ejections_total.labels(name, str(after.cause)).inc()
            self.prefixes.forget_endpoint(live.load)
        if after.state is endpoint_health.HealthState.DEAD:
            live.upstream.fail_all("ejected", "the engine is dead")
        if after.state not in OUT_OF_ROTATION and not live.is_leaving:
            if before.state in OUT_OF_ROTATION:
                self._on_return(live, before)
            return
        if live.is_leaving:
            # A leaving endpoint is not probed any more, and cannot be the last one of its pool.
            live.load.is_available = after.state in (
                endpoint_health.HealthState.UP,
                endpoint_health.HealthState.RETURNING,
            )
        else:
            self._update_availability(live.endpoint.pool)
        self.on_change()
        if after.state in OUT_OF_ROTATION:
            self.on_ejected(live)

    def _on_return(self, live: LiveEndpoint, before: Health) -> None:
        # Let an endpoint be picked that has returned into rotation; `before` is its health until
        # now.
        #
        # The rest of its pool is judged later in the same turn of the event loop, once for all
        # endpoints that return in it: hundreds do if many were added.
        peer = self.find_peer(live) if before.cause is HealthEvent.SLOW else None
        accept_returned(live, before, peer)
        temporary_limits.begin_slow_start(live, self._ramp_s, monotonic())
        _set_available(live.load, is_available=not live.is_drained)
        is_deferred = bool(self._returned_to)
        self._returned_to.add(live.endpoint.pool)
        if not is_deferred:
            self.defer(self._judge_pools_of_returned)

    def _judge_pools_of_returned(self) -> None:
        pools, self._returned_to = self._returned_to, set()
        for pool in pools:
            self._update_availability(pool)
        self.on_change()

    def _update_availability(self, pool: str) -> None:
        # Decide which endpoints of a pool may be picked, after a change of health or membership.
        #
        # Each role is judged separately: a prefill endpoint cannot replace a decode endpoint. A
        # drained endpoint does not count as a replacement for any other.
        by_role: dict[Role, list[LiveEndpoint]] = {}
        by_slot = self._by_slot
        for candidate in self._pools.get(pool, ()):
            live = by_slot[candidate.load.slot]
            if live.is_drained:
                _set_available(live.load, is_available=False)
                continue
            role = candidate.endpoint.role
            peers = by_role.get(role)
            if peers is None:
                peers = by_role[role] = []
            peers.append(live)
        for peers in by_role.values():
            verdicts = endpoint_health.available_endpoints(
                [live.health for live in peers], self._limits
            )
            for live, is_available in zip(peers, verdicts, strict=True):
                load = live.load
                if load.is_available is not is_available:
                    _set_available(load, is_available=is_available)

    def set_drained(self, live: LiveEndpoint, is_drained: bool) -> int:
        """Stop routing to an endpoint, or resume it; return its number of running requests."""
        if live.is_drained and not is_drained:
            temporary_limits.begin_slow_start(live, self._ramp_s, monotonic())
        live.is_drained = is_drained
        self._update_availability(live.endpoint.pool)
        self.on_change()
        return live.load.in_flight

    def restore_health(self, live: LiveEndpoint, health: Health, *, is_drained: bool) -> None:
        """Restore a saved drain, and saved health unless this process has seen a failure."""
        if live.health.state is HealthState.UP:
            live.health = health
        live.is_drained = is_drained
        self._update_availability(live.endpoint.pool)

    def drain_by_name(self, names: Collection[str]) -> None:
        """Stop routing to the endpoints with these names. Call this before the first request."""
        for live in self.all():
            if live.endpoint.name in names:
                self.set_drained(live, is_drained=True)

    def _on_speed(self, live: LiveEndpoint, verdict: SpeedVerdict, now: float) -> None:
        name, slowness = live.endpoint.name, live.speed.slowness
        live.throttled_until = None
        if verdict is SpeedVerdict.NORMAL or slowness is None:
            log.warning("endpoint %s is as fast as its peers again", name)
            temporary_limits.begin_slow_start(live, self._ramp_s, now)
            return
        temporary_limits.limit_suspect(live)
        log.warning("endpoint %s is %s: %s", name, verdict, describe_slowness(slowness))
        if verdict is SpeedVerdict.SLOW:
            live.speed.restart()
            self.on_event(live, HealthEvent.SLOW)

    def on_overtaken(self, live: LiveEndpoint, tokens: int) -> None:
        """Send the endpoint fewer requests, because a late request has moved to another one.

        `tokens` is the number of prompt tokens that the endpoint had to compute for it; 0 if the
        first token could not be observed.
        """
        self.speed_monitor.on_overtaken(live, tokens, monotonic())
        self.throttle(live)

    def throttle(self, live: LiveEndpoint) -> None:
        """Send the endpoint no requests while others have capacity, because it may be slow.

        When its speed has been reviewed, it gets a few requests, until a review shows that it is
        fast again.
        """
        if self.speed_monitor.limits.factor:
            temporary_limits.throttle(live, monotonic())

    def check_stalls(self, now: float) -> Sequence[LiveEndpoint]:
        """Return endpoints whose requests may be late; throttle those that are very late."""
        self._review_speeds(now)
        stalled, doubtful = self.speed_monitor.stalled(self._pools, self._by_slot, now)
        for live in doubtful:
            self.throttle(live)
        return stalled

    def _review_speeds(self, now: float) -> None:
        for live, verdict in self.speed_monitor.sweep(self._pools, self._by_slot, now):
            self._on_speed(live, verdict, now)
        for live in self.speed_monitor.reviewed:
            temporary_limits.admit_reviewed(live, now)

    def sweep(self, now: float) -> None:
        """Review speeds, raise slow-start limits and check the timeouts of all connections."""
        run_at_once(self.sweep_steps(now))

    def sweep_steps(self, now: float) -> Steps[None]:
        """Do the work of sweep() in parts: yield after each, so that requests can run."""
        self._review_speeds(now)
        yield
        meter = WorkMeter()
        for live in self.all():
            if meter.is_part_over(1 + len(live.upstream.connections) // CONNECTIONS_PER_ITEM):
                yield
            temporary_limits.raise_limits(live, self._ramp_s, now)
            yield from live.upstream.sweep(now)
            if live.health.state is endpoint_health.HealthState.DEAD:
                # Requests whose connection was still being opened when the engine died.
                live.upstream.fail_all("ejected", "the engine is dead")
            if live.upstream.silence_duration_s(now) < 1.0:
                live.backlog_tokens = live.load.prefill_tokens

    def stop_routing(self) -> None:
        """Stop routing to all endpoints, because the gateway is shutting down."""
        for live in self.all():
            live.is_drained = True
            _set_available(live.load, is_available=False)
        self.on_change()

    def fail_streams(self, *, immediately: bool = False) -> int:
        """Fail all running requests, because the gateway is stopping; return how many still run.

        immediately  whether to fail streams in the middle of an event too, not only between events
        """
        kind, message = SHUTDOWN, "the gateway stops"
        if immediately:
            for live in self.all():
                live.upstream.fail_all(kind, message)
            return 0
        return sum(live.upstream.fail_between_events(kind, message) for live in self.all())

    def close(self) -> None:
        for live in self.all():
            live.upstream.close()


def set_beliefs_steps(candidates: Sequence[Candidate], is_enabled: bool) -> Steps[None]:
    """Turn latency predictions on or off for these endpoints; yield after each part."""
    meter, now = WorkMeter(), monotonic()
    for candidate in candidates:
        is_change = candidate.load.is_modelled is not is_enabled
        if is_change:
            load_ledger.set_modelled(candidate.load, is_enabled, now)
        if meter.is_part_over(MODEL_OF_ENGINE if is_change else 1):
            yield
            now = monotonic()


def _call(function: Callable[[], None]) -> None:
    function()


async def _assume_healthy(_: LiveEndpoint) -> bool | None:
    return True


def _set_available(load: EndpointLoad, *, is_available: bool) -> None:
    if load.is_available is not is_available:
        load.is_available = is_available
        load.mark_changed()


def _health_limits(config: Config) -> HealthLimits:
    spec = config.health
    return HealthLimits(
        failures_in_a_row=spec.failures, first_s=spec.backoff, longest_s=spec.backoff_max
    )
