"""Decisions about KV handoffs in vLLM's scheduler process, without vLLM's objects.

HandoffScheduler makes handoffs of finished prefills, checks those of incoming requests, and gives
the workers orders for each step. connector.py converts vLLM's objects, and worker.py executes the
orders.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from kvtransfer.engines.vllm.counters import PendingCounts
from kvtransfer.engines.vllm.handoff import (
    Handoff,
    HandoffRefused,
    RankSource,
    WorkerAddress,
    digest_prompt,
    open_handoff,
    seal_handoff,
)
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.protocol.ticket import mint_ahead

MEMBER = "kv_handoff"
"""The name of the member of kv_transfer_params that contains the handoff."""


class OfferOrder(msgspec.Struct, frozen=True):
    """An instruction to vLLM's workers to offer the KV of a completed prefill to other engines.

    ttl_s   duration of the offer's lease in seconds
    nonces  random identifiers of the tickets, one per rank
    """

    request: str
    name: str
    blocks: list[int]
    tokens: int
    ttl_s: float
    nonces: list[bytes]


class LoadOrder(msgspec.Struct, frozen=True):
    """An order to vLLM's workers to fetch the KV of a handoff into blocks of this engine.

    request  id of the request
    name     name of the offer
    blocks   numbers of the request's blocks
    tokens   number of prompt tokens that the offer has
    skip     number of tokens at the start that are not fetched
    layout   KV layout of the prefill engine
    sources  where to fetch the KV of each rank
    """

    request: str
    name: str
    blocks: list[int]
    tokens: int
    skip: int
    layout: KvLayout
    sources: list[RankSource]


class StepOrders(msgspec.Struct):
    """The orders of vLLM's scheduler to all workers for the KV transfers of one engine step.

    offers    completed prefills whose KV is to be offered
    loads     handoffs whose KV is to be fetched
    cancels   requests whose fetches are to be cancelled
    unused    handoffs that will not be fetched
    members   the addresses of all ranks' agents; sent only once
    has_work  whether the engine computes something in this step
    """

    offers: list[OfferOrder] = []
    loads: list[LoadOrder] = []
    cancels: list[str] = []
    unused: list[LoadOrder] = []
    members: list[str] = []
    has_work: bool = False


class PromptRequest(msgspec.Struct, frozen=True):
    """A request as vLLM's scheduler knows it; `params` are its kv_transfer_params."""

    id: str
    prompt: Sequence[int]
    params: dict[str, object]
    variant: str = ""


class HandoffScheduler:
    """Manages the KV handoffs of one engine, in vLLM's scheduler process.

    key      the fleet's shared secret
    engine   the engine's id
    family   string that must be equal at both engines of a handoff (model, weights, version)
    lease_s  seconds for which an offer is kept for its decode engine
    clock    the monotonic clock of this host
    warn     function that is called with one sentence for every handoff that is refused
    """

    def __init__(
        self,
        key: bytes,
        engine: str,
        family: str,
        *,
        lease_s: float,
        clock: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self._key, self._engine, self._family = key, engine, family
        self._layout: KvLayout | None = None
        self._lease_s, self._clock, self._warn = lease_s, clock, warn
        self._workers: list[WorkerAddress] = []
        self._orders = StepOrders()
        self._accepted: dict[str, Handoff] = {}
        self._used: set[str] = set()
        self._sending: set[str] = set()
        self._loading: set[str] = set()
        self.counts = PendingCounts()

    def set_workers(self, workers: Sequence[WorkerAddress], layout: KvLayout) -> None:
        """Set the KV agents of all ranks, in order of the ranks.

        Raises ValueError if the number of agents differs from the number of ranks.
        """
        if len(workers) != layout.ranks:
            raise ValueError(f"{len(workers)} of {layout.ranks} workers have a KV agent")
        self._workers, self._layout = list(workers), layout
        self._orders.members = [worker.address for worker in workers]

    @property
    def has_pending_work(self) -> bool:
        """Return whether KV blocks depend on a transfer, so that the engine must continue to run
        steps.
        """
        orders = self._orders
        return bool(
            self._sending or self._loading or orders.offers or orders.loads or orders.unused
        )

    def loadable_tokens(self, request: PromptRequest, computed: int) -> int:
        """Return the number of tokens beyond `computed` for which the request's handoff provides
        KV.

        A handoff provides none if it was used, forged, made for another prompt, or made by an
        engine of another kind. The engine then computes the prompt.
        """
        text = request.params.get(MEMBER)
        if text is None or request.id in self._used:
            return 0
        handoff = self._accepted.get(request.id)
        if handoff is None:
            try:
                handoff = self._checked(request, text)
            except HandoffRefused as refused:
                self._used.add(request.id)
                self.counts.add("kv_handoffs_refused")
                self._warn(f"request {request.id}: {refused}; the prompt is computed here")
                return 0
            self._accepted[request.id] = handoff
        return max(0, handoff.tokens - computed)

    def _checked(self, request: PromptRequest, text: object) -> Handoff:
        handoff = open_handoff(self._key, text)
        if self._layout is None:
            raise HandoffRefused("the workers of this engine have no KV agents yet")
        mismatch = self._layout.mismatch(handoff.layout)
        if handoff.family != self._family:
            mismatch = f"it is of {handoff.family}, and this is {self._family}"
        if mismatch is not None:
            # Agents that differ so do not link, so the source's blocks wait for its lease's end.
            raise HandoffRefused(mismatch)
        prompt = request.prompt[: handoff.tokens]
        if digest_prompt(prompt, request.variant) != handoff.prompt:
            raise HandoffRefused("the handoff was made for another prompt")
        return handoff

    def begin_load(self, request: str, blocks: Sequence[int], tokens: int) -> None:
        """Order the workers to load the KV of the last `tokens` tokens of a handoff into `blocks`.

        With 0 tokens, the KV is not needed. Does nothing for a request without a handoff, or when
        called again for the same request.
        """
        handoff = self._accepted.pop(request, None)
        if handoff is None:
            return
        self._used.add(request)
        order = _order(request, handoff, blocks, tokens)
        if tokens == 0:
            self.counts.add("kv_handoffs_cached")
            self._orders.unused.append(order)
            return
        self.counts.add("kv_handoffs_accepted")
        self._loading.add(request)
        self._orders.loads.append(order)

    def finish_prefill(
        self, request: PromptRequest, blocks: Sequence[int], tokens: int
    ) -> dict[str, object]:
        """Order the workers to offer a finished prefill's KV, and return its kv_transfer_params.

        The blocks belong to the offer until every worker reports its end. The other members are
        those of vLLM's own connectors, which gateways check.
        """
        assert self._layout is not None
        name = f"{request.id[:200]}/{secrets.token_hex(8)}"
        not_after = self._clock() + self._lease_s
        nonces = [secrets.token_bytes(16) for _ in self._workers]
        sources = [
            RankSource(
                worker.address,
                mint_ahead(self._key, name, worker.agent, worker.epoch, nonce, not_after),
            )
            for worker, nonce in zip(self._workers, nonces, strict=True)
        ]
        prompt = digest_prompt(request.prompt[:tokens], request.variant)
        handoff = Handoff(name, prompt, tokens, self._layout, self._family, sources)
        self._orders.offers.append(
            OfferOrder(request.id, name, list(blocks), tokens, self._lease_s, nonces)
        )
        self._sending.add(request.id)
        self.counts.add("kv_handoffs_offered")
        host, _, port = self._workers[0].address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(blocks)],
            "remote_engine_id": self._engine,
            "remote_request_id": request.id,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": self._layout.tp,
            "remote_num_tokens": tokens,
            MEMBER: seal_handoff(self._key, handoff),
        }

    def forget(self, request: str) -> None:
        """End a request: cancel the load of its KV, or release a handoff that the request did not
        use.
        """
        if request in self._accepted:
            self.begin_load(request, [], 0)
        if request in self._loading:
            self._orders.cancels.append(request)
        self._used.discard(request)

    def on_ended(self, sent: Sequence[str], received: Sequence[str]) -> None:
        """Record that KV transfers have ended, so that their blocks belong to the engine again.

        sent      requests whose offers have ended
        received  requests whose fetches have ended
        """
        self._sending.difference_update(sent)
        self._loading.difference_update(received)

    def take_orders(self, has_work: bool) -> StepOrders:
        """Return the orders for KV transfers that were collected since the last engine step.

        `has_work` says whether the step computes something.
        """
        orders, self._orders = self._orders, StepOrders()
        orders.has_work = has_work
        return orders


def _order(request: str, handoff: Handoff, blocks: Sequence[int], tokens: int) -> LoadOrder:
    return LoadOrder(
        request,
        handoff.name,
        list(blocks),
        handoff.tokens,
        handoff.tokens - tokens,
        handoff.layout,
        handoff.sources,
    )
