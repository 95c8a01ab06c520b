"""StoreClient: an engine's connection to the store of its host."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kvtransfer.store.block_keys import Key
from kvtransfer.store.slot_format import Parts, SlotGeometry, SlotReader, digest_of
from kvtransfer.store.socket_io import (
    ConnectionEndedError,
    receive_exactly,
    receive_message,
    send_parts,
)
from kvtransfer.store.store_messages import (
    LENGTH_BYTES,
    MAX_KEYS,
    MAX_PUT_KEYS,
    VERSION,
    AcquireBlocks,
    CountPrefix,
    FindPlaces,
    GetStats,
    Greeting,
    LeasedSlots,
    Places,
    PrefixCount,
    PutBlocks,
    ReleaseLease,
    StatsReport,
    StoredCount,
    StoreDescription,
    StoreProtocolError,
    ToStore,
    UseBlocks,
    Wanted,
    body_length,
    decode_answer,
    encode,
)

LEASE_BLOCKS = 64
"""Number of blocks that one lease covers.

A reader of more blocks takes one lease after another, so it pins a bounded part of the store's
memory.
"""

Answer = TypeVar("Answer")


class StoreLostError(Exception):
    """Raised if the store cannot be reached, or has ended. Its blocks then count as missing."""


class StoreClient:
    """Reads and writes blocks of one store. Methods block, and may be called from any thread.

    path       path of the store's Unix socket
    timeout_s  maximum seconds without a response

    After the connection has failed, every method but `close` raises StoreLostError.
    """

    def __init__(self, path: Path, timeout_s: float = 10.0) -> None:
        self._lock = threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._reader: SlotReader | None = None
        try:
            self._connection.settimeout(timeout_s)
            self._connection.connect(str(path))
            self._reader = self._greet()
        except (OSError, ConnectionEndedError, StoreProtocolError) as error:
            self._connection.close()
            raise StoreLostError(
                f"no store can be reached at {path}: {error}; start it with python -m "
                "kvtransfer.store"
            ) from error

    def _greet(self) -> SlotReader:
        self._connection.sendall(encode(Greeting(VERSION)))
        prefix, fds, _, _ = socket.recv_fds(self._connection, LENGTH_BYTES, 1)
        try:
            if not prefix or not fds:
                raise ConnectionEndedError(
                    "the store closed the connection before its greeting; it may have too "
                    "many clients, or run as another user"
                )
            prefix += receive_exactly(self._connection, LENGTH_BYTES - len(prefix))
            answer = decode_answer(receive_exactly(self._connection, body_length(prefix)))
            if not isinstance(answer, StoreDescription) or answer.version != VERSION:
                raise StoreProtocolError(
                    f"the store did not greet with protocol version {VERSION}, which this client "
                    "has; use the same version of both"
                )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        os.set_inheritable(fds[0], False)
        return SlotReader(fds[0], answer.geometry)

    @property
    def geometry(self) -> SlotGeometry:
        """The number of blocks that fit into the store's memory, and the maximum bytes of a
        block.
        """
        return self._slots().geometry

    def count_prefix(self, keys: Sequence[Key]) -> int:
        """Return how many blocks of a prompt are stored, up to the first missing one."""
        count = 0
        for first in range(0, len(keys), MAX_KEYS):
            batch = list(keys[first : first + MAX_KEYS])
            found = self._ask(CountPrefix(batch), PrefixCount).count
            count += found
            if found < len(batch):
                break
        return count

    def places(self, keys: Sequence[Key]) -> bytes:
        """Return for each block in which tiers of the store it is: a byte with bits IN_MEMORY and
        ON_DISK.

        0 means that the block is missing.
        """
        batches = [keys[first : first + MAX_KEYS] for first in range(0, len(keys), MAX_KEYS)]
        return b"".join(self._ask(FindPlaces(list(batch)), Places).bits for batch in batches)

    def put(self, keys: Sequence[Key], blocks: Sequence[Parts]) -> int:
        """Save blocks: send those that the store does not have, and return how many it stored.

        blocks  the bytes of each key's block, in pieces. They must not change during the call. A
                block may be shorter than the store's maximum
        """
        stored = 0
        for first in range(0, len(keys), MAX_PUT_KEYS):
            batch = slice(first, first + MAX_PUT_KEYS)
            stored += self._put(list(keys[batch]), blocks[batch])
        return stored

    def _put(self, keys: list[Key], blocks: Sequence[Parts]) -> int:
        lengths = [sum(part.nbytes for part in parts) for parts in blocks]
        if max(lengths, default=0) > self.geometry.slot_bytes:
            raise ValueError(
                f"a block is too large: this store accepts at most {self.geometry.slot_bytes} bytes"
            )
        with self._lock:
            wanted = self._exchange(PutBlocks(keys, lengths), Wanted)
            try:
                for index in wanted.indexes:
                    parts = blocks[index]
                    send_parts(self._connection, [memoryview(digest_of(parts)), *parts])
            except (OSError, IndexError) as error:
                raise self._lost(error) from error
            return self._exchange(None, StoredCount).count

    def get(self, keys: Sequence[Key], blocks: Sequence[Parts]) -> int:
        """Copy blocks from the store into `blocks`, from the first key on, until one is missing.

        Returns how many blocks were copied and verified. The memory of the other blocks may have
        been overwritten, and must not be used.
        """
        done = 0
        while done < len(keys):
            batch = list(keys[done : done + LEASE_BLOCKS])
            lease = self._ask(AcquireBlocks(batch), LeasedSlots)
            try:
                copied = self._copy(batch, lease.slots, blocks[done : done + LEASE_BLOCKS])
            finally:
                self._send(ReleaseLease(lease.lease))
            done += copied
            # A lease may be shorter than the stored prefix, where memory has no room for more.
            if not copied or copied < len(lease.slots):
                break
        for first in reversed(range(0, done, MAX_KEYS)):
            self._send(UseBlocks(list(keys[first : min(done, first + MAX_KEYS)])))
        return done

    def _copy(self, keys: list[Key], slots: list[int], blocks: Sequence[Parts]) -> int:
        reader = self._slots()
        copied = 0
        for key, slot, parts in zip(keys, slots, blocks, strict=False):
            try:
                outcome = reader.read(slot, key, parts)
            except OSError as error:
                raise self._lost(error) from error
            if not outcome.is_intact:
                break
            copied += 1
        return copied

    def stats(self) -> dict[str, int]:
        """Return the store's counters and its numbers of blocks, as BlockStore.stats() does."""
        return self._ask(GetStats(), StatsReport).values

    def close(self) -> None:
        """Close the connection, which ends all leases. May be called twice."""
        self._connection.close()
        reader, self._reader = self._reader, None
        if reader is not None:
            os.close(reader.fd)

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _slots(self) -> SlotReader:
        reader = self._reader
        if reader is None:
            raise StoreLostError("this connection to the KV store has been closed")
        return reader

    def _ask(self, request: ToStore, kind: type[Answer]) -> Answer:
        with self._lock:
            return self._exchange(request, kind)

    def _send(self, request: ToStore) -> None:
        with self._lock:
            try:
                self._connection.sendall(encode(request))
            except OSError as error:
                raise self._lost(error) from error

    def _exchange(self, request: ToStore | None, kind: type[Answer]) -> Answer:
        # Send a request, if there is one, and return the next answer, which must be of `kind`.
        try:
            if request is not None:
                self._connection.sendall(encode(request))
            answer = decode_answer(receive_message(self._connection))
            if not isinstance(answer, kind):
                raise StoreProtocolError(
                    f"the store answered {type(answer).__name__} instead of {kind.__name__}"
                )
        except (OSError, ConnectionEndedError, StoreProtocolError) as error:
            raise self._lost(error) from error
        return answer

    def _lost(self, error: Exception) -> StoreLostError:
        # Answers would no longer fit their requests, so the connection ends.
        self._connection.close()
        return StoreLostError(
            f"the connection to the KV store is lost: {error or type(error).__name__}"
        )
