"""TierIndex: which block is in which slot of one tier (memory or disk), and which to evict next.

A slot is the place of one block. It is free, being written, or ready to be read. When a slot is
needed, the least recently used ready block is evicted. A pinned slot is never reused. No I/O.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvtransfer.store.block_keys import Key

INDEX_BYTES = 512
"""Maximum bytes of memory that the index takes per slot.

tests/unit/kvtransfer/store measures them.
"""


class TierIndex:
    """Which blocks one tier of a KV store (memory or disk) has, and in which slots.

    A slot is the place of one block. When a new block needs one, the least recently used block that
    is not pinned is evicted.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._keys: list[Key | None] = [None] * slots
        self._pins = array("L", bytes(array("L").itemsize * slots))
        self._ready: dict[Key, int] = {}
        self._writing: dict[Key, int] = {}
        # Ready slots without pins, the longest unused first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Slots below `_fresh` have been used. Freed ones are reused before fresh ones.
        self._freed: list[int] = []
        self._fresh = 0

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, key: Key) -> bool:
        return key in self._ready

    @property
    def taken(self) -> int:
        """The number of slots in use: being written, readable, or dropped and still being read."""
        return self._fresh - len(self._freed)

    def keys(self) -> Iterator[Key]:
        """Yield the keys of all blocks that can be read, in the order of their completion."""
        return iter(self._ready)

    def find(self, key: Key) -> int | None:
        """Return the slot from which the block `key` can be read; None if there is none."""
        return self._ready.get(key)

    def is_writing(self, key: Key) -> bool:
        return key in self._writing

    def slot_in_writing(self, key: Key) -> int:
        return self._writing[key]

    def begin(self, key: Key) -> tuple[int, Key | None] | None:
        """Reserve a slot for a new block. Return (slot, key of the evicted block or None).

        Returns None if the block is already there or being written, or if all slots are pinned or
        being written.
        """
        if key in self._ready or key in self._writing:
            return None
        evicted: Key | None = None
        if self._freed:
            slot = self._freed.pop()
        elif self._fresh < self.slots:
            slot, self._fresh = self._fresh, self._fresh + 1
        elif self._idle:
            slot, _ = self._idle.popitem(last=False)
            evicted = self._keys[slot]
            assert evicted is not None
            del self._ready[evicted]
        else:
            return None
        self._keys[slot] = key
        self._writing[key] = slot
        return slot, evicted

    def commit(self, key: Key) -> int:
        """Make a block readable, because all of its bytes are written, and return its slot.

        It then counts as the most recently used block.
        """
        slot = self._writing.pop(key)
        self._ready[key] = slot
        self._idle[slot] = None
        return slot

    def abort(self, key: Key) -> None:
        """Free the slot of a block that will not be written completely."""
        self._free(self._writing.pop(key))

    def pin(self, key: Key) -> int:
        """Keep a block from being evicted while it is read or copied, and return its slot.

        A block may be pinned any number of times.
        """
        slot = self._ready[key]
        if not self._pins[slot]:
            del self._idle[slot]
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """Undo one call of pin(), because a reader of this slot has finished.

        After the last unpin(), the slot's block counts as most recently used.

        Raises ValueError if the slot is not pinned.
        """
        if not self._pins[slot]:
            raise ValueError(f"slot {slot} cannot be unpinned: no reader has pinned it")
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        key = self._keys[slot]
        if key is None:
            self._free(slot)
        else:
            self._idle[slot] = None

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark these blocks as used now, in this order. Skips blocks that are not readable."""
        for key in keys:
            slot = self._ready.get(key)
            if slot is not None and slot in self._idle:
                self._idle.move_to_end(slot)

    def drop(self, key: Key) -> None:
        """Forget a readable block; its slot becomes free once no reader uses it."""
        slot = self._ready.pop(key)
        if self._pins[slot]:
            self._keys[slot] = None
        else:
            del self._idle[slot]
            self._free(slot)

    def restore(self, slot: int, key: Key) -> None:
        """Add a block that an earlier process has left on disk, before any other use of the index.

        Call it in ascending order of the blocks' last use, then `seal_restored()`.
        """
        self._keys[slot] = key
        self._ready[key] = slot
        self._idle[slot] = None

    def seal_restored(self) -> None:
        """Find the free slots, after all blocks of an earlier process were restored.

        Call it once, after the last call of restore().
        """
        used = [slot for slot, key in enumerate(self._keys) if key is not None]
        self._fresh = used[-1] + 1 if used else 0
        self._freed = [slot for slot in range(self._fresh) if self._keys[slot] is None]

    def _free(self, slot: int) -> None:
        self._keys[slot] = None
        self._freed.append(slot)

    def check(self) -> None:
        """Check with assertions that every slot has exactly one state.

        Only tests use this method.
        """
        ready, writing = set(self._ready.values()), set(self._writing.values())
        dropped = {s for s in range(self.slots) if self._keys[s] is None and self._pins[s]}
        freed, unused = set(self._freed), set(range(self._fresh, self.slots))
        states = [ready, writing, dropped, freed, unused]
        assert sum(map(len, states)) == self.slots == len(set().union(*states))
        assert set(self._idle) == {slot for slot in ready if not self._pins[slot]}
        assert all(self._keys[slot] == key for key, slot in self._ready.items())
        assert all(self._keys[slot] == key for key, slot in self._writing.items())
        assert not any(self._pins[slot] for slot in writing | freed | unused)
