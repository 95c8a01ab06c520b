"""The cached prompts of endpoints whose KV events describe their caches exactly. No I/O.

It combines three parts:

- the blocks that engines report as cached (policies/prefix/cached_blocks.py)
- the prompts whose token ids are known (policies/prefix/learned_prompts.py)
- the check whether an endpoint's events can be trusted (event_verification.py)

The resulting numbers of cached tokens replace the predictions of the prefix index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from gateway.fleet.kv_events.event_verification import CacheExpectation, EndpointEvents
from gateway.fleet.kv_events.rank_event_stream import EventSource
from gateway.fleet.kv_events.tokenization import UnreadPrompt
from policies.prefix.cached_blocks import CachedBlocks, chain_keys, scope_seed
from policies.prefix.fingerprint import Fingerprint
from policies.prefix.learned_prompts import LearnedPrompts
from policies.prefix.prefix_index import PrefixIndex
from policies.prefix.prefix_match import PrefixMatch
from policies.prefix.sampled_keys import SAMPLE_LENGTHS

LEARNED_SHARE = 0.25
"""Share of the memory for KV events (0 to 1) that is reserved for prompts whose tokens are known.

The rest holds the blocks that engines report."""

RECENT_S = 2.0
RECENT_BYTES = 4 * 1024 * 1024
"""Memory of each of the two indexes of recently sent prompts, in bytes.

A prompt that was sent less than RECENT_S to 2 * RECENT_S seconds ago may not have been computed
yet, so that no event can report it. It is then treated as cached.
"""

MAX_UNREAD, MAX_UNREAD_BYTES = 256, 16 * 1024 * 1024
MAX_SLOTS_LISTED = 1 << 16


class _Holdings(msgspec.Struct, frozen=True):
    # The cached part of one prompt at each endpoint whose cache is known exactly.
    #
    # Numbers are tokens, as engines count them.
    #
    # fingerprint  of the prompt
    # held         by slot; 0 for an endpoint that has nothing; the mean over its ranks
    # least, most  by slot, what the ranks with least and most of it have
    # limit        by slot, how much can be known: that an endpoint has all of it says nothing about
    #              what follows
    # scale        tokens of the whole prompt per byte, as engines count them

    fingerprint: Fingerprint
    held: Mapping[int, float]
    least: Mapping[int, int]
    most: Mapping[int, int]
    limit: Mapping[int, int]
    tokens_per_byte: float

    def is_end(self, slot: int) -> bool:
        return self.held[slot] < self.limit[slot]


class ExactPrefixes:
    """The index of prompt prefixes that KV events report as cached. A reload keeps it.

    cached     the blocks of all sources (engine ranks)
    prompts    the prompts whose token ids are known
    endpoints  the KV events of each endpoint that publishes them, by slot number
    unread     prompts that still have to be tokenized, oldest first
    """

    __slots__ = (
        *("_exact", "_holdings", "_lora_names", "_recent", "_rotated_at", "_sizes"),
        *("_unread_bytes", "cached", "endpoints", "prompts", "unread"),
    )

    def __init__(self, cap_bytes: int) -> None:
        learned_bytes = int(cap_bytes * LEARNED_SHARE)
        self.cached = CachedBlocks(cap_bytes - learned_bytes)
        self.prompts = LearnedPrompts(learned_bytes)
        self.endpoints: dict[int, EndpointEvents] = {}
        self.unread: deque[UnreadPrompt] = deque()
        self._unread_bytes = 0
        self._exact: dict[int, EndpointEvents] = {}
        self._sizes: frozenset[int] = frozenset()
        self._holdings: _Holdings | None = None
        self._recent = [PrefixIndex(RECENT_BYTES), PrefixIndex(RECENT_BYTES)]
        self._rotated_at = 0.0
        self._lora_names: frozenset[str] = frozenset()

    def new_source(self, *, has_replay: bool) -> EventSource:
        """Create the source of one engine rank's KV events, whose reported blocks enter this index.

        `has_replay` says whether the engine sends missed events again on request.
        """
        return EventSource(self.cached, has_replay=has_replay)

    def remove(self, slot: int) -> None:
        """Forget an endpoint and the blocks that its ranks have cached."""
        endpoint = self.endpoints.pop(slot, None)
        self._exact.pop(slot, None)
        self._holdings = None
        for source in () if endpoint is None else endpoint.sources:
            source.blocks.close()

    def refresh(self, now: float) -> None:
        """Recompute which endpoints have exact KV events. Call this after events, and regularly."""
        self._exact = {
            slot: endpoint for slot, endpoint in self.endpoints.items() if endpoint.is_exact(now)
        }
        self._sizes = frozenset(endpoint.block_tokens for endpoint in self._exact.values())
        self._holdings = None
        names = frozenset(
            name
            for endpoint in self.endpoints.values()
            for source in endpoint.sources
            for name in source.lora_names
        )
        if names != self._lora_names:
            # The chains of prompts for an adapter begin with another number than was assumed.
            self._lora_names = names
            self.prompts.clear()
        if now - self._rotated_at > RECENT_S:
            self._rotated_at = now
            if self._recent[0].stats().blocks or self._recent[1].stats().blocks:
                self._recent = [PrefixIndex(RECENT_BYTES), self._recent[0]]

    def is_exact(self, slot: int) -> bool:
        return slot in self._exact

    def describe(self, slot: int, now: float) -> str | None:
        """Return a text that says how well the gateway knows an endpoint's cache, for display.

        The text is "exact" if KV events describe the cache, and "believed: REASON" if the prefix
        index predicts it. Returns None for an endpoint without KV events.
        """
        endpoint = self.endpoints.get(slot)
        if endpoint is None:
            return None
        obstacle = endpoint.obstacle(now)
        return f"believed: {obstacle}" if obstacle else "exact"

    # Queries: the cached part of a prompt

    def correct(self, tokens: list[int], fingerprint: Fingerprint, prompt_tokens: int) -> list[int]:
        """Replace predicted numbers of cached tokens in a list by exact ones; return that list.

        Only the numbers of endpoints with exact KV events change.

        tokens         predicted cached tokens by slot number of the endpoint; changed in place
        fingerprint    the chain of hashes of the prompt's blocks
        prompt_tokens  number of tokens of the prompt
        """
        holdings = self._look_up(fingerprint)
        if holdings is not None and holdings.held:
            top = max(holdings.held)
            if top >= len(tokens):
                tokens += [0] * (top + 1 - len(tokens))
            self._replace(tokens, holdings, prompt_tokens)
        return tokens

    def correct_match(
        self, match: PrefixMatch, fingerprint: Fingerprint, prompt_tokens: int
    ) -> PrefixMatch:
        """Return a copy of a predicted prefix match that has exact numbers where they are known.

        Only the numbers of endpoints with exact KV events change.

        match          predicted cached tokens of a prompt per endpoint
        fingerprint    the chain of hashes of the prompt's blocks
        prompt_tokens  number of tokens of the prompt
        """
        holdings = self._look_up(fingerprint)
        if holdings is None or not holdings.held:
            return match
        tokens = dict(match.narrow)
        for prefix in match.wide:
            for slot in islice(prefix.holders(), MAX_SLOTS_LISTED):
                tokens.setdefault(slot, prefix.tokens)
        for slot in holdings.held:
            tokens.setdefault(slot, 0)
        self._replace(tokens, holdings, prompt_tokens)
        slots = max(len(match), max(holdings.held) + 1)
        return PrefixMatch(slots, tokens, (), max(tokens.values()))

    def _replace(
        self, tokens: list[int] | dict[int, int], holdings: _Holdings, prompt_tokens: int
    ) -> None:
        # Replace belief by what is known; belief counts beyond what can be known.
        fingerprint = holdings.fingerprint
        scale = prompt_tokens / (fingerprint.n_bytes * holdings.tokens_per_byte)
        recent: Sequence[int] | None = None
        for slot, held in holdings.held.items():
            known, believed = min(prompt_tokens, int(held * scale)), tokens[slot]
            if believed > known:
                if holdings.is_end(slot):
                    if recent is None:
                        recent = self._recently_sent(fingerprint, prompt_tokens)
                    sent = recent[slot] if slot < len(recent) else 0
                    tokens[slot] = max(known, min(sent, believed))
            else:
                tokens[slot] = known

    def _recently_sent(self, fingerprint: Fingerprint, prompt_tokens: int) -> list[int]:
        new, old = (index.match(fingerprint, prompt_tokens) for index in self._recent)
        if len(new) < len(old):
            new, old = old, new
        for slot, tokens in enumerate(old):
            new[slot] = max(new[slot], tokens)
        return new

    def _look_up(self, fingerprint: Fingerprint) -> _Holdings | None:
        # Return what exact endpoints have of a prompt; None if its tokens are not known.
        if not self._exact:
            return None
        holdings = self._holdings
        if holdings is not None and holdings.fingerprint is fingerprint:
            return holdings
        known = self.prompts.find(fingerprint)
        if known is None:
            return None
        held: dict[int, float] = {}
        least: dict[int, int] = {}
        most: dict[int, int] = {}
        limit: dict[int, int] = {}
        for size in self._sizes & known.chains.keys():
            chain = known.chains[size]
            blocks = min((known.tokens - known.is_whole) // size, len(chain))
            by_bit: dict[int, int] = {}
            for length, bits in sorted(self.cached.levels(chain, blocks)):
                while bits:
                    bit = bits & -bits
                    by_bit[bit] = length
                    bits ^= bit
            for slot, endpoint in self._exact.items():
                if endpoint.block_tokens == size:
                    counts = [by_bit.get(rank.blocks.bit, 0) * size for rank in endpoint.sources]
                    # The engine chooses which rank serves the request, so use the mean.
                    held[slot], limit[slot] = sum(counts) / len(counts), blocks * size
                    least[slot], most[slot] = min(counts), max(counts)
        self._holdings = _Holdings(fingerprint, held, least, most, limit, known.tokens_per_byte)
        return self._holdings

    # Updates by requests: prompts sent, first tokens, and reported cached tokens

    def on_sent(
        self, fingerprint: Fingerprint, slot: int, prompt_tokens: int, now: float
    ) -> CacheExpectation | None:
        """Record that a prompt is sent to the endpoint in `slot`; predict its cached tokens.

        The answer must report a number in the expected range, if the KV events are right. Returns
        None if the endpoint has no KV events.
        """
        if slot not in self.endpoints:
            return None
        if slot not in self._exact:
            return CacheExpectation(now)
        holdings = self._look_up(fingerprint)
        expected = CacheExpectation(now)
        if holdings is not None and slot in holdings.held:
            most = None
            if holdings.most[slot] < holdings.limit[slot]:
                sent = self._most_recently_sent(fingerprint, slot, prompt_tokens)
                most = max(holdings.most[slot], sent * holdings.tokens_per_byte)
            expected = CacheExpectation(now, holdings.least[slot], most)
        # After the expectation, because no event can say yet that this very prompt is cached.
        self._recent[0].insert(fingerprint, slot, prompt_tokens)
        return expected

    def _most_recently_sent(self, fingerprint: Fingerprint, slot: int, prompt_tokens: int) -> int:
        # Return the largest number of the prompt's bytes that were sent to the endpoint just now.
        #
        # The index recognises a prefix at sampled lengths only, so its end lies before the next
        # one.
        recent = self._recently_sent(fingerprint, prompt_tokens)
        sent = recent[slot] if slot < len(recent) else 0
        n_bytes, size = fingerprint.n_bytes, fingerprint.block_bytes
        rung = bisect_right(SAMPLE_LENGTHS, round(sent * n_bytes / (prompt_tokens * size)))
        is_whole = rung >= len(fingerprint.sampled_keys)
        return n_bytes if is_whole else SAMPLE_LENGTHS[rung] * size

    def note(self, prompt: UnreadPrompt) -> None:
        """Queue a prompt whose token ids are not known yet. An engine tokenizes it later.

        Beyond the queue's limits, the oldest prompts are dropped. A prompt shorter than one block
        is not queued, because the index could not find it later.
        """
        if not prompt.fingerprint.sampled_keys:
            return
        self.unread.append(prompt)
        self._unread_bytes += prompt.fingerprint.n_bytes
        while len(self.unread) > MAX_UNREAD or self._unread_bytes > MAX_UNREAD_BYTES:
            self.take_unread()

    def take_unread(self, index: int = 0) -> UnreadPrompt:
        """Remove a prompt from the queue of prompts to be tokenized, and return it.

        `index` is its position in the queue; 0 is the oldest. Raises IndexError if there is none.
        """
        prompt = self.unread[index]
        del self.unread[index]
        self._unread_bytes -= prompt.fingerprint.n_bytes
        return prompt

    def block_sizes(self, slots: Sequence[int]) -> set[int]:
        """Return the KV block sizes of these endpoints in tokens; unknown sizes are left out."""
        sizes = {self.endpoints[slot].block_tokens for slot in slots if slot in self.endpoints}
        return sizes - {0}

    def learn(
        self,
        fingerprint: Fingerprint,
        tokens: Sequence[int],
        sizes: set[int],
        engine_model: str,
        salt: str,
    ) -> None:
        """Record a prompt's token ids, so that blocks in KV events can be matched to the prompt.

        fingerprint   the chain of hashes of the prompt's blocks, by which the prompt is found again
        tokens        the prompt's token ids
        sizes         KV block sizes of the endpoints, in tokens
        engine_model  the engines' name of the model, or of the LoRA adapter
        salt          the cache salt that engines get; "" for none
        """
        seed = scope_seed(engine_model if engine_model in self._lora_names else "", salt)
        chains = {size: chain_keys(tokens, size, seed) for size in sizes}
        self.prompts.learn(fingerprint, chains, len(tokens))
        self._holdings = None
