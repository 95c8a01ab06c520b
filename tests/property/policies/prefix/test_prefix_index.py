"""Property tests of the index of cached prompts, against a simple model that stores all
prefixes.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.prefix.fingerprint import Fingerprint, Fingerprinter
from policies.prefix.holder_tables import HOLDER_COST_BYTES, TABLE_COST_BYTES
from policies.prefix.prefix_index import BLOCK_COST_BYTES, PrefixIndex

BLOCK = 8
PRINTS = Fingerprinter(b"0123456789abcdef", block_bytes=BLOCK)
SLOTS, MANY = 5, 48

prompts = st.lists(st.sampled_from([b"aaaaaaaa", b"bbbbbbbb", b"cccccccc"]), max_size=12).map(
    b"".join
)
tails = st.integers(0, 7).map(bytes)
slots = st.integers(0, SLOTS - 1)


def count_uses(index: PrefixIndex) -> dict[int, int]:
    # Return the number of blocks that use each table of holders.
    return Counter(holders for shard in index._shards for holders in shard.values() if holders < 0)


class Unbounded(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1 << 20)
        self.naive: list[set[bytes]] = [set() for _ in range(MANY)]
        self.asked: tuple[Fingerprint, bytes] | None = None

    def depth(self, slot: int, prompt: bytes) -> int:
        blocks = 0
        while prompt[: (blocks + 1) * BLOCK] in self.naive[slot] and (blocks + 1) * BLOCK <= len(
            prompt
        ):
            blocks += 1
        return blocks

    @rule(slot=slots, prompt=prompts, tail=tails)
    def insert(self, slot: int, prompt: bytes, tail: bytes) -> None:
        self.index.insert(PRINTS.fingerprint(b"s", prompt + tail), slot, len(prompt + tail))
        self.naive[slot] |= {prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)}

    @rule(first=st.integers(0, MANY), count=st.integers(1, MANY), prompt=prompts)
    def insert_at_many(self, first: int, count: int, prompt: bytes) -> None:
        for slot in range(first, min(MANY, first + count)):
            self.insert(slot, prompt, b"")

    @rule(slot=slots)
    def forget(self, slot: int) -> None:
        self.index.forget(slot)
        self.naive[slot].clear()

    @rule(first=st.integers(0, MANY), count=st.integers(1, MANY))
    def forget_many(self, first: int, count: int) -> None:
        for slot in range(first, min(MANY, first + count)):
            self.forget(slot)

    @invariant()
    def tables_have_as_many_blocks_as_use_them(self) -> None:
        tables = self.index.tables
        assert tables.blocks == count_uses(self.index)
        assert tables.stamps.keys() == tables.blocks.keys()
        holders = sum(map(len, tables.stamps.values()))
        assert tables.bytes == len(tables.blocks) * TABLE_COST_BYTES + holders * HOLDER_COST_BYTES

    @rule(slot=slots, prompt=prompts, kept=st.integers(0, 12))
    def trim(self, slot: int, prompt: bytes, kept: int) -> None:
        cut = prompt[: (kept + 1) * BLOCK]
        if len(cut) > kept * BLOCK:
            for gone in [known for known in self.naive[slot] if known.startswith(cut)]:
                self.index.trim(PRINTS.fingerprint(b"s", gone), slot, kept * BLOCK, len(gone))
                self.naive[slot].remove(gone)

    @rule(prompt=prompts, tail=tails)
    def match(self, prompt: bytes, tail: bytes) -> None:
        fingerprint = PRINTS.fingerprint(b"s", prompt + tail)
        believed = self.index.match(fingerprint, len(prompt + tail))
        expected = [self.depth(slot, prompt) * BLOCK for slot in range(MANY)]
        assert believed + [0] * (MANY - len(believed)) == expected
        holders = self.index.match_holders(fingerprint, len(prompt + tail))
        assert list(holders) == believed
        assert holders.longest == max(believed, default=0)
        self.asked = fingerprint, prompt

    @precondition(lambda self: self.asked is not None)
    @rule(slot=slots)
    def give_what_was_asked(self, slot: int) -> None:
        assert self.asked is not None
        fingerprint, prompt = self.asked
        self.index.insert(fingerprint, slot, fingerprint.n_bytes)
        self.naive[slot] |= {prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)}


class Bounded(RuleBasedStateMachine):
    cap = 64 * BLOCK_COST_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.cap)
        self.capacity: dict[int, int] = {}

    @rule(slot=slots, tokens=st.integers(1, 200))
    def set_capacity(self, slot: int, tokens: int) -> None:
        self.index.set_capacity(slot, tokens)
        self.capacity[slot] = tokens

    @rule(slot=slots, prompt=prompts, blocks=st.integers(0, 90))
    def insert(self, slot: int, prompt: bytes, blocks: int) -> None:
        self.index.insert(self.long(prompt, blocks), slot, len(prompt) + blocks * BLOCK)

    @rule(prompt=prompts, count=st.integers(1, MANY))
    def insert_at_many(self, prompt: bytes, count: int) -> None:
        for slot in range(SLOTS, SLOTS + count):
            self.insert(slot, prompt, 0)

    @rule(prompt=prompts, blocks=st.integers(0, 90))
    def match(self, prompt: bytes, blocks: int) -> None:
        tokens = len(prompt) + blocks * BLOCK
        assert all(
            0 <= believed <= tokens
            for believed in self.index.match(self.long(prompt, blocks), tokens)
        )

    @rule(slot=slots, believed=st.floats(0, 1), cached=st.floats(0, 1))
    def confirm(self, slot: int, believed: float, cached: float) -> None:
        self.index.confirm(slot, believed, cached)

    @rule(slot=slots, prompt=prompts, kept=st.integers(0, 100))
    def trim(self, slot: int, prompt: bytes, kept: int) -> None:
        self.index.trim(PRINTS.fingerprint(b"s", prompt), slot, kept, len(prompt))

    @precondition(lambda self: self.capacity)
    @rule(slot=slots)
    def forget(self, slot: int) -> None:
        self.index.forget(slot)

    @invariant()
    def bounds_hold(self) -> None:
        stats = self.index.stats()
        assert stats.bytes <= self.cap
        assert 0 <= stats.blocks == sum(map(len, self.index._shards)) <= 64
        assert self.index.tables.blocks == count_uses(self.index)
        for slot, count in enumerate(stats.cached_tokens):
            assert count >= 0
            if slot in self.capacity:
                # One generation is always alive: a prompt larger than the engine matches until the
                # next one comes.
                assert count <= max(self.capacity[slot], 102 * BLOCK)

    @staticmethod
    def long(prompt: bytes, blocks: int) -> Fingerprint:
        return PRINTS.fingerprint(b"s", prompt + b"z" * (blocks * BLOCK))


TestUnbounded = Unbounded.TestCase
TestUnbounded.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@given(inserts=st.lists(st.tuples(st.integers(0, 99), prompts, st.booleans()), max_size=60))
@settings(max_examples=30, deadline=None)
def test_holders_are_the_same_as_a_match_where_a_hundred_endpoints_hold_a_prefix(
    inserts: list[tuple[int, bytes, bool]],
) -> None:
    index, system = PrefixIndex(1 << 24), b"s" * 4 * BLOCK
    for slot in range(100):
        index.insert(PRINTS.fingerprint(b"", system + bytes([slot]) * BLOCK), slot, 5 * BLOCK)
    for slot, prompt, is_forgotten in inserts:
        if is_forgotten:
            index.forget(slot)
        index.insert(PRINTS.fingerprint(b"", system[: 2 * BLOCK] + prompt), slot, 2 * BLOCK)
        asked = PRINTS.fingerprint(b"", system + prompt)
        believed, holders = index.match(asked, 500), index.match_holders(asked, 500)
        assert list(holders) == believed
        assert holders.longest == max(believed)
