"""Builds the KV events of one engine: numbered batches of changes of its prefix cache.

The scheduler reports the changes, and this module returns the messages to publish. In vLLM's
format, consecutive blocks of a request are one event; in SGLang's, each block is one event.
delivery_faults.py loses, delays, repeats or reorders messages if such faults are injected. This
module does no I/O; the sockets are in zmq_publisher.py.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from mockgpu.fault_grammar import FaultKind
from mockgpu.kv_events.delivery_faults import FaultyDelivery, Message
from mockgpu.scheduler import Job

FORMS = ("map", "array", "sglang")
"""The formats of KV events.

map     maps, as of vLLM 0.24 and newer
array   arrays, as of older versions of vLLM
sglang  maps with signed hashes, as of SGLang
"""

_TOKEN_BYTES = 4
_encode = msgspec.msgpack.encode


class KvEventSpec(msgspec.Struct, frozen=True):
    """How a mock engine publishes KV events.

    port          port on which events are published; 0: any free port
    replay_port   port on which clients request missed events again; 0: any free port
    topic         ZeroMQ topic of the messages
    form          format of the events, one of FORMS
    buffer_steps  number of recent messages that clients can request again
    rank          data-parallel rank
    """

    port: int = 0
    replay_port: int = 0
    topic: str = "kv"
    form: str = "map"
    buffer_steps: int = 10_000
    rank: int = 0

    def of_rank(self, rank: int, ranks: int) -> KvEventSpec:
        """Return the KV event options of one data-parallel rank, with its own two ports.

        With two ranks and port 5000, the event ports are 5000 and 5001, the replay ports 5002 and
        5003.
        """
        if not self.port:
            return msgspec.structs.replace(self, rank=rank)
        replay_port = self.port + ranks + rank
        return msgspec.structs.replace(
            self, port=self.port + rank, replay_port=replay_port, rank=rank
        )


class KvEventStream:
    """Collects the KV events of one engine, and returns them as numbered messages to publish.

    Injected faults may change which messages are published, and when.
    """

    def __init__(
        self, spec: KvEventSpec, block_tokens: int, strikes: Callable[[FaultKind], bool]
    ) -> None:
        """Create an empty stream of KV events.

        `strikes(kind)` returns whether an injected fault of this kind hits the next message.
        """
        self._spec = spec
        self._block_tokens = block_tokens
        self.delivery = FaultyDelivery(strikes)
        self._events: list[Any] = []
        self._run: tuple[Job, int, int, str] | None = None
        self._buffer: deque[Message] = deque(maxlen=spec.buffer_steps)
        self.next_number = 0
        self.clears = 0  # how often subscribers were made to forget all blocks

    @property
    def has_events(self) -> bool:
        return bool(self._events) or self._run is not None

    def hash_of(self, key: int) -> int:
        """Return the hash by which KV events name a block.

        The block's key in the prefix cache is an unsigned number of 64 bits. It is also the hash,
        except for SGLang, where hashes are signed.
        """
        return key - (1 << 64) if self._spec.form == "sglang" and key >> 63 else key

    def on_stored(self, job: Job, index: int, medium: str = "GPU") -> None:
        """Record an event: block number `index` of a job is now stored in `medium`.

        The medium is "GPU" (the engine's prefix cache), "CPU" or "STORAGE" (memory and disk of the
        host's store of KV blocks).
        """
        if self._run is not None:
            last_job, first, end, last_medium = self._run
            follows = job is last_job and index == end and medium == last_medium
            if follows and self._spec.form != "sglang":
                self._run = job, first, index + 1, medium
                return
            self._end_run()
        self._run = job, index, index + 1, medium

    def _end_run(self) -> None:
        # Append the event of the consecutive blocks that were stored last.
        if self._run is None:
            return
        (job, first, end, medium), self._run = self._run, None
        size, keys = self._block_tokens, job.keys
        data = job.tokens[first * size * _TOKEN_BYTES : end * size * _TOKEN_BYTES]
        parent = self.hash_of(keys[first - 1]) if first else None
        names, tokens = [self.hash_of(key) for key in keys[first:end]], array("I", data).tolist()
        extra = [[job.salt], *[None] * (end - 1)] if job.salt and not first else None
        if self._spec.form == "array":
            members = ["BlockStored", names, parent, tokens, size, None, medium, None, extra]
            self._events.append(members if extra else members[:7])
            return
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": size,
            "medium": medium,
        }
        if self._spec.form == "sglang":
            event |= {"cache_salt": job.salt} if job.salt else {}
        elif extra:
            event["extra_keys"] = extra
        self._events.append(event)

    def on_removed(self, key: int, medium: str = "GPU") -> None:
        """Record an event: the block with this key was removed from `medium`; see on_stored()."""
        self._end_run()
        if self._spec.form == "array":
            self._events.append(["BlockRemoved", [self.hash_of(key)], medium])
        else:
            name = self.hash_of(key)
            event = {"type": "BlockRemoved", "block_hashes": [name], "medium": medium}
            self._events.append(event)

    def on_cleared(self) -> None:
        self._end_run()
        self.clears += 1
        cleared = "AllBlocksCleared"
        self._events.append([cleared] if self._spec.form == "array" else {"type": cleared})

    def flush(self, wall_s: float, now: float) -> list[Message]:
        """Return the messages to publish now: one batch of all new events, and delayed messages.

        wall_s  timestamp of the batch, in Unix seconds
        now     monotonic time in seconds
        """
        self._end_run()
        ready = self.delivery.due(now)
        if not self._events:
            return ready
        message = self.next_number, _encode([wall_s, self._events, self._spec.rank])
        self._events = []
        self.next_number += 1
        self._buffer.append(message)
        return self.delivery.deliver(message, now) + ready

    def replay(self, start: int) -> list[Message]:
        """Return recent messages from number `start` on, for a subscriber that missed them."""
        return [message for message in self._buffer if message[0] >= start]

    def restart(self) -> None:
        """Restart the numbers of messages at 0 with an empty buffer, like a restarted engine."""
        self._events, self._run = [], None
        self.clears += 1
        self._buffer.clear()
        self.delivery.clear()
        self.next_number = 0
