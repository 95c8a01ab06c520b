"""Does the KV transfers of one vLLM worker, as instructed by the scheduler process.

TransferWorker finds the transfers of a request at the worker's KV agent, and reports when they end.
connector.py converts vLLM's objects, and handoff_scheduler.py decides what is transferred.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from kvtransfer.agent import Agent
from kvtransfer.engines.vllm.connector_counters import PendingCounts
from kvtransfer.engines.vllm.handoff_params import RankSource
from kvtransfer.engines.vllm.handoff_scheduler import LoadOrder, StepOrders
from kvtransfer.engines.vllm.prefill_parts import OfferOrder
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.layout.transfer_plan import source_ranks
from kvtransfer.protocol.outcomes import TransferOutcome
from kvtransfer.transfer.handles import Landing, Offer

log = logging.getLogger("penstock")

_UNUSED_BLOCKS, _UNUSED_TOKENS = (0,), 1


class FinishedTransfers(msgspec.Struct):
    """Requests whose KV transfers have ended since the last report.

    The engine may reuse their blocks.

    sent      requests whose offers have ended
    received  requests whose fetches have ended
    failed    those of `received` whose KV did not arrive and must be computed
    """

    sent: set[str] = msgspec.field(default_factory=set)
    received: set[str] = msgspec.field(default_factory=set)
    failed: set[str] = msgspec.field(default_factory=set)


class TransferWorker:
    """Begins and ends the KV transfers of one vLLM rank. All methods must be called on one thread.

    In each engine step, `prepare` is called before the computation. Afterwards `mark_computed` for
    each layer, `finish_step` and `execute` follow, in any order.
    """

    def __init__(self, agent: Agent, layout: KvLayout, rank: int, timeout_s: float) -> None:
        self._agent, self._layout, self._rank, self._timeout_s = agent, layout, rank, timeout_s
        self._offers: dict[str, list[Offer]] = {}
        self._ended: set[str] = set()
        self._computing: list[Offer] = []
        self._computed_layers = 0
        self._landings: dict[str, list[Landing]] = {}
        self._unstarted: set[str] = set()
        self.counts = PendingCounts()

    @property
    def is_idle(self) -> bool:
        return not (self._offers or self._ended or self._landings or self._unstarted)

    def is_offering(self, request: str) -> bool:
        """Return whether this worker still offers the KV of a request to another engine."""
        return request in self._offers

    def prepare(self, orders: StepOrders) -> None:
        """Begin and end offers of KV, as the scheduler has ordered. Call this before the step's
        computation.

        Offers of requests that have lost their blocks must end before other KV is written there.
        """
        if len(orders.members) > 1:
            own = self._agent.address
            self._agent.join_group([address for address in orders.members if address != own])
        self._ended.update(orders.ends)
        for request in orders.revokes:
            self._revoke(request)
        for name in orders.declines:
            self._agent.decline(name, "the prefill was aborted")
        self._computing, self._computed_layers = [], 0
        for offer in orders.offers:
            self._offer(offer)

    def _revoke(self, request: str) -> None:
        for offer in self._offers.get(request, ()):
            offer.revoke("the prefill was aborted")
        if request not in self._ended:
            # vLLM has taken its blocks back already, so their end is not reported.
            self._count_offers(self._offers.pop(request, []))

    def mark_computed(self, layer: int) -> None:
        """Allow the KV of a layer to be sent, because the step has computed it. Call it in order.

        A layer out of order, such as one of a draft model, is not sent before the end of the step.
        """
        if layer != self._computed_layers:
            return
        self._computed_layers += 1
        for offer in self._computing:
            offer.mark_ready(self._computed_layers)

    def finish_step(self) -> None:
        """Allow the KV of all layers of this engine step to be sent, because they are computed."""
        for offer in self._computing:
            offer.mark_ready(self._layout.layers)
        self._computing = []

    def execute(self, orders: StepOrders) -> None:
        """Begin and cancel fetches of KV, as the scheduler has ordered."""
        for load in orders.loads:
            self._load(load)
        for request in orders.cancels:
            for landing in self._landings.get(request, ()):
                landing.cancel("the request was aborted")
        for unused in orders.unused:
            self._release(unused.sources, unused)

    def _offer(self, order: OfferOrder) -> None:
        by_name = not order.nonces
        try:
            offer = self._agent.offer(
                order.name,
                order.blocks,
                order.tokens,
                ttl_s=order.ttl_s,
                ready_layers=None if order.is_computed else 0,
                public=by_name,
                nonce=None if by_name else order.nonces[self._rank],
            )
        except ValueError as error:
            # This happens, for example, if two requests have the same transfer id and prompt.
            log.warning("kv: request %s cannot be offered: %s", order.request, error)
            return
        for earlier in self._offers.setdefault(order.request, []):
            earlier.renew(order.ttl_s)
        self._offers[order.request].append(offer)
        if not order.is_computed:
            self._computing.append(offer)

    def _load(self, order: LoadOrder) -> None:
        landings = self._landings.setdefault(order.request, [])
        try:
            ranks = source_ranks(order.layout, self._layout, self._rank)
            landings += [self._fetch(order.sources[rank], order) for rank in ranks]
        except ValueError as error:
            log.warning("kv: the KV of request %s cannot be fetched: %s", order.request, error)
            self._unstarted.add(order.request)
            for landing in landings:
                landing.cancel("another part of the KV cannot be fetched")
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
        """Return the requests whose offers or fetches have ended since the last call."""
        finished = FinishedTransfers()
        for request in list(self._ended):
            offers = self._offers.get(request, [])
            if all(offer.outcome is not None for offer in offers):
                finished.sent.add(request)
                self._ended.discard(request)
                self._count_offers(self._offers.pop(request, []))
        for request, landings in list(self._landings.items()):
            outcomes = [landing.outcome for landing in landings]
            if None in outcomes:
                self._stop_with_a_failed_one(landings)
                continue
            del self._landings[request]
            finished.received.add(request)
            self._count_landings([end for end in outcomes if end is not None])
            failures = [end for end in outcomes if end is not None and not end.has_landed]
            if failures or request in self._unstarted:
                finished.failed.add(request)
                self._unstarted.discard(request)
            if failures:
                log.warning("kv: the KV of request %s was not received: %s", request, failures[0])
        return finished

    def _count_offers(self, offers: Sequence[Offer]) -> None:
        for offer in offers:
            has_landed = offer.outcome is not None and offer.outcome.has_landed
            self.counts.add("kv_ranks_sent" if has_landed else "kv_ranks_not_sent")

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
                    landing.cancel("the KV of another rank of this request was not received")
