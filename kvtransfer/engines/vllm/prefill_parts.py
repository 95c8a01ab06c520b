"""Offers the KV of a prompt in parts while the prompt is still being computed. No I/O, no vLLM.

So a decode engine has most of the KV when the prefill ends. A part is a range of the prompt's
tokens. It is offered in the engine step that computes its last token, and its layers are sent one
by one, as they are computed.

A part is fetched by its name, without a ticket. Both engines compute the same names from the prompt
and the prefill engine's card. This needs the fleet's key, so other agents cannot guess a name.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvtransfer.engines.vllm.unfinished_prompts import PromptChunk

MAX_PARTS = 8
"""Maximum number of parts of a prompt; an invitation of every decode rank waits for each of them"""

_DOMAIN = b"penstock vllm part 1\0"


class OfferOrder(msgspec.Struct, frozen=True):
    """The scheduler's instruction to the workers to offer some KV to a decode engine.

    ttl_s        seconds for which the KV is kept
    nonces       random identifiers of the tickets, one per rank; (): the KV is fetched by name
    is_computed  whether all layers are already computed; False: this step computes them
    """

    request: str
    name: str
    blocks: list[int]
    tokens: int
    ttl_s: float
    nonces: list[bytes] = []
    is_computed: bool = True


class PromptPart(msgspec.Struct, frozen=True):
    """A part of a prompt, the tokens [begin, end), whose KV is offered as `name`.

    origin  first token of the offer's first block; earlier tokens have left the sliding window
    """

    name: str
    begin: int
    end: int
    origin: int = 0


def split_prompt(
    key: bytes,
    transfer: str,
    prompt: bytes,
    tokens: int,
    part_tokens: int,
    block_tokens: int,
    origin: int = 0,
) -> list[PromptPart]:
    """Divide a prompt's tokens into the parts in which its KV is offered, and return them in order.

    key           the fleet's key
    transfer      id of the transfer, which both engines received with their requests
    prompt        `digest_prompt` of all tokens
    tokens        number of tokens of the prompt
    part_tokens   minimum number of tokens of a part, except the last
    block_tokens  tokens per block of the prefill engine; every part begins with a block
    origin        first token that is offered; it begins a block
    """
    least = max(part_tokens, -(-tokens // MAX_PARTS), 1)
    size = -(-least // block_tokens) * block_tokens
    return [
        PromptPart(_name(key, transfer, prompt, index), begin, min(begin + size, tokens), origin)
        for index, begin in enumerate(range(origin, tokens, size))
    ]


def _name(key: bytes, transfer: str, prompt: bytes, index: int) -> str:
    text = transfer.encode()
    body = b"%b%d\0%b%b" % (_DOMAIN, index, prompt, text)
    return hmac.digest(key, body, "sha256")[:16].hex()


class StepOffers(msgspec.Struct):
    """What vLLM's workers must do when a step computes parts of prompts, or when a request ends.

    offers    parts whose KV is offered to decode engines
    revokes   requests whose offers must end before the step, because they have lost their blocks
    declines  names of parts that will not be offered
    is_kept   whether offers still use blocks of the request that has ended
    """

    offers: list[OfferOrder] = []
    revokes: list[str] = []
    declines: list[str] = []
    is_kept: bool = False


class _Prefill:
    # A prompt of which parts are offered.
    #
    # left    parts that are not offered yet
    # blocks  blocks of the offered parts
    # is_lost whether the request has lost its blocks since

    __slots__ = ("blocks", "is_lost", "left", "parts")

    def __init__(self, parts: list[PromptPart]) -> None:
        self.parts, self.left = parts, list(parts)
        self.blocks: list[int] = []
        self.is_lost = False

    def take_declined(self) -> list[str]:
        left, self.left = self.left, []
        return [part.name for part in left]


class PrefillParts:
    """The prompts whose KV this engine offers in parts to decode engines, in vLLM's scheduler
    process.

    block_tokens  tokens per block
    lease_s       seconds for which a part's KV is kept for a decode engine
    layerwise     whether parts are offered while they are computed; False: at the prompt's end
    """

    def __init__(self, block_tokens: int, lease_s: float, *, layerwise: bool) -> None:
        self._block_tokens, self._lease_s, self._layerwise = block_tokens, lease_s, layerwise
        self._prefills: dict[str, _Prefill] = {}

    def begin(self, request: str, parts: list[PromptPart]) -> None:
        """Begin to offer the KV of a new request's prompt: each of `parts` once it is computed."""
        self._prefills[request] = _Prefill(parts)

    def on_step(
        self, chunks: Sequence[PromptChunk], blocks_of: Callable[[str], Sequence[int]]
    ) -> StepOffers:
        """Return the parts that this step completes, and the requests that have lost blocks.

        chunks     what the step computes
        blocks_of  function that returns the present block numbers of a request
        """
        step = StepOffers()
        if not self._layerwise or not self._prefills:
            return step
        by_request = {chunk.request: chunk for chunk in chunks}
        for request, prefill in self._prefills.items():
            chunk = by_request.get(request)
            if prefill.is_lost or (chunk is None and not prefill.blocks):
                continue
            blocks = list(blocks_of(request))
            if blocks[: len(prefill.blocks)] != prefill.blocks:
                # vLLM does not report preemptions; the missing blocks show them.
                prefill.is_lost = True
                step.revokes.append(request)
                step.declines += prefill.take_declined()
            elif chunk is not None:
                step.offers += self._offers(request, prefill, blocks, chunk)
        return step

    def _offers(
        self, request: str, prefill: _Prefill, blocks: list[int], chunk: PromptChunk
    ) -> Iterator[OfferOrder]:
        end = chunk.computed + chunk.tokens
        while prefill.left and prefill.left[0].end <= end:
            part = prefill.left.pop(0)
            prefill.blocks = blocks[: -(-part.end // self._block_tokens)]
            yield self._order(request, part, prefill.blocks, part.end <= chunk.computed)

    def _order(
        self, request: str, part: PromptPart, blocks: list[int], is_computed: bool
    ) -> OfferOrder:
        first, last = part.origin // self._block_tokens, -(-part.end // self._block_tokens)
        return OfferOrder(
            request,
            part.name,
            blocks[first:last],
            part.end - part.origin,
            self._lease_s,
            is_computed=is_computed,
        )

    def end(self, request: str, blocks: Sequence[int], *, is_whole: bool) -> StepOffers | None:
        """End a request, and return what the workers must do with its offers of KV.

        blocks    its blocks
        is_whole  whether its prompt was computed; False: the request was aborted

        Returns None if no part of the request is offered.
        """
        prefill = self._prefills.pop(request, None)
        if prefill is None:
            return None
        step = StepOffers()
        has_offers = bool(prefill.blocks) and not prefill.is_lost
        if is_whole and not prefill.is_lost:
            step.offers = [self._order(request, part, list(blocks), True) for part in prefill.left]
        elif has_offers:
            step.revokes = [request]
        if not step.offers:
            step.declines = prefill.take_declined()
        step.is_kept = has_offers or bool(step.offers)
        return step
