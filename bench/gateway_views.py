"""Simulates several gateways in front of one fleet: each knows the others' requests later.

Each gateway has its own policy, prefix index, reservations, learned speeds and scrapes. It knows
its own requests immediately. It receives those of the others after a delay, by the functions that
real gateways use. There is no network and no process; `make gateways` tests those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from time import perf_counter
from typing import Any

import msgspec

from mockgpu.scheduler import Job
from planner.replay.engine_sim import EngineMetrics
from planner.replay.fleet_sim import Fleet
from planner.replay.fleet_spec import FleetSpec
from planner.replay.gateway_sim import GatewaySim
from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_options import ReplayOptions
from planner.replay.results import ReplayRun
from planner.replay.traffic import Traffic
from policies import scraped_load
from policies.engine.peer_load import NOTHING, PeerShare
from policies.load_ledger import own_load, set_peer_load
from policies.policy_types import Policy
from policies.prefix.fingerprint import Fingerprint
from policies.routing_types import Candidate, Pick

FLUSH_SPREAD = 0.2
"""Random part of the time between two messages, as a share of it, as in gateway/peers."""


class ViewDelays(msgspec.Struct, frozen=True):
    """The delays, in seconds, of a gateway's information on other gateways and on engines.

    flush_s       time for which a gateway collects its news before it sends them; None: gateways
                  send each other nothing
    transit_s     time that a message takes from one gateway to the others
    scrape_s      time between two scrapes of an engine; None: there are no scrapes
    scrape_age_s  age of the metrics when they reach the gateway
    """

    flush_s: float | None = 0.075
    transit_s: float = 0.0
    scrape_s: float | None = None
    scrape_age_s: float = 0.0


class PeerNews(msgspec.Struct, frozen=True):
    """What one gateway sends to the others in one message.

    prompts  (fingerprint, slot of the group, prompt tokens) of each prompt that it sent to a group
    reports  (slot, share of a prompt that was expected to be cached, share that was cached)
    shares   the load that it has reserved at each group, by slot; only loads that have changed
    """

    prompts: list[tuple[Fingerprint, int, int]]
    reports: list[tuple[int, float, float]]
    shares: list[tuple[int, PeerShare]]


class GatewayView:
    """One of several simulated gateways, and what it has not yet sent to the others.

    name   name by which the others record this gateway's load
    loads  what this gateway knows of the load of each group, by slot
    """

    def __init__(self, name: bytes, gateway: GatewaySim) -> None:
        self.name, self.gateway = name, gateway
        self.loads = [candidate.load for candidate in gateway.candidates]
        self._prompts: list[tuple[Fingerprint, int, int]] = []
        self._reports: list[tuple[int, float, float]] = []
        self._sent = [NOTHING] * len(self.loads)

    def on_sent(self, flight: InflightRequest, slot: int) -> None:
        """Record that this gateway sent a prompt to a group."""
        if flight.fingerprint is not None:
            self._prompts.append((flight.fingerprint, slot, flight.request.prompt_tokens))

    def on_answered(self, slot: int, believed: float, actual: float) -> None:
        """Record the share of a prompt that was expected to be cached, and the share that was."""
        self._reports.append((slot, believed, actual))

    def take_news(self) -> PeerNews:
        """Return this gateway's news since the last call."""
        shares = []
        for slot, load in enumerate(self.loads):
            share = own_load(load)
            if share != self._sent[slot]:
                self._sent[slot] = share
                shares.append((slot, share))
        news = PeerNews(self._prompts, self._reports, shares)
        self._prompts, self._reports = [], []
        return news

    def learn(self, sender: bytes, news: PeerNews, now: float) -> None:
        """Apply the news that another gateway has sent."""
        index = self.gateway.index
        for fingerprint, slot, prompt_tokens in news.prompts:
            load = self.loads[slot]
            index.insert(fingerprint, slot, prompt_tokens)
            load.prefix_cache_tokens = index.cached_tokens(slot)
            load.eviction_regret = index.eviction_regret(slot)
            load.mark_changed()
        for slot, believed, actual in news.reports:
            index.confirm(slot, believed, actual)
        for slot, share in news.shares:
            set_peer_load(self.loads[slot], sender, share, now)


class SeveralGateways(Fleet):
    """A replay in which each request arrives at one of several gateways, chosen at random."""

    def __init__(
        self,
        spec: FleetSpec,
        traffic: Traffic,
        create_policy: Callable[[], Policy],
        options: ReplayOptions,
        count: int,
        delays: ViewDelays,
    ) -> None:
        """Create a replay with `count` gateways; `delays` replaces the options' scrapes."""
        options = msgspec.structs.replace(options, scrape_s=None)
        super().__init__(spec, traffic, create_policy(), None, options)
        self._delays = delays
        self._choices, self._times = Random(f"balancer {options.seed}"), Random(options.seed)
        others = [self._create_gateway(number, create_policy()) for number in range(1, count)]
        self._views = [
            GatewayView(b"%d" % number, gateway)
            for number, gateway in enumerate((self.gateway, *others))
        ]
        self._view_of_request: list[GatewayView] = []
        self._schedule_news()

    def _create_gateway(self, number: int, policy: Policy) -> GatewaySim:
        # Create a further gateway, which has own beliefs about each group.
        own = [group.candidate for group in self.groups]
        loads = deepcopy([candidate.load for candidate in own])  # one call, as they share lengths
        for group, load in zip(self.groups, loads, strict=True):
            group.candidate = Candidate(group.candidate.endpoint, load)
        clock = perf_counter
        gateway = GatewaySim(policy, self.groups, self.options, self._spec.block_tokens, clock)
        gateway.rng = Random(f"gateway {number} {self.options.seed}")
        for group, candidate in zip(self.groups, own, strict=True):
            group.candidate = candidate
        return gateway

    def _schedule_news(self) -> None:
        delays, rng = self._delays, self._times
        for view in self._views:
            if delays.flush_s is not None and len(self._views) > 1:
                self.schedule(delays.flush_s * rng.random(), self._flush, view)
            if delays.scrape_s is not None:
                for group in self.groups:
                    self.schedule(delays.scrape_s * rng.random(), self._scrape, (view, group))

    # Requests

    def _arrive(self, now: float, event: Any) -> None:
        self._view_of_request.append(self._choices.choice(self._views))
        self._select_view(self.arrived)
        super()._arrive(now, event)

    def _select_view(self, number: int) -> GatewayView:
        # Let the gateway of this request decide and learn from now on.
        view = self._view_of_request[number]
        self.gateway = view.gateway
        return view

    def start(self, now: float, inflight: InflightRequest, group: ReplayGroup, pick: Pick) -> None:
        group.load = pick.candidate.load  # what the picking gateway knows
        super().start(now, inflight, group, pick)

    def send(
        self, now: float, inflight: InflightRequest, group: ReplayGroup, pick: Pick, job: Job
    ) -> None:
        super().send(now, inflight, group, pick, job)
        self._view_of_request[inflight.record.number].on_sent(inflight, group.load.slot)

    def on_last_token(self, group: ReplayGroup, job: Job, now: float) -> None:
        inflight = self.inflight[job]
        view = self._select_view(inflight.record.number)
        super().on_last_token(group, job, now)
        if inflight.fingerprint is not None:
            believed = min(1.0, inflight.believed_tokens / job.prompt_tokens)
            view.on_answered(group.load.slot, believed, job.cached / job.prompt_tokens)

    # Messages and scrapes

    def _flush(self, now: float, view: GatewayView) -> None:
        self.schedule(now + self._delays.transit_s, self._deliver, (view, view.take_news()))
        if self.running_requests and self._delays.flush_s is not None:
            spread = self._times.uniform(1 - FLUSH_SPREAD, 1 + FLUSH_SPREAD)
            self.schedule(now + self._delays.flush_s * spread, self._flush, view)

    def _deliver(self, now: float, message: tuple[GatewayView, PeerNews]) -> None:
        sender, news = message
        for view in self._views:
            if view is not sender:
                view.learn(sender.name, news, now)

    def _scrape(self, now: float, what: tuple[GatewayView, ReplayGroup]) -> None:
        view, group = what
        reading = view, group, group.engine.metrics
        if self._delays.scrape_age_s:
            self.schedule(now + self._delays.scrape_age_s, self._on_scraped, reading)
        else:
            self._on_scraped(now, reading)
        if self.running_requests and self._delays.scrape_s is not None:
            self.schedule(now + self._delays.scrape_s, self._scrape, what)

    def _on_scraped(
        self, now: float, reading: tuple[GatewayView, ReplayGroup, EngineMetrics]
    ) -> None:
        view, group, metrics = reading
        load = view.loads[group.load.slot]
        scraped_load.record_scrape(load, *metrics, group.capacity_tokens, now)

    def _report(self, wall_s: float) -> ReplayRun:
        run = super()._report(wall_s)
        gateways: Sequence[GatewaySim] = [view.gateway for view in self._views]
        run.picks = sum(gateway.picks for gateway in gateways)
        run.pick_s = sum(gateway.pick_s for gateway in gateways)
        return run
