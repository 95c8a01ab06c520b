"""The stream of KV events of one rank: its gaps, replays, and the blocks that it reports. No I/O.

The engine numbers its messages from 0. After a gap in the numbers, the missing messages are
requested again (a replay). If the engine offers no replays, all blocks of the rank are discarded.

The caller passes in the messages, the changes of the connection and the time. It also sends the
replay requests.
"""

from __future__ import annotations

from collections import deque

from xxhash import xxh3_64_intdigest

from gateway.fleet.kv_events.event_decoder import (
    Batch,
    ClearedCache,
    EventError,
    RemovedBlocks,
    StoredBlocks,
    decode_batch,
)
from policies.prefix.cached_blocks import CachedBlocks, SourceBlocks, scope_seed

MAX_HELD_MESSAGES, MAX_HELD_BYTES = 4096, 32 * 1024 * 1024
"""Limits on the messages that arrive during a replay and wait for its end: number, and bytes.

Beyond either, the rank's blocks are discarded, and its events are read from the next message on.
"""

REPLAY_TIMEOUT_S = 5.0
CHECK_S = 1.0
"""Seconds without a message until the source checks, by a replay, that none is missing.

A lost message usually shows as a gap before the next one. If it was the last one, no next message
shows it. The time begins at a connect and at every message.
"""

MAX_REPLAYS = 3
"""Maximum number of replays in a row that are requested for a gap in the messages.

If the gap is still there afterwards, the blocks from before it are discarded.
"""

MAX_SCOPES = 4096
_NEVER = float("-inf")


class EventSource:
    """The KV events of one engine rank: their order, the blocks that they report, and any gaps.

    A KV event reports that blocks of a prompt were cached or removed. The engine numbers its
    messages.

    blocks        the blocks that the rank has cached, according to its events
    block_tokens  tokens per block; 0 before the first event
    kv_tokens     tokens that the rank's memory holds; None while unknown
    lora_names    the names of the LoRA adapters of blocks seen so far
    is_connected  whether the subscription is established
    is_complete   whether every cached block has been reported, not only recently stored ones
    problem       why the events cannot be used at all; "" if they can
    replay_from   number of the first message to request again; None: no replay is needed. The
                  reader clears it when it sends the request
    batches       number of messages received
    gaps          how often messages were missing
    duplicates    number of messages that had been received before
    restarts      how often the engine's numbering began again
    """

    __slots__ = (
        *("_checks_at", "_group", "_has_replay", "_held", "_held_bytes", "_index"),
        *("_is_check", "_is_replaying", "_next"),
        *("_published_at", "_replay_began_at", "_replays", "_seeds", "_stored_tokens"),
        *("_verified", "batches", "block_tokens", "blocks", "duplicates", "gaps", "heard_at"),
        *("is_complete", "is_connected", "kv_tokens", "lora_names", "problem", "replay_from"),
        "restarts",
    )

    def __init__(self, index: CachedBlocks, *, has_replay: bool) -> None:
        self._index = index
        self.blocks = SourceBlocks(index)
        self._has_replay = has_replay
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = self._replays = self._stored_tokens = 0
        self._next: int | None = None
        self._published_at = self._replay_began_at = self.heard_at = _NEVER
        self._is_replaying = self._is_check = False
        self._checks_at: float | None = None
        self._verified: tuple[int, float] | None = None
        self._group: int | None = None
        self._seeds: dict[tuple[str, str], int] = {}
        self.lora_names: set[str] = set()
        self.block_tokens = 0
        self.kv_tokens: float | None = None
        self.is_connected = self.is_complete = False
        self.problem = ""
        self.replay_from: int | None = None
        self.batches = self.gaps = self.duplicates = self.restarts = 0

    @property
    def is_current(self) -> bool:
        """Return whether the events so far describe every cached block of the rank."""
        is_catching_up = self._is_replaying and not self._is_check
        return self.is_connected and self.is_complete and not is_catching_up and not self.problem

    @property
    def state(self) -> str:
        if self.problem:
            return self.problem
        if not self.is_connected:
            return "not connected"
        if self._is_replaying and not self._is_check:
            return "replaying"
        return "complete" if self.is_complete else "incomplete"

    # Connection

    def on_connected(self, now: float) -> None:
        """Record that the subscription is established, and request a replay of earlier events.

        `problem` is cleared, because an engine that has restarted may no longer have it.
        """
        self.is_connected, self.problem = True, ""
        self._checks_at = now + CHECK_S
        if not self._has_replay:
            self.reset()
        elif self._next:
            self._verified = self._next - 1, self._published_at
            self._request_replay(self._next - 1, now)
        else:
            self._request_replay(0, now)

    def on_disconnected(self) -> None:
        """Record that the subscription to KV events is lost.

        The blocks are kept at first. Only the next connection shows whether the engine has
        restarted; if so, they are discarded then.
        """
        self.is_connected = self._is_replaying = False
        self.replay_from = None
        self._drop_held()

    def reset(self) -> None:
        """Discard all blocks of the rank, and treat the next message as the first one."""
        self._forget()
        self._next = None
        self._published_at = _NEVER
        self._verified = None
        self._is_replaying, self.replay_from = False, None
        self._drop_held()

    def resynchronize(self, now: float) -> None:
        """Discard all blocks of the rank, and request a replay of all events it still has."""
        self.reset()
        if self._has_replay and self.is_connected:
            self._request_replay(0, now)

    def fail(self, problem: str) -> None:
        """Stop using the rank's KV events, because they cannot be read; `problem` says why."""
        self.reset()
        self.problem = problem

    # Messages

    def on_message(self, number: int, payload: bytes, now: float) -> None:
        self.heard_at = now
        self._checks_at = now + CHECK_S
        if self.problem:
            return
        if self._is_replaying or (self._next is None and self._has_replay):
            self._hold(number, payload)
            if not self._is_replaying and not self.problem:
                self._request_replay(0, now)
        else:
            self._apply_in_order(number, payload, now)

    def on_replayed(self, number: int, payload: bytes, now: float) -> None:
        if not self._awaits_replay or (batch := self._decode(payload)) is None:
            return
        self._replay_began_at = now
        if self._verified is not None:
            if self._verified != (number, batch.published_at):
                self._restart(now)
                return
            self._verified = None
        if self._next is not None and number < self._next:
            return
        self.gaps += self._is_check
        self._is_check = False
        if self._next is None or number > self._next:
            # Older messages are no longer in the engine's buffer.
            self._forget()
            self.is_complete = number == 0
        self._apply(number, batch)

    def on_replay_end(self, now: float) -> None:
        """Handle the end of a replay: apply the messages that arrived while it ran."""
        if not self._awaits_replay:
            return
        if self._verified is not None:  # the engine lacks the last message that was received
            self._restart(now)
            return
        self._is_replaying = False
        if self._next is None and not self._held:  # nothing has ever been published
            self._next, self.is_complete = 0, True
        self._apply_held(now)

    def _apply_held(self, now: float) -> None:
        # Apply the messages that waited; keep the rest if one of them needs another replay.
        held, self._held, self._held_bytes = self._held, deque(), 0
        while held and not self._is_replaying and not self.problem:
            self._apply_in_order(*held.popleft(), now)
        for number, payload in held:
            self._hold(number, payload)
        if not self._is_replaying:
            self._replays = 0

    @property
    def _awaits_replay(self) -> bool:
        return self._is_replaying and self.replay_from is None

    def tick(self, now: float) -> None:
        """Request a replay if a check is due, and give up on a replay that gets no response.

        The regular check finds messages that were lost while no later message shows the gap. An
        example is a message that was published before the engine knew of the subscription.
        """
        if self._checks_at is not None and now >= self._checks_at:
            self._checks_at = None
            can_check = self._has_replay and self.is_connected and not self._is_replaying
            if can_check and self._next is not None:
                if self._next:
                    self._verified = self._next - 1, self._published_at
                self._request_replay(max(0, self._next - 1), now)
                self._is_check = True
        if not self._is_replaying or now - self._replay_began_at <= REPLAY_TIMEOUT_S:
            return
        self._is_replaying, self.replay_from, self._verified = False, None, None
        if not self._is_check:
            self._forget()
            self._next, self._replays = None, MAX_REPLAYS
        self._apply_held(now)

    def _apply_in_order(self, number: int, payload: bytes, now: float) -> None:
        # Apply a message if it is the next one; otherwise find out what is missing.
        batch = self._decode(payload)
        if batch is None:
            return
        if self._next is None:
            self.is_complete = number == 0
        elif number < self._next:
            if batch.published_at <= self._published_at:
                self.duplicates += 1
                return
            self._restart(now)
            if self._is_replaying:
                self._hold(number, payload)
                return
            self.is_complete = number == 0
        elif number > self._next:
            self.gaps += 1
            if self._has_replay and self._replays < MAX_REPLAYS:
                self._replays += 1
                self._hold(number, payload)
                # `_next` is None if the message was too long to keep.
                self._request_replay(self._next or 0, now)
                return
            self._forget()
        self._apply(number, batch)

    def _restart(self, now: float) -> None:
        # Start over, because the engine has: its numbers have fallen back.
        self.restarts += 1
        replays = self._replays
        self.reset()
        self._replays = replays
        if self._has_replay:
            self._request_replay(0, now)

    def _request_replay(self, number: int, now: float) -> None:
        self.replay_from, self._is_replaying = number, True
        self._is_check = False
        self._replay_began_at = now

    def _hold(self, number: int, payload: bytes) -> None:
        self._held.append((number, payload))
        self._held_bytes += len(payload)
        if len(self._held) > MAX_HELD_MESSAGES or self._held_bytes > MAX_HELD_BYTES:
            self.gaps += 1
            self.reset()

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _forget(self) -> None:
        self.blocks.clear()
        self.is_complete = False
        self._stored_tokens = 0

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return decode_batch(payload)
        except EventError as error:
            self.fail(str(error))
            return None

    # Events

    def _apply(self, number: int, batch: Batch) -> None:
        self._next, self._published_at = number + 1, batch.published_at
        self.batches += 1
        try:
            for event in batch.events:
                if isinstance(event, StoredBlocks):
                    self._store(event)
                elif isinstance(event, RemovedBlocks):
                    if event.group is None or event.group == self._group:
                        self.blocks.remove(event.names, event.medium)
                else:
                    assert isinstance(event, ClearedCache)
                    self.blocks.clear()
                    self.is_complete = True
        except (OverflowError, TypeError) as error:
            self.fail(f"an event has invalid tokens: {error}")
            return
        if self._index.is_full:
            self.fail("the cached blocks do not fit into prefix.events")
        elif not self.is_complete and self.kv_tokens is not None:
            # So many tokens were stored that all blocks from before the first event are evicted.
            self.is_complete = self._stored_tokens >= self.kv_tokens

    def _store(self, event: StoredBlocks) -> None:
        if event.group is not None and event.group != self._group:
            # A hybrid model sends events for several groups of layers. Only a group with full
            # attention shows which blocks can be reused.
            if self._group is not None or not event.is_full_attention:
                return
            self._group = event.group
        self.block_tokens = event.block_tokens
        seed = 0
        if event.parent is None:
            seed = self._seed(event.lora_name, event.salt)
        further = event.further_keys
        mixed = tuple(xxh3_64_intdigest(key) if key else 0 for key in further) if further else ()
        self._stored_tokens += len(event.names) * event.block_tokens
        self.blocks.store(
            event.names,
            event.parent,
            event.tokens,
            event.block_tokens,
            medium=event.medium,
            seed=seed,
            mixed=mixed,
        )

    def _seed(self, lora_name: str, salt: str) -> int:
        seed = self._seeds.get((lora_name, salt))
        if seed is None:
            if lora_name and len(self.lora_names) < MAX_SCOPES:
                self.lora_names.add(lora_name)
            if len(self._seeds) >= MAX_SCOPES:
                self._seeds.clear()
            seed = self._seeds[lora_name, salt] = scope_seed(lora_name, salt)
        return seed
