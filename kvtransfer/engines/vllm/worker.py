"""The KV transfers of one vLLM worker, as ordered by the scheduler process.

TransferWorker keeps the transfer handles of an Agent by request and reports when they end.
connector.py converts vLLM's objects, and scheduler.py decides what is transferred.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from kvtransfer.agent import Agent
from kvtransfer.engines.vllm.counters import PendingCounts
from kvtransfer.engines.vllm.handoff import RankSource
from kvtransfer.engines.vllm.scheduler import LoadOrder, OfferOrder, StepOrders
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.reshard import source_ranks
from kvtransfer.protocol.outcomes import TransferOutcome
from kvtransfer.transfer.handles import Landing, Offer

log = logging.getLogger("penstock")

_UNUSED_BLOCKS, _UNUSED_TOKENS = (0,), 1


class FinishedTransfers(msgspec.Struct):
    """Requests whose KV transfers have ended since the last report. The engine owns their blocks
    again.

    sent      requests whose offers have ended
    received  requests whose fetches have ended
    failed    those of `received` whose KV did not arrive and must be computed
    """

    sent: set[str] = msgspec.field(default_factory=set)
    received: set[str] = msgspec.field(default_factory=set)
    failed: set[str] = msgspec.field(default_factory=set)


class TransferWorker:
    """The KV transfers of one vLLM rank; all methods are called on one thread."""

    def __init__(self, agent: Agent, layout: KvLayout, rank: int, timeout_s: float) -> None:
        self._agent, self._layout, self._rank, self._timeout_s = agent, layout, rank, timeout_s
        self._offers: dict[str, Offer] = {}
        self._landings: dict[str, list[Landing]] = {}
        self._unstarted: set[str] = set()
        self.counts = PendingCounts()

    @property
    def is_idle(self) -> bool:
        return not (self._offers or self._landings or self._unstarted)

    def is_offering(self, request: str) -> bool:
        """Return whether the KV of an ended request is still offered."""
        return request in self._offers

    def execute(self, orders: StepOrders) -> None:
        if len(orders.members) > 1:
            own = self._agent.address
            self._agent.join_group([address for address in orders.members if address != own])
        for offer in orders.offers:
            self._offer(offer)
        for load in orders.loads:
            self._load(load)
        for request in orders.cancels:
            for landing in self._landings.get(request, ()):
                landing.cancel("the request was aborted")
        for unused in orders.unused:
            self._release(unused.sources, unused)

    def _offer(self, order: OfferOrder) -> None:
        self._offers[order.request] = self._agent.offer(
            order.name,
            order.blocks,
            order.tokens,
            ttl_s=order.ttl_s,
            nonce=order.nonces[self._rank],
        )

    def _load(self, order: LoadOrder) -> None:
        try:
            ranks = source_ranks(order.layout, self._layout, self._rank)
            self._landings[order.request] = [
                self._fetch(order.sources[rank], order) for rank in ranks
            ]
        except ValueError as error:
            log.warning("kv: the KV of request %s cannot be fetched: %s", order.request, error)
            self._unstarted.add(order.request)
        self._release([order.sources[rank] for rank in self._unneeded(order.layout)], order)

    def _unneeded(self, source: KvLayout) -> list[int]:
        # Return the source ranks from which no rank fetches, because others have the same heads.
        ranks = range(self._layout.ranks)
        needed = {other for rank in ranks for other in source_ranks(source, self._layout, rank)}
        return [rank for rank in range(source.ranks) if rank not in needed]

    def _fetch(self, source: RankSource, order: LoadOrder) -> Landing:
        return self._agent.fetch(
            source.address,
            order.name,
            order.blocks,
            order.tokens,
            ticket=source.ticket,
            skip_tokens=order.skip,
            timeout_s=self._timeout_s,
        )

    def _release(self, sources: Sequence[RankSource], order: LoadOrder) -> None:
        # Let these sources free blocks that will not be fetched; only rank 0 does it.
        if self._rank:
            return
        for source in sources:
            landing = self._agent.fetch(
                source.address, order.name, _UNUSED_BLOCKS, _UNUSED_TOKENS, ticket=source.ticket
            )
            landing.cancel("the KV of this handoff is not needed")

    def take_finished(self) -> FinishedTransfers:
        """Return the KV transfers that have ended since the last call, each once."""
        finished = FinishedTransfers(received=set(self._unstarted), failed=set(self._unstarted))
        self._unstarted.clear()
        for request, offer in list(self._offers.items()):
            if offer.outcome is not None:
                finished.sent.add(request)
                self.counts.add(
                    "kv_ranks_sent" if offer.outcome.has_landed else "kv_ranks_not_sent"
                )
                del self._offers[request]
        for request, landings in list(self._landings.items()):
            outcomes = [landing.outcome for landing in landings]
            if None in outcomes:
                self._stop_with_a_failed_one(landings)
                continue
            del self._landings[request]
            finished.received.add(request)
            self._count_landings([end for end in outcomes if end is not None])
            failures = [end for end in outcomes if end is not None and not end.has_landed]
            if failures:
                finished.failed.add(request)
                log.warning("kv: the KV of request %s was not received: %s", request, failures[0])
        return finished

    def _count_landings(self, outcomes: Sequence[TransferOutcome]) -> None:
        for end in outcomes:
            self.counts.add("kv_ranks_received" if end.has_landed else "kv_ranks_not_received")
            self.counts.add("kv_receive_seconds", end.seconds)
            if end.has_landed:
                self.counts.add("kv_received_bytes", end.n_bytes)

    @staticmethod
    def _stop_with_a_failed_one(landings: list[Landing]) -> None:
        if any(landing.outcome and not landing.outcome.has_landed for landing in landings):
            for landing in landings:
                if landing.outcome is None:
                    landing.cancel("another rank's KV was not received")
