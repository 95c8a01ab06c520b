"""Property tests of the reader of KV events, by which an engine reports its cached blocks.

Messages are lost, repeated or out of order, and the engine restarts. The expected result comes from
a model of the engine's cache.
"""

from __future__ import annotations

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.kv_events.rank_event_stream import CHECK_S, REPLAY_TIMEOUT_S, EventSource
from policies.prefix.cached_blocks import CachedBlocks, chain_keys, scope_seed

SIZE = 4
PROMPTS = [[family, *range(step * SIZE - 1)] for family in (1, 2, 3) for step in (1, 3, 6)]
FAULTS = ("none", "none", "lost", "doubled", "held")


class ModelEngine:
    def __init__(self, source: EventSource, room: int, buffered: int) -> None:
        self.source, self.room, self.buffered = source, room, buffered
        self.cached: dict[int, int] = {}  # content key by hash, oldest first
        self.number, self.time, self.epoch = 0, 100.0, 0
        self.buffer: list[tuple[int, bytes]] = []
        self.held: list[tuple[int, bytes]] = []
        self.has_replay = buffered > 0

    def compute(self, prompt: list[int], fault: str) -> None:
        events: list[object] = []
        keys = chain_keys(prompt, SIZE, scope_seed("", ""))
        names = [key ^ self.epoch for key in keys]
        for place, (name, key) in enumerate(zip(names, keys, strict=True)):
            if name in self.cached:
                self.cached[name] = self.cached.pop(name)
                continue
            tokens = prompt[place * SIZE : (place + 1) * SIZE]
            parent = names[place - 1] if place else None
            self.cached[name] = key
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [name],
                    "parent_block_hash": parent,
                    "token_ids": tokens,
                    "block_size": SIZE,
                }
            )
        # The end of the prompt is evicted before its beginning.
        for name in names:
            self.cached[name] = self.cached.pop(name)
        while len(self.cached) > self.room:
            oldest = next(iter(self.cached))
            chain = [name for name in names if name in self.cached]
            victim = chain[-1] if oldest == (chain or [0])[0] else oldest
            del self.cached[victim]
            events.append({"type": "BlockRemoved", "block_hashes": [victim]})
        self.publish(events, fault)

    def publish(self, events: list[object], fault: str) -> None:
        if not events:
            return
        self.time += 1
        message = self.number, msgpack.packb([self.time, events, 0])
        self.number += 1
        self.buffer = [*self.buffer, message][-self.buffered :] if self.has_replay else []
        copies = {"lost": [], "doubled": [message] * 2, "held": []}.get(fault, [message])
        if self.source.is_connected:
            for copy in copies:
                self.deliver(copy)
            if fault == "held":
                self.held.append(message)
            else:
                held, self.held = self.held, []
                for late in held:
                    self.deliver(late)

    def deliver(self, message: tuple[int, bytes]) -> None:
        self.source.on_message(*message, self.time)

    def answer_replay(self) -> None:
        while (start := self.source.replay_from) is not None:
            self.source.replay_from = None
            for number, payload in self.buffer:
                if number >= start:
                    self.source.on_replayed(number, payload, self.time)
            self.source.on_replay_end(self.time)

    def restart(self) -> None:
        self.cached.clear()
        self.buffer.clear()
        self.held.clear()
        self.number, self.epoch = 0, self.epoch + 1
        self.disconnect()

    def disconnect(self) -> None:
        self.held.clear()
        self.source.on_disconnected()
        self.source.on_connected(self.time)

    def settle(self) -> None:
        for _ in range(3):
            self.compute([9, self.number, *range(2)], "none")
            self.answer_replay()
            self.time += max(CHECK_S, REPLAY_TIMEOUT_S) + 1
            self.source.tick(self.time)
            self.answer_replay()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("compute"), st.sampled_from(PROMPTS), st.sampled_from(FAULTS)),
        st.tuples(st.just("replay")),
        st.tuples(st.just("disconnect")),
        st.tuples(st.just("restart")),
    ),
    max_size=40,
)


def run(engine: ModelEngine, actions: list[tuple[object, ...]]) -> None:
    engine.source.on_connected(engine.time)
    for action in actions:
        match action:
            case ("compute", list(prompt), str(fault)):
                engine.compute(prompt, fault)
            case ("replay",):
                engine.answer_replay()
            case ("disconnect",):
                engine.disconnect()
            case ("restart",):
                engine.restart()
    engine.settle()


def check_truth(engine: ModelEngine, index: CachedBlocks) -> None:
    source = engine.source
    assert source.blocks.hashes() == set(engine.cached)
    while index.purge():
        pass
    held = {key for key, bits in index.holders.items() if bits & source.blocks.bit}
    assert held == set(engine.cached.values())
    assert index.blocks == len(engine.cached)


@settings(deadline=None, max_examples=120)
@given(steps)
def test_with_replay_a_source_is_complete_and_equal_to_the_cache_at_rest(
    actions: list[tuple[object, ...]],
) -> None:
    index = CachedBlocks(1 << 20)
    engine = ModelEngine(EventSource(index, has_replay=True), 12, 10_000)
    run(engine, actions)
    assert engine.source.is_current
    check_truth(engine, index)


@settings(deadline=None, max_examples=120)
@given(steps, st.integers(0, 3))
def test_a_source_that_says_it_is_current_is_right_however_little_is_replayed(
    actions: list[tuple[object, ...]], buffered: int
) -> None:
    index = CachedBlocks(1 << 20)
    engine = ModelEngine(EventSource(index, has_replay=buffered > 0), 12, buffered)
    run(engine, actions)
    if engine.source.is_current:
        check_truth(engine, index)
