"""Remembers which tokens a prompt's bytes have, to compare prompts with the blocks of engines.

The gateway knows a prompt as a chain of keys over bytes (policies/prefix/fingerprint.py). Engines
report blocks of tokens (policies/prefix/cached_blocks.py). When the tokens of a prompt become
known, this module stores them, and uses them for all later prompts with the same beginning.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from policies.prefix.fingerprint import Fingerprint
from policies.prefix.sampled_keys import SAMPLE_LENGTHS, Keys

_PROMPT_COST_BYTES, _KEY_COST_BYTES, _BLOCK_COST_BYTES = 512, 208, 8


class KnownPrefix(msgspec.Struct, frozen=True):
    """The longest beginning of a new prompt whose tokens are known from an earlier prompt.

    chains           the block keys of the earlier prompt, by block size in tokens, because engines
                     use different block sizes
    tokens           number of tokens in the common beginning
    tokens_per_byte  mean number of tokens per byte in the earlier prompt
    is_whole         whether the common beginning is the whole new prompt
    """

    chains: Mapping[int, Keys]
    tokens: int
    tokens_per_byte: float
    is_whole: bool = False


class _Prompt:
    __slots__ = ("chains", "cost_bytes", "keys", "n_bytes", "tokens", "uses")

    def __init__(self, fingerprint: Fingerprint, chains: Mapping[int, Keys], tokens: int) -> None:
        self.keys, self.n_bytes = fingerprint.sampled_keys, fingerprint.n_bytes
        self.chains, self.tokens = chains, tokens
        self.uses = 0
        self.cost_bytes = _PROMPT_COST_BYTES + _BLOCK_COST_BYTES * sum(map(len, chains.values()))


class LearnedPrompts:
    """The most recent prompts whose tokens are known, within a memory limit.

    A block key leads to the newest prompt that has it. If two prompts differ after a key, the
    number of tokens that they share is stored with the key. For other keys, the number is
    interpolated from the bytes.
    """

    __slots__ = ("_by_key", "_cap_bytes", "_prompts", "_shared", "_used_bytes")

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._used_bytes = 0
        self._by_key: dict[int, _Prompt] = {}
        self._shared: dict[int, int] = {}  # tokens up to where prompts diverge, by last equal key
        self._prompts: dict[_Prompt, None] = {}  # remembered prompts, oldest first

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def has(self, fingerprint: Fingerprint) -> bool:
        """Return whether the token ids of exactly the prompt with this fingerprint are stored."""
        keys = fingerprint.sampled_keys
        prompt = self._by_key.get(keys[-1]) if keys else None
        return prompt is not None and prompt.n_bytes == fingerprint.n_bytes

    def find(self, fingerprint: Fingerprint) -> KnownPrefix | None:
        """Return the longest beginning of the prompt whose tokens are known; None: there is none.

        Its length is exact if another prompt differs from there on, or if the whole prompt is
        known. Otherwise it is an estimate, rounded down.
        """
        keys = fingerprint.sampled_keys
        known = self._count_known(keys)
        if not known:
            return None
        key = keys[known - 1]
        prompt = self._by_key[key]
        is_whole = known == len(keys) == len(prompt.keys) and prompt.n_bytes == fingerprint.n_bytes
        if is_whole:
            tokens = prompt.tokens
        else:
            n_bytes = SAMPLE_LENGTHS[known - 1] * fingerprint.block_bytes
            estimate = n_bytes * prompt.tokens // prompt.n_bytes
            tokens = min(prompt.tokens, self._shared.get(key, estimate))
        return KnownPrefix(prompt.chains, tokens, prompt.tokens / prompt.n_bytes, is_whole)

    def learn(self, fingerprint: Fingerprint, chains: Mapping[int, Keys], tokens: int) -> None:
        """Store a prompt's tokens, so that later prompts with the same beginning are known.

        `chains` has the hashes of its token blocks, by block size in tokens. A prompt shorter than
        one block of bytes cannot be recognised, and is ignored.
        """
        keys = fingerprint.sampled_keys
        if not keys or not tokens:
            return
        prompt = _Prompt(fingerprint, chains, tokens)
        known = self._count_known(keys)
        if known:
            self._compare(keys[known - 1], prompt, self._by_key[keys[known - 1]])
        for key in keys:
            before = self._by_key.get(key)
            if before is None:
                self._used_bytes += _KEY_COST_BYTES
            else:
                self._release(before)
            self._by_key[key] = prompt
        prompt.uses = len(keys)
        self._prompts[prompt] = None
        self._used_bytes += prompt.cost_bytes
        while self._used_bytes > self._cap_bytes and len(self._prompts) > 1:
            self._evict(next(iter(self._prompts)))

    def clear(self) -> None:
        self._by_key.clear()
        self._shared.clear()
        self._prompts.clear()
        self._used_bytes = 0

    def _count_known(self, keys: Keys) -> int:
        # Return how many keys lead to a prompt. All keys before one that does, do so as well.
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._by_key:
                low = middle + 1
            else:
                high = middle
        return low

    def _compare(self, key: int, prompt: _Prompt, other: _Prompt) -> None:
        sizes = prompt.chains.keys() & other.chains.keys()
        if not sizes or (prompt.n_bytes == other.n_bytes and prompt.keys == other.keys):
            return
        size = min(sizes)
        one, two = prompt.chains[size], other.chains[size]
        low, high = 0, min(len(one), len(two))
        while low < high:
            middle = (low + high) // 2
            if one[middle] == two[middle]:
                low = middle + 1
            else:
                high = middle
        # A prompt that continues another shares all of it, one that diverges shares less.
        self._shared[key] = min(low * size, self._shared.get(key, low * size))

    def _release(self, prompt: _Prompt) -> None:
        # Record that a key leads to a newer prompt; drop a prompt that no key leads to.
        prompt.uses -= 1
        if not prompt.uses:
            del self._prompts[prompt]
            self._used_bytes -= prompt.cost_bytes

    def _evict(self, prompt: _Prompt) -> None:
        del self._prompts[prompt]
        self._used_bytes -= prompt.cost_bytes
        for key in prompt.keys:
            if self._by_key.get(key) is prompt:
                del self._by_key[key]
                self._shared.pop(key, None)
                self._used_bytes -= _KEY_COST_BYTES
