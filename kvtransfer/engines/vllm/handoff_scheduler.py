"""Decides in vLLM's scheduler process which KV to offer to other engines, and which to fetch.

A prefill engine makes a handoff for each finished prompt, a text by which a decode engine finds the
KV. A decode engine checks the handoffs in its requests. In each step, HandoffScheduler instructs
the workers which transfers to begin and end. If a request names a transfer, its KV is offered in
parts while it is computed (prefill_parts.py).

No object of vLLM is used here: connector.py converts them. handoff_worker.py does the transfers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from kvtransfer.engines.vllm.connector_counters import PendingCounts
from kvtransfer.engines.vllm.handoff_params import (
    EngineCard,
    Handoff,
    HandoffRefused,
    RankSource,
    WorkerAddress,
    digest_prompt,
    open_card,
    open_handoff,
    seal_card,
    seal_handoff,
)
from kvtransfer.engines.vllm.prefill_parts import (
    OfferOrder,
    PrefillParts,
    PromptPart,
    StepOffers,
    split_prompt,
)
from kvtransfer.engines.vllm.unfinished_prompts import PromptChunk
from kvtransfer.layout.kv_layout import KvLayout
from kvtransfer.protocol.ticket import mint_ahead

MEMBER = "kv_handoff"
"""The name of the member of kv_transfer_params that contains the handoff."""

TRANSFER, CARD = "kv_transfer", "kv_engine"
"""The names of the members for KV that is offered in parts: an id that both engines receive with
their requests, and the prefill engine's card.
"""

_MAX_TRANSFER_CHARS = 512
_NULL_BLOCK = 0  # vLLM's number of a block whose tokens have left the sliding window


class LoadOrder(msgspec.Struct, frozen=True):
    """The scheduler's instruction to workers to fetch the KV of one offer into a request's blocks.

    If the KV of a request is offered in parts, there is one instruction for each part.

    request  identifier of the request
    name     name of the offer
    blocks   numbers of the request's blocks
    tokens   number of prompt tokens whose KV is offered
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
    """What vLLM's scheduler instructs all workers to do in one step for transfers of KV.

    revokes   requests whose offers must end before the step
    declines  names of offers that will not be made
    offers    KV to offer: of completed prefills, or computed by this step
    ends      ended requests with offers; their blocks are free when the offers have ended
    loads     handoffs whose KV is to be fetched
    cancels   requests whose fetches are to be cancelled
    unused    handoffs that will not be fetched
    members   addresses of the agents of all ranks; sent only once
    has_work  whether the engine computes something in this step
    """

    revokes: list[str] = []
    declines: list[str] = []
    offers: list[OfferOrder] = []
    ends: list[str] = []
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


class _Source(msgspec.Struct, frozen=True):
    # The source of a request's KV: the offers of its parts, which are named in one handoff.

    tokens: int
    layout: KvLayout
    parts: list[PromptPart]
    sources: list[RankSource]


class HandoffScheduler:
    """Manages the KV handoffs of one engine, in vLLM's scheduler process.

    A handoff is a text by which a decode engine fetches the KV of a prompt from a prefill engine.

    key          the fleet's shared secret
    engine       identifier of the engine
    family       text that must be equal at both engines of a handoff (model, weights, version)
    lease_s      seconds for which offered KV is kept for a decode engine
    clock        the monotonic clock of this host
    warn         function called with one sentence for each refused handoff
    part_tokens  minimum number of tokens in a part; the number that a step computes is best
    layerwise    whether KV is offered in parts while it is computed; False: afterwards
    window       sliding window of all layers, in tokens; 0: none. vLLM frees the blocks before it,
                 so the others are offered when the prompt is computed
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
        part_tokens: int = 2048,
        layerwise: bool = True,
        window: int = 0,
    ) -> None:
        self._key, self._engine, self._family = key, engine, family
        self._layout: KvLayout | None = None
        self._lease_s, self._clock, self._warn = lease_s, clock, warn
        self._workers: list[WorkerAddress] = []
        self._part_tokens, self._layerwise = part_tokens, layerwise and not window
        self._window = window
        self._card = ""
        self._prefills: PrefillParts | None = None
        self._orders = StepOrders()
        self._accepted: dict[str, _Source] = {}
        self._used: set[str] = set()
        self._sending: set[str] = set()
        self._loading: set[str] = set()
        self.counts = PendingCounts()

    def set_workers(self, workers: Sequence[WorkerAddress], layout: KvLayout) -> None:
        """Set how the KV agents of all ranks are reached, in order of the ranks.

        Raises ValueError if the number of agents differs from the number of ranks in `layout`.
        """
        if len(workers) != layout.ranks:
            raise ValueError(
                f"{len(workers)} workers have a KV agent, but the layout needs one for each of "
                f"its {layout.ranks} ranks"
            )
        self._workers, self._layout = list(workers), layout
        addresses = [worker.address for worker in workers]
        self._orders.members = addresses
        card = EngineCard(addresses, layout, self._family, self._part_tokens)
        self._card = seal_card(self._key, card)
        self._prefills = PrefillParts(layout.block_tokens, self._lease_s, layerwise=self._layerwise)

    @property
    def has_pending_work(self) -> bool:
        """Return whether blocks are in use by transfers, so that the engine must run more steps."""
        orders = self._orders
        waiting = (orders.offers, orders.declines, orders.revokes, orders.loads, orders.unused)
        return bool(self._sending or self._loading or any(waiting))

    def loadable_tokens(self, request: PromptRequest, computed: int) -> int:
        """Return the number of tokens after the first `computed` ones whose KV can be fetched.

        The request's handoff says how many tokens another engine has computed. Returns 0 if the
        handoff was already used, was forged, or was made for another prompt or by an engine with
        another model. This engine then computes the prompt.
        """
        if not request.params.keys() & {MEMBER, CARD} or request.id in self._used:
            return 0
        handoff = self._accepted.get(request.id)
        if handoff is None:
            try:
                handoff = self._checked(request)
            except HandoffRefused as refused:
                self._used.add(request.id)
                self.counts.add("kv_handoffs_refused")
                self._warn(f"request {request.id}: {refused}; the prompt is computed here")
                return 0
            self._accepted[request.id] = handoff
        return max(0, handoff.tokens - computed)

    def _checked(self, request: PromptRequest) -> _Source:
        if CARD in request.params:
            return self._announced(request)
        handoff = open_handoff(self._key, request.params[MEMBER])
        self._check_engine(handoff)
        prompt = request.prompt[: handoff.tokens]
        if digest_prompt(prompt, request.variant) != handoff.prompt:
            raise HandoffRefused("the handoff was made for another prompt")
        origin, end = self._range(handoff.tokens)
        whole = PromptPart(handoff.name, origin, end, origin)
        return _Source(end, handoff.layout, [whole], handoff.sources)

    def _announced(self, request: PromptRequest) -> _Source:
        # Return where the KV of a prompt will be that another engine computes now.
        card = open_card(self._key, request.params[CARD])
        self._check_engine(card)
        parts = self._parts(request, card.part_tokens, card.layout)
        if not parts:
            raise HandoffRefused(
                f"the request's member {TRANSFER} is invalid, or the prompt is too short for it"
            )
        sources = [RankSource(address) for address in card.addresses]
        return _Source(parts[-1].end, card.layout, parts, sources)

    def _parts(
        self, request: PromptRequest, part_tokens: int, layout: KvLayout
    ) -> list[PromptPart]:
        transfer = request.params.get(TRANSFER)
        if not isinstance(transfer, str) or not 0 < len(transfer) <= _MAX_TRANSFER_CHARS:
            return []
        prompt, tokens = digest_prompt(request.prompt, request.variant), len(request.prompt)
        size, (origin, end) = layout.block_tokens, self._range(tokens)
        part_tokens = tokens if self._window else part_tokens
        return split_prompt(self._key, transfer, prompt, end, part_tokens, size, origin)

    def _range(self, tokens: int) -> tuple[int, int]:
        # Return the first token of a prompt whose block is offered, and the end of the offer.
        #
        # vLLM always computes the last token of a prompt. With a sliding window, it reads tokens
        # from `tokens - window` on. Were that token offered, vLLM would free one token too many.
        if not self._window:
            return 0, tokens
        assert self._layout is not None
        size = self._layout.block_tokens
        return max(0, tokens - self._window) // size * size, tokens - 1

    def _check_engine(self, source: Handoff | EngineCard) -> None:
        if self._layout is None:
            raise HandoffRefused("the workers of this engine have no KV agents yet")
        mismatch = self._layout.mismatch(source.layout)
        if self._window and source.layout.block_tokens != self._layout.block_tokens:
            mismatch = (
                f"the prefill engine's blocks have {source.layout.block_tokens} tokens, this "
                f"engine's {self._layout.block_tokens}; with a sliding window they must be equal"
            )
        if source.family != self._family:
            mismatch = (
                f"the prefill engine's family (model, weights, version) is {source.family}, "
                f"this engine's is {self._family}"
            )
        if mismatch is not None:
            # Agents that differ so do not link, so the source's blocks wait for its lease's end.
            raise HandoffRefused(mismatch)

    def begin_load(self, request: str, blocks: Sequence[int], tokens: int) -> None:
        """Instruct the workers to fetch the last `tokens` tokens of a handoff's KV into `blocks`.

        If `tokens` is 0, the KV is not needed. Does nothing for a request without a handoff, or if
        it was already called for this request.
        """
        handoff = self._accepted.pop(request, None)
        if handoff is None:
            return
        self._used.add(request)
        skip = handoff.tokens - tokens
        if not self._are_freed(blocks, skip, handoff.parts[0].origin):
            # vLLM would take these blocks for computed ones. Workers fail a load without blocks.
            blocks = []
        orders = [_order(request, handoff, part, blocks, skip) for part in handoff.parts]
        self._orders.unused += [order for order in orders if order.skip == order.tokens]
        if tokens == 0:
            self.counts.add("kv_handoffs_cached")
            return
        self.counts.add("kv_handoffs_accepted")
        self._loading.add(request)
        self._orders.loads += [order for order in orders if order.skip < order.tokens]

    def _are_freed(self, blocks: Sequence[int], computed: int, origin: int) -> bool:
        # Return whether this engine has no blocks for tokens that have left the sliding window.
        # Their KV is not offered.
        if not self._window:
            return True
        assert self._layout is not None
        size = self._layout.block_tokens
        left = blocks[computed // size : origin // size]
        return all(block == _NULL_BLOCK for block in left)

    def _has_all(self, blocks: Sequence[int], tokens: int) -> bool:
        # Return whether a computed prompt still has the blocks that are offered. A request that
        # goes on to decode loses them as its sliding window moves.
        if not self._window:
            return True
        assert self._layout is not None
        return _NULL_BLOCK not in blocks[self._range(tokens)[0] // self._layout.block_tokens :]

    def finish_prefill(
        self, request: PromptRequest, blocks: Sequence[int], tokens: int
    ) -> dict[str, object] | None:
        """Instruct the workers to offer a finished prefill's KV, and return its kv_transfer_params.

        Returns None if the request has lost blocks, because its sliding window has moved.

        The blocks are in use until every worker reports the end of the offer. The result also has
        the members of vLLM's own connectors, because gateways check them.
        """
        assert self._layout is not None
        origin, end = self._range(tokens)
        if end == 0 or not self._has_all(blocks, tokens):
            return None
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
        size = self._layout.block_tokens
        offered = list(blocks)[origin // size : -(-end // size) if self._window else None]
        self._orders.offers.append(
            OfferOrder(request.id, name, offered, end - origin, self._lease_s, nonces)
        )
        self._orders.ends.append(request.id)
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

    def begin_prefill(self, request: PromptRequest) -> None:
        """Begin to offer a new request's KV in parts while it is computed.

        Only requests that name a transfer are offered in this way.
        """
        if self._prefills is None or request.params.get("do_remote_decode") is not True:
            return
        assert self._layout is not None
        parts = self._parts(request, self._part_tokens, self._layout)
        if parts:
            self._prefills.begin(request.id, parts)

    def on_step(
        self, chunks: Sequence[PromptChunk], blocks_of: Callable[[str], Sequence[int]]
    ) -> None:
        """Instruct the workers to offer the parts of prompts whose last token this step computes.

        chunks     what the step computes
        blocks_of  function that returns the present block numbers of a request
        """
        if self._prefills is not None:
            self._add_offers(self._prefills.on_step(chunks, blocks_of))

    def _add_offers(self, step: StepOffers) -> None:
        self._orders.offers += step.offers
        self._orders.revokes += step.revokes
        self._orders.declines += step.declines

    def end_prefill(
        self, request: str, blocks: Sequence[int], tokens: int, *, is_whole: bool
    ) -> tuple[bool, dict[str, object]] | None:
        """End a request whose KV is offered in parts. Return (is_kept, kv_transfer_params).

        tokens    number of its prompt tokens
        is_whole  whether the prompt was computed; False: its offers end immediately

        While is_kept is true, offers use the request's blocks, until every worker reports the end.
        Returns None for a request whose KV is not offered in parts.
        """
        if self._prefills is None:
            return None
        is_whole = is_whole and self._has_all(blocks, tokens)
        end = self._prefills.end(request, blocks, is_whole=is_whole)
        if end is None:
            return None
        assert self._layout is not None
        self._add_offers(end)
        if end.is_kept:
            self._orders.ends.append(request)
            self._sending.add(request)
            self.counts.add("kv_handoffs_offered")
        return end.is_kept, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "tp_size": self._layout.tp,
            CARD: self._card,
        }

    def forget(self, request: str) -> None:
        """End a request on the decode side: cancel the fetch of its KV.

        If the fetch has not begun, the prefill engine learns that its KV is not needed.
        """
        if request in self._accepted:
            self.begin_load(request, [], 0)
        if request in self._loading:
            self._orders.cancels.append(request)
        self._used.discard(request)

    def on_ended(self, sent: Sequence[str], received: Sequence[str]) -> None:
        """Record that KV transfers have ended at every worker, so that their blocks can be reused.

        sent      requests whose offers have ended
        received  requests whose fetches have ended
        """
        self._sending.difference_update(sent)
        self._loading.difference_update(received)

    def take_orders(self, has_work: bool) -> StepOrders:
        """Return the instructions for the workers that were collected since the last engine step.

        has_work  whether the step computes something
        """
        orders, self._orders = self._orders, StepOrders()
        orders.has_work = has_work
        return orders


def _order(
    request: str, handoff: _Source, part: PromptPart, blocks: Sequence[int], skip: int
) -> LoadOrder:
    return LoadOrder(
        request,
        part.name,
        list(blocks)[part.origin // handoff.layout.block_tokens :],
        part.end - part.origin,
        min(max(skip, part.begin), part.end) - part.origin,
        handoff.layout,
        handoff.sources,
    )
