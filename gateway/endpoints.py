"""The endpoint table: every TP group with its live load, health and connections. The only writer of EndpointLoad.

Decisions about health are policies.health's; here its events are gathered and its verdicts carried out.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from random import Random
from time import monotonic

from gateway.booking import Booking, Reservation
from gateway.config import Config
from gateway.metrics import Metrics
from gateway.outbox import Outbox
from gateway.prefixes import Prefixes
from gateway.roster import Adoption, LiveEndpoint, Moves, Roster
from gateway.shared.news import News
from gateway.speed_monitor import SpeedMonitor, describe, well_peer
from gateway.upstream_error import MODEL_GONE, STOPPED, UpstreamBroke, evidence
from gateway.watch.scrape import Reading
from policies import health, ledger, saved_state, warmup
from policies.fingerprint import Fingerprint
from policies.health import Event, Health, HealthLimits
from policies.health import State as HealthState
from policies.model import NO_CEILING, Ask, Candidate, EndpointLoad, Pick, Request, Role
from policies.outlier import SlowLimits
from policies.rungs import Keys
from policies.speed_record import Verdict

log = logging.getLogger("penstock")

# A wedged engine answers nothing and says it is well. One that computes a long prompt is silent too, so silence counts
# only beyond thrice the time that its backlog takes at this rate, slow for a TP group of today (perfmodel.md 3.5).
PREFILL_TOKENS_PER_S = 10_000
PREFILL_MARGIN = 3


SUSPECT_CEILING = 1  # requests at once for an endpoint that seems slow, while others have room
DOUBT_S = 2.0  # two reviews of its speed
OUT = (health.State.EJECTED, health.State.DEAD)


class EndpointTable:
    """Live endpoints by slot.

    on_change  called when an endpoint's availability has changed
    on_model_gone  called with an endpoint that does not have a model that it listed
    on_out     called with an endpoint that was ejected or found dead
    ask_health asks an endpoint whether it is well; None: it was silent
    """

    __slots__ = (
        *("_by_slot", "_hits", "_limits", "_looked_up", "_metrics", "_pools", "_progress_s"),
        *("_ramp_s", "_roster", "ask_health", "found", "news", "on_change", "on_model_gone", "on_out"),
        *("prefixes", "rng", "speeds"),
    )

    def __init__(self, config: Config, prefixes: Prefixes, metrics: Metrics, rng: Random, outbox: Outbox) -> None:
        self.prefixes = prefixes
        self.rng = rng
        self.on_change: Callable[[], None] = lambda: None
        self.on_model_gone: Callable[[LiveEndpoint], None] = lambda live: None
        self.on_out: Callable[[LiveEndpoint], None] = lambda live: None
        self.ask_health: Callable[[LiveEndpoint], Awaitable[bool | None]] = _believe_well
        self.news: News | None = None
        self._metrics = metrics
        self._looked_up, self._hits = metrics.prefix_lookup_tokens_total, metrics.prefix_hit_tokens_total
        self._limits = _health_limits(config)
        self._progress_s, self._ramp_s = config.health.progress, config.health.slow_start
        self.speeds = SpeedMonitor(SlowLimits(config.health.slow_factor))
        self._roster = Roster(outbox)
        self._by_slot = self._roster.by_slot
        self.found = self._roster.found
        self._pools: Mapping[str, tuple[Candidate, ...]] = {}

    def plan(self, config: Config) -> Adoption:
        """What `config` would make of the table. Changes nothing."""
        return self._roster.plan(config)

    def adopt(self, adoption: Adoption) -> Moves:
        """Carry a plan out. Those who left stay until release(): requests of an older configuration may be there."""
        config = adoption.config
        capacities = {id(member.live): member.live.spec.kv_tokens for member in adoption.members}
        moves = self._roster.take(adoption)
        self._limits, self._progress_s = _health_limits(config), config.health.progress
        self._ramp_s = config.health.slow_start
        self.speeds.limits = SlowLimits(config.health.slow_factor)
        self._pools = adoption.pools
        new = {id(live) for live in moves.came}
        for member in adoption.members:
            live, kv_tokens = member.live, member.spec.kv_tokens
            if kv_tokens is not None and (id(live) in new or kv_tokens != capacities[id(live)]):
                self.prefixes.index.set_capacity(live.load.slot, kv_tokens)
                live.load.kv_tokens = kv_tokens
            self._follow(live)
        for pool in adoption.pools:
            self._judge(pool)
        return moves

    def _follow(self, live: LiveEndpoint) -> None:
        load, name = live.load, live.endpoint.name
        self._metrics.inflight.labels(name).follow(lambda: float(load.in_flight - load.others.in_flight))
        self._metrics.endpoint_up.labels(name).follow(lambda: float(load.available))
        self._metrics.endpoint_slowness.labels(name).follow(
            lambda: 0.0 if live.speed.slowness is None else live.speed.slowness.ratio
        )
        self._metrics.inside.follow(live)

    def believe(self, pool: str, believed: bool) -> None:
        """Whether somebody reads beliefs about the pool's endpoints: only then is anything predicted there."""
        for candidate in self._pools[pool]:
            ledger.believe(candidate.load, believed, monotonic())

    def release(self, live: LiveEndpoint) -> None:
        """Nobody can ask for one who left any more: its connections end and its slot is free. Not if it came back."""
        if not live.leaving:
            return
        live.load.available = False
        live.upstream.close()
        self.prefixes.index.forget(live.load.slot)
        self.prefixes.index.set_capacity(live.load.slot, None)
        self._roster.release(live)

    def forget_name(self, name: str) -> bool:
        """Drop the series of an endpoint that is called otherwise now, or gone. False if another has the name."""
        if name in {live.endpoint.name for live in self.all() if not live.leaving}:
            return False
        self._metrics.forget_endpoint(name)
        return True

    def all(self) -> tuple[LiveEndpoint, ...]:
        """Everybody, those who are leaving included."""
        return self._roster.all()

    # Routing

    def ask(self, request: Request, fingerprint: Fingerprint | None, tried: Sequence[str]) -> Ask:
        """The routing question for a request, with what every endpoint is believed to hold of its prompt."""
        cached = () if fingerprint is None else self.prefixes.cached(fingerprint, request.prompt_tokens)
        return Ask(request, monotonic(), self.rng, cached, frozenset(tried), fingerprint)

    def book(self, pick: Pick, request: Request, fingerprint: Fingerprint | None) -> Booking:
        """Take the picked place. Our own picks teach the index: the endpoint will hold this prompt soon."""
        live: LiveEndpoint = self._by_slot[pick.candidate.load.slot]
        if fingerprint is not None:
            self._looked_up.value += request.prompt_tokens
            self._hits.value += pick.cached_tokens
            live.sent_tokens += request.prompt_tokens
            live.hit_tokens += pick.cached_tokens
            self._learn(fingerprint, pick, request)
        return Booking(self, live, pick, request, fingerprint)

    def reserve(self, pick: Pick, request: Request, fingerprint: Fingerprint | None) -> Reservation:
        """Take a place for decoding what another endpoint prefills; it will hold the prompt as well."""
        slot = pick.candidate.load.slot
        if fingerprint is not None:
            self._learn(fingerprint, pick, request)
        return Reservation(self, self._by_slot[slot], pick, request, fingerprint)

    def _learn(self, fingerprint: Fingerprint, pick: Pick, request: Request) -> None:
        candidate = pick.candidate
        self.learn(fingerprint, candidate.load, request.prompt_tokens)
        if self.news is not None:
            self.news.prompts.append((fingerprint, candidate.endpoint, request.prompt_tokens, None))

    def learn(self, fingerprint: Fingerprint, load: EndpointLoad, prompt_tokens: int) -> None:
        """The endpoint was sent a prompt."""
        index = self.prefixes.index
        index.insert(fingerprint, load.slot, prompt_tokens)
        load.held_tokens, load.regret = index.held_tokens(load.slot), index.regret(load.slot)

    def learn_elsewhere(self, keys: Keys, load: EndpointLoad, tokens_per_block: float, kept: int | None) -> None:
        """Another gateway sent the endpoint a prompt, told by its keys (policies/rungs.py); of one that was never
        computed it holds `kept` tokens at most."""
        index = self.prefixes.index
        if kept is None:
            index.insert_rungs(keys, load.slot, tokens_per_block)
            load.held_tokens, load.regret = index.held_tokens(load.slot), index.regret(load.slot)
        else:
            index.trim_rungs(keys, load.slot, kept, tokens_per_block)

    def unlearn(self, fingerprint: Fingerprint, live: LiveEndpoint, kept_tokens: int, prompt_tokens: int) -> None:
        """A prompt of ours was never computed there."""
        self.prefixes.index.trim(fingerprint, live.load.slot, kept_tokens, prompt_tokens)
        if self.news is not None:
            self.news.prompts.append((fingerprint, live.endpoint, prompt_tokens, kept_tokens))

    def confirm(self, live: LiveEndpoint, believed: float, found: float) -> None:
        """An answer told what share of its prompt was cached; `believed` is what we took it to be."""
        self.prefixes.index.confirm(live.load.slot, believed, found)
        if self.news is not None:
            self.news.confirmed.append((live.endpoint, believed, found))

    # Evidence

    def broke(self, live: LiveEndpoint, broke: UpstreamBroke) -> None:
        """A request failed at the endpoint."""
        self._metrics.upstream_errors_total.labels(live.endpoint.name, broke.kind).inc()
        if broke.kind == MODEL_GONE:
            self.on_model_gone(live)
        self.happened(live, evidence(broke))

    def probed(self, live: LiveEndpoint, status: int | None) -> None:
        """An active probe came back, or not: None. 503 is vLLM's word for a dead engine: one rank lost is all lost."""
        if status == 503:
            self.happened(live, Event.ENGINE_DEAD)
        elif status == 200:
            self.happened(live, Event.PROBE_OK_NEEDED if self.is_needed(live) else Event.PROBE_OK)
        else:
            self.happened(live, Event.PROBE_FAILED)

    async def check(self, candidate: Candidate) -> bool | None:
        """Ask an endpoint for its health: whether it is well; None when it was silent."""
        return await self.ask_health(self._by_slot[candidate.load.slot])

    def is_needed(self, live: LiveEndpoint) -> bool:
        """Whether no endpoint of its pool and role is available."""
        pool = self._pools.get(live.endpoint.pool, ())
        role = live.endpoint.role
        return not any(each.load.available for each in pool if each.endpoint.role is role)

    def refused(self, live: LiveEndpoint) -> None:
        """A probe found no engine at the address: no statistic but a fact, which ejects at once."""
        self.happened(live, Event.CONNECT_FAILED)

    def patience_s(self, live: LiveEndpoint) -> float:
        """How long the endpoint may be silent with requests in flight before it counts as wedged."""
        return max(self._progress_s, PREFILL_MARGIN * live.backlog_tokens / PREFILL_TOKENS_PER_S)

    def progressed(self, live: LiveEndpoint) -> None:
        """The engine has generated something, whoever it was for."""
        live.upstream.heard_at = monotonic()
        live.stalled = False

    def first_byte_s(self, slot: int, request: Request, tokens: int) -> float | None:
        """As speed_monitor.first_byte_s, for the endpoint in a slot."""
        return self.speeds.first_byte_s(self._by_slot[slot], request, tokens)

    def peer_of(self, live: LiveEndpoint) -> LiveEndpoint | None:
        """A well endpoint of the same pool and role to compare it with; of its kind if there is one."""
        candidates = self._pools.get(live.endpoint.pool, ())
        return well_peer(live, [self._by_slot[candidate.load.slot] for candidate in candidates])

    def wedged(self, live: LiveEndpoint) -> None:
        """Silent for too long, and a request for one token was not answered either (faults.md F09)."""
        live.stalled = True
        self.happened(live, Event.ENGINE_DEAD)

    def scraped(self, live: LiveEndpoint, reading: Reading) -> None:
        load = live.load
        now = monotonic()
        ledger.scraped(load, reading.running, reading.waiting, reading.kv_usage, reading.kv_tokens, now)
        if reading.produced is not None and reading.produced != live.produced:
            live.produced = reading.produced
            live.upstream.heard_at = now
        live.kv_received_bytes = reading.kv_received_bytes
        if reading.kv_tokens is not None:
            self.prefixes.index.set_capacity(load.slot, reading.kv_tokens)

    def happened(self, live: LiveEndpoint, event: Event) -> None:
        before = live.health
        after = health.advance(before, event, monotonic(), self.rng, self._limits)
        if after is before:
            return
        live.health = after
        live.load.is_proven = health.is_proven(after)
        if after.state is not before.state:
            self._moved(live, before, after)
        elif health.is_unreachable(after) and not health.is_unreachable(before):
            self._judge(live.endpoint.pool)
            self.on_change()

    def _moved(self, live: LiveEndpoint, before: Health, after: Health) -> None:
        log.warning("endpoint %s: %s -> %s (%s)", live.endpoint.name, before.state, after.state, after.cause or "new")
        if self.news is not None:
            self.news.moved.append((live.endpoint, str(after.state), str(after.cause or "")))
        if after.state in OUT:
            self._metrics.ejections_total.labels(live.endpoint.name, str(after.cause)).inc()
            self.prefixes.index.forget(live.load.slot)
            live.load.held_tokens = live.load.regret = 0.0
        if after.state is health.State.DEAD:
            live.upstream.fail_all("ejected", "the engine is dead")
        if before.state in OUT and after.state not in OUT:
            self._on_return(live, before)
            self._warm(live, monotonic())
        if live.leaving:  # nobody probes it any more, and no pool is left that it could be the last of
            live.load.available = after.state in (health.State.UP, health.State.RETURNING)
        else:
            self._judge(live.endpoint.pool)
        self.on_change()
        if after.state in OUT:
            self.on_out(live)

    def _judge(self, pool: str) -> None:
        """Decide which endpoints of a pool may be asked, after a change of health or of members.

        Each role is judged for itself: prefill endpoints do not stand in for decode endpoints. A
        drained endpoint does not stand in for any other.
        """
        by_role: dict[Role, list[LiveEndpoint]] = {}
        for candidate in self._pools.get(pool, ()):
            member = self._by_slot[candidate.load.slot]
            if member.drained:
                member.load.available = False
            else:
                by_role.setdefault(member.endpoint.role, []).append(member)
        for members in by_role.values():
            verdicts = health.available([member.health for member in members], self._limits)
            for member, available in zip(members, verdicts, strict=True):
                member.load.available = available

    def drain(self, live: LiveEndpoint, wanted: bool) -> int:
        """An operator wants it to get nothing new, or to be asked again; how many requests it still has."""
        if live.drained and not wanted:
            self._warm(live, monotonic())
        live.drained = wanted
        self._judge(live.endpoint.pool)
        self.on_change()
        return live.load.in_flight

    def restore(self, live: LiveEndpoint, health: Health, *, drained: bool) -> None:
        """Take over what another process knew of the endpoint. What was found bad here in the meantime stays."""
        if live.health.state is HealthState.UP:
            live.health = health
        live.drained = drained
        self._judge(live.endpoint.pool)

    def drain_named(self, names: Collection[str]) -> None:
        """These are drained already, elsewhere; nobody has been asked yet."""
        for live in self.all():
            if live.endpoint.name in names:
                self.drain(live, wanted=True)

    def _warm(self, live: LiveEndpoint, now: float) -> None:
        """It begins to be asked, with an empty cache and nothing warmed up: others go first while they have room."""
        live.warm_from = now
        live.load.ceiling = warmup.ceiling(live.endpoint.max_concurrency, 0.0, self._ramp_s)

    def _warmer(self, live: LiveEndpoint, since: float, now: float) -> None:
        ceiling = live.load.ceiling = warmup.ceiling(live.endpoint.max_concurrency, now - since, self._ramp_s)
        if ceiling == NO_CEILING:
            live.warm_from = None

    def _on_return(self, live: LiveEndpoint, before: Health) -> None:
        """The endpoint is in rotation again. What was learned while it was slow is no longer true: it is believed to
        be as fast as a peer, or policies that read beliefs would never ask it."""
        peer = self.peer_of(live)
        if before.cause is Event.SLOW and peer is not None:
            saved_state.restore_belief(live.load.belief, saved_state.belief_state(peer.load.belief))
        live.speed.accept()

    def _on_speed(self, live: LiveEndpoint, verdict: Verdict, now: float) -> None:
        """The endpoint's speed was judged: first it gets few requests while others have room, then none."""
        name, slowness = live.endpoint.name, live.speed.slowness
        live.doubted_until = None
        if verdict is Verdict.NORMAL or slowness is None:
            log.warning("endpoint %s is as fast as its peers again", name)
            self._warm(live, now)
            return
        live.warm_from, live.load.ceiling = None, SUSPECT_CEILING
        log.warning("endpoint %s is %s: %s", name, verdict, describe(slowness))
        if verdict is Verdict.SLOW:
            live.speed.restart()
            self.happened(live, Event.SLOW)

    def doubt(self, live: LiveEndpoint) -> None:
        """Give the endpoint few requests while others have room, until its speed was reviewed."""
        if self.speeds.limits.factor and (live.load.ceiling == NO_CEILING or live.doubted_until is not None):
            live.load.ceiling, live.doubted_until = SUSPECT_CEILING, monotonic() + DOUBT_S

    def sweep(self, now: float) -> None:
        for live, verdict in self.speeds.sweep(self._pools, self._by_slot, now):
            self._on_speed(live, verdict, now)
        for live in self.all():
            if live.doubted_until is not None and now >= live.doubted_until:
                live.load.ceiling, live.doubted_until = NO_CEILING, None
            if live.warm_from is not None:
                self._warmer(live, live.warm_from, now)
            live.upstream.sweep(now)
            if live.health.state is health.State.DEAD:  # whoever was still connecting when it died
                live.upstream.fail_all("ejected", "the engine is dead")
            if live.upstream.silence_s(now) < 1.0:
                live.backlog_tokens = live.load.prefill_tokens

    def retire(self) -> None:
        """The gateway stops: nobody is asked any more, and whoever waits for a place hears of it."""
        for live in self.all():
            live.drained, live.load.available = True, False
        self.on_change()

    def give_up(self, *, at_once: bool = False) -> int:
        """Whoever is still served by an engine hears that the gateway stops; unless it must be `at_once`, those who are
        in the middle of an event do not yet: how many they are."""
        kind, message = STOPPED, "the gateway stops"
        if at_once:
            for live in self.all():
                live.upstream.fail_all(kind, message)
            return 0
        return sum(live.upstream.fail_at_seams(kind, message) for live in self.all())

    def close(self) -> None:
        for live in self.all():
            live.upstream.close()


async def _believe_well(_: LiveEndpoint) -> bool | None:
    """Without a watcher there is no probe."""
    return True


def _health_limits(config: Config) -> HealthLimits:
    spec = config.health
    return HealthLimits(failures_in_a_row=spec.failures, first_s=spec.backoff, longest_s=spec.backoff_max)
