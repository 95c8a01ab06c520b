"""Runs several gateways that exchange their state without a network, on the test's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from random import Random

from gateway.admission.admission_controller import AdmissionController
from gateway.config import Config
from gateway.fleet.endpoint_load_and_health import EndpointTable, set_beliefs_steps
from gateway.fleet.prefix_cache_view import PrefixCacheView
from gateway.http.write_queue import WriteQueue
from gateway.metrics.catalogue import Metrics
from gateway.peers.frame_auth import FrameAuth
from gateway.peers.state_exchange import Frame, PeerView
from gateway.reload.snapshot_plan import build_plan
from gateway.util.work_in_turns import run_at_once
from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.routing_types import Candidate, Pick, Request, RoutingQuery

SECRET = b"a secret of sixteen bytes or more"
BLOCK_BYTES = 64


class Gateway:
    def __init__(
        self,
        me: int,
        secret: bytes = SECRET,
        tenants: Sequence[Mapping[str, object]] = (),
        other_secret: bytes | None = None,
        stable_secret: bytes | None = None,
    ) -> None:
        endpoints = [
            {"url": url, "kv_tokens": 1_000_000, "max_concurrency": 8}
            for url in ("http://a:1", "http://b:1")
        ]
        pool = {
            "policy": "prefix_aware",
            "admission": "priced" if tenants else "cap",
            "endpoints": endpoints,
        }
        self.config = Config.model_validate(
            {"version": 1, "pools": {"main": pool}, "tenants": tenants}
        )
        self.metrics = Metrics()
        self.seal = FrameAuth(secret, bytes([me]) * 8, other_secret, stable_secret)
        self.prefixes = PrefixCacheView(self.seal.fingerprint_secret, 1 << 24, BLOCK_BYTES)
        self.gate = AdmissionController(self.config)
        outbox = WriteQueue(asyncio.get_running_loop())
        self.table = EndpointTable(self.config, self.prefixes, self.metrics, Random(me), outbox)
        plan = build_plan(self.config, self.table, self.gate)
        self.table.apply(plan.adoption)
        run_at_once(set_beliefs_steps(plan.adoption.pools["main"], is_enabled=True))
        for pool_name, admission_plan in plan.admissions.items():
            self.gate.add_queue(admission_plan.queue)
            admission_plan.queue.set_admission(admission_plan.admission, admission_plan.shares)
            admission_plan.queue.configure(
                self.config.pools[pool_name].waiting_room, admission_plan.serving
            )
        self.candidates: Sequence[Candidate] = plan.adoption.pools["main"]
        self.view = PeerView(self.seal, self.table, self.gate, self.metrics, BLOCK_BYTES, 1 << 20)
        self.table.publish_to_peers(self.view.updates)
        self.view.tenants = lambda: self.config.tenants
        self.gate.publish_to_peers(self.view.updates)
        self.hashes = Fingerprinter(self.seal.fingerprint_secret, BLOCK_BYTES)

    def fingerprint(self, prompt: bytes) -> Fingerprint:
        return self.hashes.fingerprint(b"salt", prompt)

    def reserve(self, prompt: bytes, slot: int):
        candidate = self.candidates[slot]
        tokens = len(prompt) // 4
        request = Request("r", "m", "", tokens, 10, stream=True)
        return self.table.reserve(Pick(candidate, 0, 0.0, 1, ""), request, self.fingerprint(prompt))

    def cached(self, prompt: bytes) -> list[int]:
        matches = list(self.prefixes.cached_tokens(self.fingerprint(prompt), len(prompt) // 4))
        return matches + [0] * (len(self.candidates) - len(matches))

    def ask(self, prompt: bytes) -> RoutingQuery:
        return self.table.build_query(
            Request("r", "m", "", len(prompt) // 4, 10), self.fingerprint(prompt), ()
        )

    def take(self, frame: Frame, now: float, age_s: float = 0.0) -> None:
        for _ in self.view.apply_frame(frame[1], age_s, now):
            pass

    def settle(self, now: float) -> None:
        for _ in self.view.finish_warm_up(now):
            pass

    def dropped(self) -> dict[str, float]:
        return {
            values[0]: meter.value for values, meter in self.metrics.shared_dropped_total.children()
        }


def turn(gateways: Sequence[Gateway], now: float) -> list[tuple[Gateway, Frame]]:
    # Flush all gateways and deliver all frames; return them as (sender, frame).
    #
    # New gateways receive the state of the others.
    frames = [
        (gateway, frame)
        for gateway in gateways
        for frame in gateway.view.outgoing_frames(now, is_connected=True)
    ]
    for item, frame in frames:
        for other in gateways:
            if other is not item:
                other.take(frame, now)
    for item in gateways:
        askers, item.view.new_peers = item.view.new_peers, []
        for asker in askers:
            parts = [(item, frame) for frame in item.view.warm_up_frames(asker, now)]
            frames += parts
            for _, frame in parts:
                for other in gateways:
                    if other is not item:
                        other.take(frame, now)
        item.view.expire_peers(now)
        item.settle(now)
    return frames


def run(gateways: Sequence[Gateway], start: float, seconds: float) -> float:
    # Let the gateways exchange frames ten times a second for `seconds`; return the end time.
    now = start
    while now < start + seconds:
        now += 0.1
        turn(gateways, now)
    return now


def warm(*gateways: Gateway, now: float = 100.0) -> float:
    for gateway in gateways:
        gateway.view.start(now)
    return run(gateways, now, 2.0)
