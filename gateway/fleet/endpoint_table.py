"""The endpoint table: every endpoint with its live load, health and connections.

The only writer of EndpointLoad.

Health decisions are made in policies.health.health; this module collects their events and carries out the
verdicts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from random import Random
from time import monotonic

from gateway.config import Config
from gateway.fleet.booking import Booking, Reservation
from gateway.fleet.endpoint_registry import Adoption, LiveEndpoint, Moves, Roster
from gateway.fleet.outgoing_updates import News
from gateway.fleet.prefix_cache import Prefixes
from gateway.fleet.scrape import Reading
from gateway.fleet.speed_monitor import SpeedMonitor, describe, well_peer
from gateway.http.write_queue import Outbox
from gateway.metrics.catalogue import Metrics
from gateway.protocol.upstream_error import MODEL_GONE, STOPPED, UpstreamBroke, evidence
from policies import ledger, saved_state
from policies.health import health, slow_start, stall
from policies.health.health import Event, Health, HealthLimits
from policies.health.health import State as HealthState
from policies.health.speed_outlier import SlowLimits
from policies.health.speed_record import Verdict
from policies.load import NO_CEILING, EndpointLoad
from policies.model import Ask, Candidate, Pick, Request, Role
from policies.prefix.fingerprint import Fingerprint
from policies.prefix.sampled_keys import Keys

log = logging.getLogger("penstock")

# A stalled engine sends nothing although its /health is fine. An engine that computes a long prompt
# is silent too. Silence therefore counts as a stall only beyond PREFILL_MARGIN times the duration
# of its backlog at this rate, which is slow for a current TP group (perfmodel.md 3.5).
PREFILL_TOKENS_PER_S = 10_000
PREFILL_MARGIN = 3

OUT = (health.State.EJECTED, health.State.DEAD)


class EndpointTable:
    """All live endpoints by slot.

    on_change     called when an endpoint's availability has changed
    on_model_gone called with an endpoint that lacks a model that it listed
    on_ejected    called with an endpoint that has been ejected or found dead
    probe_health  queries an endpoint's /health: True if healthy, None if it did not answer
    """

    __slots__ = (
        *("_by_slot", "_hits", "_limits", "_looked_up", "_metrics", "_pools", "_progress_s"),
        *("_ramp_s", "_registry", "ask_health", "found", "news", "on_change"),
        *("on_model_gone", "on_out"),
        *("prefixes", "rng", "speeds"),
    )

    def __init__(
        self, config: Config, prefixes: Prefixes, metrics: Metrics, rng: Random, write_queue: Outbox
    ) -> None:
        self.prefixes = prefixes
        self.rng = rng
        self.on_change: Callable[[], None] = lambda: None
        self.on_model_gone: Callable[[LiveEndpoint], None] = lambda live: None
        self.on_out: Callable[[LiveEndpoint], None] = lambda live: None
        self.ask_health: Callable[[LiveEndpoint], Awaitable[bool | None]] = _assume_healthy
        self.news: News | None = None
        self._metrics = metrics
        self._looked_up = metrics.prefix_lookup_tokens_total
        self._hits = metrics.prefix_hit_tokens_total
        self._limits = _health_limits(config)
        self._progress_s, self._ramp_s = config.health.progress, config.health.slow_start
        self.speeds = SpeedMonitor(SlowLimits(config.health.slow_factor))
        self._registry = Roster(write_queue)
        self._by_slot = self._registry.by_slot
        self.found = self._registry.found
        self._pools: Mapping[str, tuple[Candidate, ...]] = {}

    def plan(self, config: Config) -> Adoption:
        """Compute what `config` would make of the table. Changes nothing."""
        return self._registry.plan(config)

    def adopt(self, plan: Adoption) -> Moves:
        """Apply a plan.

        Removed endpoints stay until release(): older requests may still use them.
        """
        config = plan.config
        capacities = {id(member.live): member.live.spec.kv_tokens for member in plan.members}
        changes = self._registry.take(plan)
        self._limits, self._progress_s = _health_limits(config), config.health.progress
        self._ramp_s = config.health.slow_start
        self.speeds.limits = SlowLimits(config.health.slow_factor)
        self._pools = plan.pools
        added = {id(live) for live in changes.came}
        for member in plan.members:
            live, kv_tokens = member.live, member.spec.kv_tokens
            is_changed = id(live) in added or kv_tokens != capacities[id(live)]
            if kv_tokens is not None and is_changed:
                self.prefixes.index.set_capacity(live.load.slot, kv_tokens)
                live.load.kv_tokens = kv_tokens
            self._attach_gauges(live)
        for pool in plan.pools:
            self._update_availability(pool)
        return changes

    def _attach_gauges(self, live: LiveEndpoint) -> None:
        load, name, metrics = live.load, live.endpoint.name, self._metrics
        metrics.inflight.labels(name).follow(lambda: float(load.in_flight - load.others.in_flight))
        metrics.endpoint_up.labels(name).follow(lambda: float(load.available))
        metrics.endpoint_slowness.labels(name).follow(
            lambda: 0.0 if live.speed.slowness is None else live.speed.slowness.ratio
        )
        metrics.inside.follow(live, monotonic)

    def believe(self, pool: str, is_enabled: bool) -> None:
        """Turn latency predictions for a pool on or off: not every policy reads them."""
        for candidate in self._pools[pool]:
            ledger.believe(candidate.load, is_enabled, monotonic())

    def release(self, live: LiveEndpoint) -> None:
        """Release an endpoint that left the configuration: close its connections, free its slot.

        No-op if it has been re-added.
        """
        if not live.leaving:
            return
        live.load.available = False
        live.upstream.close()
        self.prefixes.index.forget(live.load.slot)
        self.prefixes.index.set_capacity(live.load.slot, None)
        self._registry.release(live)

    def forget_name(self, name: str) -> bool:
        """Drop the metric series of an unused endpoint name.

        Returns False if an endpoint has the name.
        """
        if name in {live.endpoint.name for live in self.all() if not live.leaving}:
            return False
        self._metrics.forget_endpoint(name)
        return True

    def all(self) -> tuple[LiveEndpoint, ...]:
        """Return all endpoints, including those that are leaving."""
        return self._registry.all()

    # Routing

    def ask(self, request: Request, fingerprint: Fingerprint | None, tried: Sequence[str]) -> Ask:
        """Build the routing query of a request, with the believed cached tokens per endpoint."""
        cached: Sequence[int] = ()
        if fingerprint is not None:
            cached = self.prefixes.cached(fingerprint, request.prompt_tokens)
        return Ask(request, monotonic(), self.rng, cached, frozenset(tried), fingerprint)

    def book(self, pick: Pick, request: Request, fingerprint: Fingerprint | None) -> Booking:
        """Book the picked endpoint and record its prompt in the prefix index."""
        live: LiveEndpoint = self._by_slot[pick.candidate.load.slot]
        if fingerprint is not None:
            self._looked_up.value += request.prompt_tokens
            self._hits.value += pick.cached_tokens
            live.sent_tokens += request.prompt_tokens
            live.hit_tokens += pick.cached_tokens
            self._learn_pick(fingerprint, pick, request)
        return Booking(self, live, pick, request, fingerprint)

    def reserve(self, pick: Pick, request: Request, fingerprint: Fingerprint | None) -> Reservation:
        """Reserve an endpoint for decoding a prompt that another endpoint prefills."""
        slot = pick.candidate.load.slot
        if fingerprint is not None:
            self._learn_pick(fingerprint, pick, request)
        return Reservation(self, self._by_slot[slot], pick, request, fingerprint)

    def _learn_pick(self, fingerprint: Fingerprint, pick: Pick, request: Request) -> None:
        candidate = pick.candidate
        self.learn(fingerprint, candidate.load, request.prompt_tokens)
        if self.news is not None:
            prompt = (fingerprint, candidate.endpoint, request.prompt_tokens, None)
            self.news.prompts.append(prompt)

    def learn(self, fingerprint: Fingerprint, load: EndpointLoad, prompt_tokens: int) -> None:
        """Record in the prefix index that a prompt was sent to the endpoint."""
        self.prefixes.index.insert(fingerprint, load.slot, prompt_tokens)
        self._update_index_figures(load)

    def _update_index_figures(self, load: EndpointLoad) -> None:
        index = self.prefixes.index
        load.held_tokens, load.regret = index.held_tokens(load.slot), index.regret(load.slot)

    def learn_elsewhere(
        self, keys: Keys, load: EndpointLoad, tokens_per_block: float, cached_tokens: int | None
    ) -> None:
        """Record a prompt that another gateway sent to the endpoint, given its sampled block keys.

        cached_tokens  None for a sent prompt; else the prompt was not computed, and this many of
                       its tokens at most are cached there
        """
        index = self.prefixes.index
        if cached_tokens is None:
            index.insert_rungs(keys, load.slot, tokens_per_block)
            self._update_index_figures(load)
        else:
            index.trim_rungs(keys, load.slot, cached_tokens, tokens_per_block)

    def unlearn(
        self,
        fingerprint: Fingerprint,
        live: LiveEndpoint,
        cached_tokens: int,
        prompt_tokens: int,
    ) -> None:
        """Undo learn_prompt() for a prompt that was never computed.

        cached_tokens  upper bound of the prompt tokens that stay recorded
        """
        self.prefixes.index.trim(fingerprint, live.load.slot, cached_tokens, prompt_tokens)
        if self.news is not None:
            self.news.prompts.append((fingerprint, live.endpoint, prompt_tokens, cached_tokens))

    def confirm(self, live: LiveEndpoint, believed: float, actual: float) -> None:
        """Compare the believed cached share of a prompt (0 to 1) with the reported share."""
        self.prefixes.index.confirm(live.load.slot, believed, actual)
        if self.news is not None:
            self.news.confirmed.append((live.endpoint, believed, actual))

    # Health events

    def broke(self, live: LiveEndpoint, error: UpstreamBroke) -> None:
        """Record that a request failed at the endpoint."""
        self._metrics.upstream_errors_total.labels(live.endpoint.name, error.kind).inc()
        if error.kind == MODEL_GONE:
            self.on_model_gone(live)
        self.happened(live, evidence(error))

    def probed(self, live: LiveEndpoint, status: int | None) -> None:
        """Record the HTTP status of a health probe; None if it was not answered.

        vLLM returns 503 when its engine is dead, which is also the case after the loss of one rank.
        """
        if status == 503:
            self.happened(live, Event.ENGINE_DEAD)
        elif status == 200:
            is_needed = self.is_needed(live)
            self.happened(live, Event.PROBE_OK_NEEDED if is_needed else Event.PROBE_OK)
        else:
            self.happened(live, Event.PROBE_FAILED)

    async def check(self, candidate: Candidate) -> bool | None:
        """Query an endpoint's /health: True if healthy, None if it did not answer."""
        return await self.ask_health(self._by_slot[candidate.load.slot])

    def is_needed(self, live: LiveEndpoint) -> bool:
        """Return whether no endpoint of the same pool and role is available."""
        pool = self._pools.get(live.endpoint.pool, ())
        role = live.endpoint.role
        return not any(peer.load.available for peer in pool if peer.endpoint.role is role)

    def refused(self, live: LiveEndpoint) -> None:
        """Eject an endpoint at once, because a probe found that nothing listens at its address."""
        self.happened(live, Event.CONNECT_FAILED)

    def patience_s(self, live: LiveEndpoint) -> float:
        """Return how long an endpoint with requests in flight may be silent before it is stalled."""
        prefill_s = live.backlog_tokens / PREFILL_TOKENS_PER_S
        return max(self._progress_s, PREFILL_MARGIN * prefill_s)

    def progressed(self, live: LiveEndpoint) -> None:
        """Record that the engine has generated a token for any request."""
        live.upstream.heard_at = monotonic()
        live.stalled = False

    def first_byte_s(self, slot: int, request: Request, tokens: int) -> float | None:
        """Predict the seconds to the first byte at the endpoint in `slot`; see SpeedMonitor."""
        return self.speeds.first_byte_s(self._by_slot[slot], request, tokens)

    def peer_of(self, live: LiveEndpoint) -> LiveEndpoint | None:
        """Find a healthy endpoint of the same pool and role, preferably of the same hardware."""
        candidates = self._pools.get(live.endpoint.pool, ())
        return well_peer(live, [self._by_slot[candidate.load.slot] for candidate in candidates])

    def wedged(self, live: LiveEndpoint) -> None:
        """Mark a silent endpoint as dead after a probe for one token failed (faults.md F09)."""
        live.stalled = True
        self.happened(live, Event.ENGINE_DEAD)

    def scraped(self, live: LiveEndpoint, reading: Reading) -> None:
        """Take over the load that the engine reported in a scrape."""
        load, now = live.load, monotonic()
        running, waiting = reading.running, reading.waiting
        ledger.scraped(load, running, waiting, reading.kv_usage, reading.kv_tokens, now)
        if reading.produced is not None and reading.produced != live.produced:
            live.produced = reading.produced
            live.upstream.heard_at = now
        live.kv_received_bytes = reading.kv_received_bytes
        if reading.kv_tokens is not None:
            self.prefixes.index.set_capacity(load.slot, reading.kv_tokens)

    def happened(self, live: LiveEndpoint, event: Event) -> None:
        """Advance the endpoint's health by one event and act on a change of state."""
        before = live.health
        after = health.advance(before, event, monotonic(), self.rng, self._limits)
        if after is before:
            return
        live.health = after
        live.load.is_proven = health.is_proven(after)
        if after.state is not before.state:
            self._on_state_change(live, before, after)
        elif health.is_unreachable(after) and not health.is_unreachable(before):
            self._update_availability(live.endpoint.pool)
            self.on_change()

    def _on_state_change(self, live: LiveEndpoint, before: Health, after: Health) -> None:
        name, cause = live.endpoint.name, after.cause or "new"
        log.warning("endpoint %s: %s -> %s (%s)", name, before.state, after.state, cause)
        if self.news is not None:
            self.news.moved.append((live.endpoint, str(after.state), str(after.cause or "")))
        if after.state in OUT:
            self._metrics.ejections_total.labels(name, str(after.cause)).inc()
            self.prefixes.index.forget(live.load.slot)
            live.load.held_tokens = live.load.regret = 0.0
        if after.state is health.State.DEAD:
            live.upstream.fail_all("ejected", "the engine is dead")
        if before.state in OUT and after.state not in OUT:
            self._on_return(live, before)
            self._begin_slow_start(live, monotonic())
        if live.leaving:
            # It is probed no longer, and it belongs to no pool whose last endpoint it could be.
            live.load.available = after.state in (health.State.UP, health.State.RETURNING)
        else:
            self._update_availability(live.endpoint.pool)
        self.on_change()
        if after.state in OUT:
            self.on_out(live)

    def _update_availability(self, pool: str) -> None:
        """Decide which endpoints of a pool may be picked, after a change of health or membership.

        Each role is judged separately: a prefill endpoint cannot replace a decode endpoint. A
        drained endpoint does not count as a replacement for any other.
        """
        by_role: dict[Role, list[LiveEndpoint]] = {}
        for candidate in self._pools.get(pool, ()):
            live = self._by_slot[candidate.load.slot]
            if live.drained:
                live.load.available = False
            else:
                by_role.setdefault(live.endpoint.role, []).append(live)
        for peers in by_role.values():
            verdicts = health.available([live.health for live in peers], self._limits)
            for live, is_available in zip(peers, verdicts, strict=True):
                live.load.available = is_available

    def drain(self, live: LiveEndpoint, wanted: bool) -> int:
        """Stop or resume routing to an endpoint; return its requests in flight."""
        if live.drained and not wanted:
            self._begin_slow_start(live, monotonic())
        live.drained = wanted
        self._update_availability(live.endpoint.pool)
        self.on_change()
        return live.load.in_flight

    def restore(self, live: LiveEndpoint, health: Health, *, drained: bool) -> None:
        """Take over health recorded by another process, unless a failure was seen since."""
        if live.health.state is HealthState.UP:
            live.health = health
        live.drained = drained
        self._update_availability(live.endpoint.pool)

    def drain_named(self, names: Collection[str]) -> None:
        """Drain the endpoints with these names before the first request."""
        for live in self.all():
            if live.endpoint.name in names:
                self.drain(live, wanted=True)

    def _begin_slow_start(self, live: LiveEndpoint, now: float) -> None:
        """Ramp the endpoint's concurrency up from a low cap, because its caches are cold."""
        live.warm_from = now
        live.load.ceiling = slow_start.ceiling(live.endpoint.max_concurrency, 0.0, self._ramp_s)

    def _raise_slow_start_cap(self, live: LiveEndpoint, started_at: float, now: float) -> None:
        cap = slow_start.ceiling(live.endpoint.max_concurrency, now - started_at, self._ramp_s)
        live.load.ceiling = cap
        if cap == NO_CEILING:
            live.warm_from = None

    def _on_return(self, live: LiveEndpoint, before: Health) -> None:
        """Replace the latency model of an endpoint ejected for slowness by a healthy peer's.

        What was learned while it was slow would keep latency-aware policies away from it for good.
        """
        peer = self.peer_of(live)
        if before.cause is Event.SLOW and peer is not None:
            state = saved_state.belief_state(peer.load.belief)
            saved_state.restore_belief(live.load.belief, state)
        live.speed.accept()

    def _on_speed(self, live: LiveEndpoint, verdict: Verdict, now: float) -> None:
        """Act on a new speed verdict: cap a suspect at one request, eject a slow endpoint."""
        name, slowness = live.endpoint.name, live.speed.slowness
        live.doubted_until = None
        if verdict is Verdict.NORMAL or slowness is None:
            log.warning("endpoint %s is as fast as its peers again", name)
            self._begin_slow_start(live, now)
            return
        live.warm_from, live.load.ceiling = None, stall.SUSPECT_CEILING
        log.warning("endpoint %s is %s: %s", name, verdict, describe(slowness))
        if verdict is Verdict.SLOW:
            live.speed.restart()
            self.happened(live, Event.SLOW)

    def doubt(self, live: LiveEndpoint) -> None:
        """Send the endpoint no request while others have room until its speed is reviewed.

        Afterwards it gets few until it was judged.
        """
        if not self.speeds.limits.factor:
            return
        if live.speed.verdict is Verdict.SUSPECT:
            live.load.ceiling = 0
        elif live.load.ceiling == NO_CEILING or live.doubted_until is not None:
            live.load.ceiling, live.doubted_until = 0, monotonic() + stall.DOUBT_S

    def glance(self, now: float) -> Sequence[LiveEndpoint]:
        """Return the endpoints whose current prefill step is late; doubt those that are very late."""
        stalled, doubtful = self.speeds.stalled(self._pools, self._by_slot, now)
        for live in doubtful:
            self.doubt(live)
        return stalled

    def sweep(self, now: float) -> None:
        """Review speeds, raise slow-start caps and check the deadlines of all connections."""
        for live, verdict in self.speeds.sweep(self._pools, self._by_slot, now):
            self._on_speed(live, verdict, now)
        is_reviewed = self.speeds.reviewed_at == now
        for live in self.all():
            if is_reviewed and live.load.ceiling == 0:
                live.load.ceiling = stall.SUSPECT_CEILING
            if live.doubted_until is not None and now >= live.doubted_until:
                ceiling = live.load.ceiling = stall.raised_ceiling(live.load.ceiling)
                live.doubted_until = None if ceiling == NO_CEILING else now + stall.RAMP_S
            if live.warm_from is not None:
                self._raise_slow_start_cap(live, live.warm_from, now)
            live.upstream.sweep(now)
            if live.health.state is health.State.DEAD:
                # Requests whose connection was still being opened when the engine died.
                live.upstream.fail_all("ejected", "the engine is dead")
            if live.upstream.silence_s(now) < 1.0:
                live.backlog_tokens = live.load.prefill_tokens

    def retire(self) -> None:
        """Stop routing to all endpoints, because the gateway is stopping."""
        for live in self.all():
            live.drained, live.load.available = True, False
        self.on_change()

    def give_up(self, *, at_once: bool = False) -> int:
        """Fail all running requests, because the gateway is stopping; return how many still run.

        immediately  fail streams in the middle of an event too; else they run on to its end
        """
        kind, message = STOPPED, "the gateway stops"
        if at_once:
            for live in self.all():
                live.upstream.fail_all(kind, message)
            return 0
        return sum(live.upstream.fail_at_seams(kind, message) for live in self.all())

    def close(self) -> None:
        for live in self.all():
            live.upstream.close()


async def _assume_healthy(_: LiveEndpoint) -> bool | None:
    """Stand in for health probes where no health checker runs."""
    return True


def _health_limits(config: Config) -> HealthLimits:
    spec = config.health
    return HealthLimits(
        failures_in_a_row=spec.failures, first_s=spec.backoff, longest_s=spec.backoff_max
    )
