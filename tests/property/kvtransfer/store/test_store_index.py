"""Property tests of the records of a KV store, which say where each block is.

The place named for a block must always contain this block.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.store.block_keys import Key
from kvtransfer.store.store_index import IN_MEMORY, ON_DISK, StoreIndex, TierCopy

KEYS = [bytes([number]) * 32 for number in range(12)]
MEMORY_SLOTS, DISK_SLOTS, LEASE_S = 4, 5, 10.0
keys = st.sampled_from(KEYS)
runs = st.lists(keys, min_size=1, max_size=6, unique=True)
owners = st.integers(1, 3)


class StoreMachine(RuleBasedStateMachine):
    """A simulated KV store on which hypothesis performs writes, reads and copies in any order.

    memory  by place (slot) in memory: the key of the block there; None if it is empty or half
            written
    disk    the same for the slots on disk
    leased  for each reader's lease, the slots and the keys that were promised
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = StoreIndex(MEMORY_SLOTS, DISK_SLOTS, LEASE_S)
        self.now = 0.0
        self.memory: dict[int, Key | None] = {}
        self.disk: dict[int, Key | None] = {}
        self.writing: dict[Key, int] = {}
        self.saving: list[TierCopy] = []
        self.loading: list[TierCopy] = []
        self.leased: dict[int, tuple[int, float, list[tuple[int, Key]]]] = {}

    def begin(self, slot: int, tier: dict[int, Key | None]) -> None:
        # Do what a store does before it writes to a slot: from now on the slot's bytes are invalid.
        tier[slot] = None

    @rule(key=keys)
    def write_begins(self, key: Key) -> None:
        known = self.index.places(key) or key in self.writing
        slot = self.index.begin_write(key, self.now)
        self.forget_expired()
        if slot is not None:
            assert not known
            self.begin(slot, self.memory)
            self.writing[key] = slot

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), is_complete=st.booleans())
    def write_ends(self, data: st.DataObject, is_complete: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(key)
        if is_complete:
            self.memory[slot] = key
        self.index.end_write(key, is_complete=is_complete)

    @rule(owner=owners, wanted=runs)
    def reader_acquires(self, owner: int, wanted: list[Key]) -> None:
        number, slots = self.index.acquire(owner, wanted, self.now)
        self.forget_expired()
        promised = list(zip(slots, wanted, strict=False))
        self.leased[number] = owner, self.now + LEASE_S, promised
        if len(slots) < len(wanted):
            assert not self.index.places(wanted[len(slots)]) & IN_MEMORY

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), owner=owners)
    def reader_releases(self, data: st.DataObject, owner: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.leased)))
        self.index.release(owner, number)
        if self.leased[number][0] == owner:
            del self.leased[number]

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def two_leases_of_a_reader_are_joined(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.leased)))
        owner = self.leased[number][0]
        more, slots = self.index.acquire(owner, KEYS[:2], self.now)
        self.forget_expired()
        earlier = self.leased.pop(number, (owner, 0.0, []))[2]
        self.index.join(owner, number, more)
        later = list(zip(slots, KEYS, strict=False))
        self.leased[more] = owner, self.now + LEASE_S, earlier + later

    @rule(owner=owners)
    def reader_is_killed(self, owner: int) -> None:
        self.index.end_owner(owner)
        self.leased = {n: lease for n, lease in self.leased.items() if lease[0] != owner}

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def forget_expired(self) -> None:
        # Drop expired leases: their blocks may be evicted.
        self.leased = {n: lease for n, lease in self.leased.items() if lease[1] > self.now}

    @rule(used=runs)
    def blocks_are_used(self, used: list[Key]) -> None:
        self.index.use(used)

    @rule()
    def save_begins(self) -> None:
        copy = self.index.begin_save()
        if copy is not None:
            assert self.memory[copy.memory_slot] == copy.key
            self.begin(copy.disk_slot, self.disk)
            self.saving.append(copy)

    @precondition(lambda self: self.saving)
    @rule(is_complete=st.booleans())
    def save_ends(self, is_complete: bool) -> None:
        copy = self.saving.pop(0)
        assert self.memory[copy.memory_slot] == copy.key, "the block was pinned"
        if is_complete:
            self.disk[copy.disk_slot] = copy.key
        self.index.end_save(copy, is_complete=is_complete)

    @rule(key=keys)
    def load_begins(self, key: Key) -> None:
        copy = self.index.begin_load(key, self.now)
        self.forget_expired()
        if copy is not None:
            assert self.disk[copy.disk_slot] == key
            self.begin(copy.memory_slot, self.memory)
            self.loading.append(copy)

    @precondition(lambda self: self.loading)
    @rule(end=st.sampled_from(["intact", "corrupt", "unreadable"]))
    def load_ends(self, end: str) -> None:
        copy = self.loading.pop(0)
        assert self.disk[copy.disk_slot] == copy.key, "the block was pinned"
        if end == "intact":
            self.memory[copy.memory_slot] = copy.key
        self.index.end_load(copy, is_intact=end == "intact", is_readable=end != "unreadable")
        if end == "corrupt":
            assert not self.index.places(copy.key) & ON_DISK

    @invariant()
    def a_found_block_has_its_bytes(self) -> None:
        for key in KEYS:
            slot = self.index.memory.find(key)
            assert slot is None or self.memory[slot] == key
            slot = self.index.disk.find(key)
            assert slot is None or self.disk[slot] == key

    @invariant()
    def the_slots_of_a_lease_keep_their_bytes(self) -> None:
        for _, expires_s, promised in self.leased.values():
            if expires_s > self.now:
                assert all(self.memory[slot] == key for slot, key in promised)

    @invariant()
    def the_bounds_hold(self) -> None:
        self.index.check()
        assert self.index.memory.taken <= MEMORY_SLOTS
        assert self.index.disk.taken <= DISK_SLOTS
        assert set(self.memory) <= set(range(MEMORY_SLOTS))
        assert set(self.disk) <= set(range(DISK_SLOTS))

    def teardown(self) -> None:
        # Once every participant has ended, all of memory can be used again.
        for key in sorted(self.writing):
            self.index.end_write(key, is_complete=False)
        for copy in self.saving:
            self.index.end_save(copy, is_complete=False)
        for copy in self.loading:
            self.index.end_load(copy, is_intact=False, is_readable=False)
        self.index.expire(self.now + LEASE_S)
        assert self.index.leases == 0
        fresh = [bytes([100 + number]) * 32 for number in range(MEMORY_SLOTS)]
        assert all(self.index.begin_write(key, self.now) is not None for key in fresh)


TestStoreIndex = StoreMachine.TestCase
TestStoreIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
