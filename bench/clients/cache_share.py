"""Computes how many prompt tokens of recorded requests one unlimited KV cache would have cached.

Prompts are converted to tokens exactly as the mock engine does it, so that the result can be
compared with the cached tokens that the mock engine reports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.clients.recorder import Exchange
from mockgpu.http.chat_conversion import chat_body
from mockgpu.http.choice_and_stop_reason import build_choices
from mockgpu.http.messages_format import MessagesFormat
from mockgpu.http.responses_format import ResponsesFormat
from mockgpu.http.responses_store import ResponsesStore
from mockgpu.mock_tokenizer import block_keys
from mockgpu.paged_kv_cache import BLOCK_TOKENS
from mockgpu.request_parser import RequestBody, parse_request

CONTEXT = 1 << 20
MAY_END_FROM = 1024  # `penstock demo` uses this value

_RESPONSES = ResponsesFormat(ResponsesStore(is_enabled=True))
READERS: Mapping[str, Callable[[dict[str, Any]], RequestBody]] = {
    "/v1/chat/completions": chat_body,
    "/v1/messages": MessagesFormat().read,
    "/v1/responses": _RESPONSES.read,
}


class EndlessCache:
    """A simulated KV cache that keeps all prompts and answers: the upper limit of cache hits."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def add(self, body: RequestBody) -> int:
        """Add a prompt and its answer; return how many of the prompt's tokens were cached."""
        model = body.model or ""
        ask = parse_request(body, {}, True, model, CONTEXT, "", may_end_from=MAY_END_FROM)
        prompt = ask.prompts[0]
        keys = block_keys(prompt)
        # An engine computes the last token of a prompt even if all of it is cached.
        usable = keys[: (ask.prompt_tokens - 1) // BLOCK_TOKENS]
        hits = next((i for i, key in enumerate(usable) if key not in self._keys), len(usable))
        self._keys.update(*(choice.keys for choice in build_choices(ask)))
        return hits * BLOCK_TOKENS


def endless_hits(exchanges: Sequence[Exchange]) -> int:
    """Return how many prompt tokens a KV cache without a size limit would have cached.

    exchanges  all recorded requests with their answers, in order
    """
    cache, total = EndlessCache(), 0
    for exchange in exchanges:
        reader = READERS.get(exchange.path)
        if reader is not None and exchange.status == 200:
            members = exchange.request.json()
            total += cache.add(reader(members))
            if exchange.path == "/v1/responses":
                _RESPONSES.keep(members, response_of(exchange))
    return total


def response_of(exchange: Exchange) -> dict[str, Any]:
    assert exchange.response is not None
    whole: dict[str, Any] | None = exchange.response.json()
    if whole is not None:
        return whole
    last = exchange.response.body.rpartition(b"data: ")[2]
    response: dict[str, Any] = json.loads(last)["response"]
    return response
