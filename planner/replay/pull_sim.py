"""Simulates the gateway's part of pulls in a replay: decisions, and what it learns from them."""

from __future__ import annotations

from collections.abc import Sequence

from planner.replay.fleet_spec import FleetSpec
from planner.replay.gateway_sim import INDEX_BYTES
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_interfaces import FleetPort
from policies.policy_types import Policy
from policies.prefix.prefix_index import PrefixIndex
from policies.pricing.pull_decision import NOTHING_STORED, PullPricer, StoredTokens
from policies.pricing.transfer_time import TransferTimes
from policies.routing_types import Candidate, Pick, RoutingQuery


class PullSim:
    """Decides which requests pull the cached beginning of their prompt from another group."""

    # _in_memory: which prompts each group has in its GPUs or in the memory of its host, as believed
    # _in_all: the same, or on the disk of its host

    def __init__(self, fleet: FleetPort, policy: Policy, spec: FleetSpec) -> None:
        self._fleet = fleet
        self._transfers = TransferTimes() if spec.pulls else None
        store = max(group.store_times for group in fleet.groups)
        self._pricer = PullPricer(policy, spec.split, store)
        self._in_memory, self._in_all = PrefixIndex(INDEX_BYTES), PrefixIndex(INDEX_BYTES)
        for group in fleet.groups:
            memory, disk = group.stored_tokens
            for index, tokens in ((self._in_memory, memory), (self._in_all, memory + disk)):
                index.set_capacity(group.load.slot, group.capacity_tokens + tokens)

    def choose(
        self,
        now: float,
        inflight: InflightRequest,
        query: RoutingQuery,
        candidates: Sequence[Candidate],
        whole: Pick,
    ) -> Pick:
        """Return the cheapest pick with a pull, which then begins, or else `whole`."""
        self.withdraw(inflight)
        front = self._fleet.gateway
        began = front.clock()
        stored = self._stored(inflight)
        pull = self._pricer.decide(query, candidates, whole.score, self._transfers, stored)
        front.pick_s += front.clock() - began
        if pull is None:
            return whole
        inflight.pull = pull
        if pull.is_remote:
            inflight.pulled_from = self._fleet.groups[pull.source.load.slot]
            inflight.record.pulled_from = inflight.pulled_from.name
        inflight.transfer = self._pricer.begin(pull, self._transfers, now)
        return pull.pick

    def _stored(self, inflight: InflightRequest) -> StoredTokens:
        fingerprint, prompt = inflight.fingerprint, inflight.request.prompt_tokens
        if fingerprint is None:
            return NOTHING_STORED
        indexes = self._in_memory, self._in_all
        return StoredTokens(*(index.match(fingerprint, prompt) for index in indexes))

    def on_first_token(self, now: float, inflight: InflightRequest) -> None:
        """Learn from the first token of a pulled prompt how long the transfer took."""
        pull, transfer, prompt = inflight.pull, inflight.transfer, inflight.request.prompt_tokens
        if inflight.fingerprint is not None and inflight.group is not None:
            for index in (self._in_memory, self._in_all):
                index.insert(inflight.fingerprint, inflight.group.load.slot, prompt)
        if pull is None:
            return
        # Until its KV has arrived, the engine would compute the same prefix for other requests.
        self._fleet.gateway.learn(inflight.fingerprint, pull.pick, prompt)
        if transfer is not None and self._transfers is not None:
            self._pricer.end(pull, self._transfers, transfer, inflight.sent_s, now)
            inflight.transfer = None

    def withdraw(self, inflight: InflightRequest) -> None:
        """Forget the pull of a request that starts again or ends."""
        if inflight.pull is not None and inflight.transfer is not None:
            inflight.transfer.cancel()
            inflight.transfer = None
        inflight.pull = inflight.pulled_from = None
        inflight.record.pulled_from = ""
