"""Knows how much prompt computation a vLLM engine still has to do, in its scheduler process.

vLLM computes prompts in order of arrival. A new prompt waits for earlier prompts, so fetching its
KV in that time delays nothing. vLLM does not tell a connector which prompts still wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec


class PromptChunk(msgspec.Struct, frozen=True):
    """The part of one request that one step of the engine computes.

    request        vLLM's identifier of the request
    computed       number of its tokens whose KV existed before the step
    tokens         number of its tokens that the step computes; 1 means that it decodes
    prompt_tokens  length of its prompt in tokens; 0 after the request's first step, because vLLM
                   states the length only there
    """

    request: str
    computed: int
    tokens: int
    prompt_tokens: int = 0


class PromptWork:
    """The unfinished prompts of an engine, and how much of each is computed. No I/O.

    The object is not thread-safe.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def begin(self, request: str, computed: int, prompt_tokens: int) -> None:
        """Add a prompt of which the first `computed` tokens are, or will be, in the cache."""
        if computed < prompt_tokens:
            self._left[request] = computed, prompt_tokens

    def on_step(self, chunks: Sequence[PromptChunk]) -> None:
        """Record which prompt tokens an engine step computes. Finished prompts are dropped."""
        for chunk in chunks:
            known_tokens = self._left.pop(chunk.request, (0, 0))[1]
            tokens = chunk.prompt_tokens or known_tokens
            self.begin(chunk.request, chunk.computed + chunk.tokens, tokens)

    def forget(self, request: str) -> None:
        """Remove the prompt of a request that has ended or was cancelled."""
        self._left.pop(request, None)

    def others(self, request: str) -> Iterator[tuple[int, int]]:
        """Yield (computed, total) prompt tokens of every unfinished request except `request`."""
        return (left for name, left in self._left.items() if name != request)
