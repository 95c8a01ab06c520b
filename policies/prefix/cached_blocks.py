"""An index of the KV blocks that engines report as cached, by the content of the blocks.

Each engine has its own hashes for blocks. Here a block's content key is a chained hash of its
tokens. So blocks of different engines can be compared with each other and with a prompt whose
tokens are known. policies/prefix/learned_prompts.py remembers the tokens of prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

from policies.prefix.sampled_keys import Keys

BLOCK_COST_BYTES = 288
"""Upper bound of the memory in bytes of one reported block: two dict entries, a key and a hash."""

EngineHash: TypeAlias = "int | bytes"
"""An engine's own name for a KV block: a hash, as a number or bytes."""

GPU, CPU, OTHER = 1, 2, 4
"""Bits of the storage media in which a block may be cached; a block can be in several.

GPU    GPU memory
CPU    host memory
OTHER  any other medium
"""

_MEDIA = GPU | CPU | OTHER
_TOKEN_BYTES = 4


def scope_seed(lora_name: str, salt: str) -> int:
    """Return the number with which the hash of a prompt's blocks begins.

    It depends on the LoRA adapter and the cache salt. So equal tokens with another adapter or salt
    have other hashes, because their KV cache cannot be shared.
    """
    return xxh3_64_intdigest(f"{lora_name}\0{salt}".encode("utf-8", "surrogatepass")) & ~_MEDIA


def chain_keys(tokens: Sequence[int], block_tokens: int, seed: int) -> Keys:
    """Return the content keys (uint64) of the complete blocks of a token sequence.

    Raises OverflowError or TypeError if a token is not an unsigned 32-bit integer.
    """
    data, size = memoryview(array("I", tokens)).cast("B"), _TOKEN_BYTES * block_tokens
    keys, key = array("Q"), seed
    for begin in range(0, len(data) - size + 1, size):
        key = xxh3_64_intdigest(data[begin : begin + size], key) & ~_MEDIA
        keys.append(key)
    return keys


class SourceBlocks:
    """The KV blocks that one source has reported as cached: a data-parallel rank of an engine.

    It belongs to an index of all sources (CachedBlocks).

    bit  the bit that stands for this source in the index; every `clear` changes it
    """

    __slots__ = ("_index", "_known", "bit")

    def __init__(self, index: CachedBlocks) -> None:
        self._index = index
        self._known: dict[EngineHash, int] = {}  # content key | bits of the media
        self.bit = index.take_bit()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: EngineHash) -> bool:
        return name in self._known

    def hashes(self) -> frozenset[EngineHash]:
        """Return the hashes by which the engine itself names the blocks that it has cached."""
        return frozenset(self._known)

    def store(
        self,
        names: Sequence[EngineHash],
        parent: EngineHash | None,
        tokens: Sequence[int],
        block_tokens: int,
        *,
        medium: int = GPU,
        seed: int = 0,
        mixed: Sequence[int] = (),
    ) -> None:
        """Record that an engine has cached consecutive blocks of a prompt.

        A block whose parent or tokens are unknown is recorded without a content key. Raises
        OverflowError or TypeError if a token is not an unsigned 32-bit integer.

        names   the engine's name of each block
        parent  the block before the first one; None: the first one begins a prompt, with `seed`
        tokens  token ids of all blocks; may be empty for blocks that are already known
        medium  the bit of the medium that stores the blocks
        mixed   for each block, a number that becomes part of its key if more than the tokens
                identifies the block, such as an image; 0: none
        """
        if len(tokens) != len(names) * block_tokens:
            self._store_unread(names, medium)
            return
        key = seed if parent is None else self._known.get(parent, 0) & ~_MEDIA
        if not key:
            self._store_unread(names, medium)
            return
        known, holders, bit = self._known, self._index.holders, self.bit
        data, size = memoryview(array("I", tokens)).cast("B"), _TOKEN_BYTES * block_tokens
        begin = fresh = 0
        for index, name in enumerate(names):
            if mixed:
                key ^= mixed[index]
            key = xxh3_64_intdigest(data[begin : begin + size], key) & ~_MEDIA
            begin += size
            before = known.get(name)
            if before is None:
                fresh += 1
                known[name] = key | medium
            else:
                known[name] = key | before & _MEDIA | medium
                if before & ~_MEDIA == key:
                    continue
                self._drop(before & ~_MEDIA)
            holders[key] = holders.get(key, 0) | bit
        self._index.blocks += fresh

    def _store_unread(self, names: Iterable[EngineHash], medium: int) -> None:
        # Record blocks whose content is unknown, or known from an earlier event only.
        known, before = self._known, len(self._known)
        for name in names:
            known[name] = known.get(name, 0) | medium
        self._index.blocks += len(known) - before

    def remove(self, names: Iterable[EngineHash], medium: int = GPU) -> None:
        """Record that the engine removed blocks from a storage medium, such as GPU memory.

        names   the engine's names of the blocks
        medium  the bit of the medium

        A block that is also in another medium stays cached.
        """
        known = self._known
        for name in names:
            before = known.get(name)
            if before is None:
                continue
            after = before & ~medium
            if after & _MEDIA:
                known[name] = after
            else:
                del known[name]
                self._index.blocks -= 1
                self._drop(before & ~_MEDIA)

    def clear(self) -> None:
        if self._known:
            self._index.retire(self._known, self.bit)
            self._known, self.bit = {}, self._index.take_bit()

    def close(self) -> None:
        """Remove all blocks of this source from the index, because the source is no longer used."""
        self._index.retire(self._known, self.bit)
        self._known = {}

    def _drop(self, key: int) -> None:
        if key:
            self._index.drop(key, self.bit)


class CachedBlocks:
    """An index of the KV blocks that engine ranks (sources) have cached.

    It maps a block's content key to the sources that have the block, one bit per source.

    holders  bits of sources by content key
    blocks   number of blocks of all sources. While `is_full`, a source must be cleared before more
             are stored
    """

    __slots__ = ("_bits", "_free", "_most_blocks", "_retired", "blocks", "holders")

    def __init__(self, cap_bytes: int) -> None:
        # cap_bytes  maximum memory of the index; each block of a source counts BLOCK_COST_BYTES
        self._most_blocks = cap_bytes // BLOCK_COST_BYTES
        self.holders: dict[int, int] = {}
        self.blocks = 0
        self._bits = 0
        self._free: list[int] = []
        self._retired: list[tuple[dict[EngineHash, int], int]] = []

    @property
    def is_full(self) -> bool:
        return self.blocks > self._most_blocks

    def take_bit(self) -> int:
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << self._bits - 1

    def drop(self, key: int, bit: int) -> None:
        """Record that one source no longer has the block with this content key.

        bit  the bit that stands for the source
        """
        left = self.holders.get(key, 0) & ~bit
        if left:
            self.holders[key] = left
        else:
            self.holders.pop(key, None)

    def retire(self, known: dict[EngineHash, int], bit: int) -> None:
        """Mark a source's blocks as lost. `purge` then removes them from the index in small steps.

        known  content keys of the blocks by the source's own names
        bit    the bit that stands for the source
        """
        self._retired.append((known, bit))

    def purge(self, most: int = 2000) -> bool:
        """Remove up to `most` lost blocks from the index.

        Returns whether some are left to remove.
        """
        while self._retired and most > 0:
            known, bit = self._retired[-1]
            names = list(islice(known, most))
            for name in names:
                key = known.pop(name) & ~_MEDIA
                if key:
                    self.drop(key, bit)
            most -= max(1, len(names))
            self.blocks -= len(names)
            if not known:
                self._retired.pop()
                self._free.append(bit)
        return bool(self._retired)

    def levels(self, chain: Keys, blocks: int) -> list[tuple[int, int]]:
        """Return how many of the first `blocks` blocks of a prompt each source has cached.

        The result is a list of (number of blocks, bits of sources). A source has as many blocks as
        the largest entry with its bit. Engines evict the end of a prompt first, so a binary search
        finds the end.
        """
        last = min(blocks, len(chain)) - 1
        if last < 0 or not (first := self.holders.get(chain[0], 0)):
            return []
        at_last = self.holders.get(chain[last], 0)
        found = [(last + 1, at_last)] if at_last else []
        pending = [(0, first, last, at_last)]
        while pending:
            low, at_low, high, at_high = pending.pop()
            if at_low == at_high:
                continue
            if high - low > 1:
                middle = (low + high) // 2
                at_middle = self.holders.get(chain[middle], 0)
                pending += ((low, at_low, middle, at_middle), (middle, at_middle, high, at_high))
            elif at_low:
                found.append((low + 1, at_low))
        return found
