"""Gives another agent access over RDMA to the memory of one transfer's blocks, and to no other.

A device writes to memory for which it has a key. There is one key per range of adjacent blocks of
each rank, and the other agent writes directly into the blocks. If this needs too many keys, it may
write to a staging buffer instead, from which the bytes are copied to the blocks.

A key must not cover the gaps between blocks, because a device refuses only writes that no key
covers. link.py decides when a permission begins and ends.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import Blocks, Region
from kvtransfer.transport_interface import TransportError

MOST_KEYS = 512

_KEY = np.dtype(
    [("rank", "<u2"), ("first", "<i8"), ("length", "<i8"), ("address", "<u8"), ("key", "<u4")]
)
_IN_PLACE, _STAGED = b"\0", b"\1"


class RegisteredHandle(Protocol):
    """The interface of memory to which another agent may write by RDMA, until it is closed."""

    remote_key: int

    def close(self) -> None: ...


class Registry(Protocol):
    """The interface of an RDMA device by which memory is opened for another agent's writes."""

    def register(
        self, address: int, length: int, *, writable_by_peer: bool
    ) -> RegisteredHandle: ...


class RankRange(NamedTuple):
    """A contiguous range of bytes in the KV memory of one rank."""

    rank: int
    first: int
    length: int


class Write(NamedTuple):
    """A request to an RDMA device to write pieces of local memory to the other agent's memory.

    The pieces are written one after another, to consecutive addresses.

    address  first remote address
    key      key of the remote memory
    pieces   (offset in the source's region, length in bytes) of each piece
    """

    address: int
    key: int
    pieces: list[tuple[int, int]]


def rank_ranges(regions: Sequence[Region], blocks: Blocks) -> list[RankRange]:
    """Return which bytes of each rank's memory these KV blocks occupy; adjacent blocks are one
    range.

    Raises ValueError for a block outside the regions.
    """
    numbers = np.unique(np.asarray(blocks, np.int64))
    if numbers.size and (numbers[0] < 0 or numbers[-1] >= min(region.blocks for region in regions)):
        raise ValueError(
            f"the block numbers {numbers[0]} to {numbers[-1]} are not all within the region, "
            f"whose blocks are 0 to {min(region.blocks for region in regions) - 1}"
        )
    begins = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    counts = np.diff(np.append(begins, numbers.size))
    return [
        RankRange(rank, first * region.block_bytes, count * region.block_bytes)
        for rank, region in enumerate(regions)
        for first, count in zip(numbers[begins].tolist(), counts.tolist(), strict=True)
    ]


class GrantedMemory:
    """The memory to which another agent may write the KV of one transfer over RDMA, until `close`.

    grant  data that the other agent needs for writing; b"" if the memory could not be registered
    """

    def __init__(
        self, registry: Registry, regions: Sequence[Region], blocks: Blocks, most_keys: int
    ) -> None:
        self._open: list[RegisteredHandle] = []
        self.arena: NDArray[np.uint8] | None = None
        self.grant = self._register(registry, regions, rank_ranges(regions, blocks), most_keys)

    def _register(
        self, registry: Registry, regions: Sequence[Region], wanted: list[RankRange], most_keys: int
    ) -> bytes:
        # Register the memory and return the data for the peer; b"" if the device refuses.
        table = np.zeros(1 if len(wanted) > most_keys else len(wanted), _KEY)
        try:
            if len(wanted) > most_keys:
                n_bytes = sum(stretch.length for stretch in wanted)
                self.arena = np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
                table[0] = self._add(registry, RankRange(0, 0, n_bytes), self.arena)
            else:
                for row, stretch in enumerate(wanted):
                    table[row] = self._add(registry, stretch, regions[stretch.rank].bytes)
        except (TransportError, OSError):
            with suppress(TransportError):  # retried by the next `close`
                self.close()
            return b""
        return (_IN_PLACE if self.arena is None else _STAGED) + table.tobytes()

    def _add(
        self, registry: Registry, stretch: RankRange, memory: NDArray[np.uint8]
    ) -> tuple[int, ...]:
        address: int = memory.__array_interface__["data"][0] + stretch.first
        registered = registry.register(address, stretch.length, writable_by_peer=True)
        self._open.append(registered)
        return *stretch, address, registered.remote_key

    def check_arrival(
        self, runs: ByteRuns, region: Region, offset: int | None, digest: int | None
    ) -> bool:
        """Return whether received KV equals what the other agent has read from its memory.

        Bytes in the staging buffer are copied to their blocks first.

        offset  position in the staging buffer; None: the bytes were written directly into the
                blocks
        digest  the source's xxh3-64 checksum; None: the bytes are not checked
        """
        if (offset is None) != (self.arena is None):
            return False
        if self.arena is not None and offset is not None:
            staged = self.arena[offset : offset + runs.n_bytes]
            if staged.size != runs.n_bytes:
                return False
            _scatter(staged, runs, region)
        return digest is None or digest == digest_of(region, runs.dst, runs.length)

    def close(self) -> None:
        """Withdraw the permission: no other agent can write to this memory by RDMA any more.

        Raises TransportError if the device fails. The next call then tries again.
        """
        remaining: list[RegisteredHandle] = []
        error: TransportError | None = None
        for registered in self._open:
            try:
                registered.close()
            except TransportError as failure:
                remaining.append(registered)
                error = failure
        self._open = remaining
        if error is not None:
            raise error
        self.arena = None


class RemoteGrant:
    """The receiver's permission to write to its memory over RDMA, as the sending agent uses it.

    Raises TransportError for invalid data.
    """

    def __init__(self, data: bytes) -> None:
        kind, body = data[:1], data[1:]
        if (
            kind not in (_IN_PLACE, _STAGED)
            or len(body) % _KEY.itemsize
            or (kind == _STAGED) > (len(body) > 0)
        ):
            raise TransportError(
                f"a received permission to write to memory is invalid ({len(data)} bytes)"
            )
        self._keys = np.sort(np.frombuffer(body, _KEY), order=("rank", "first"))
        self.staged = kind == _STAGED
        self._next = 0

    def claim(self, n_bytes: int) -> int | None:
        """Reserve the next `n_bytes` bytes of the receiver's staging buffer, and return their
        offset.

        Returns None if the receiver uses no staging buffer.
        """
        if not self.staged:
            return None
        offset = self._next
        self._next += n_bytes
        return offset

    def writes(
        self, runs: ByteRuns, dst_rank: int, staging_offset: int | None, gather: int
    ) -> list[Write]:
        """Return the requests to the RDMA device by which one unit of KV (window) is written.

        runs            the window's byte ranges
        dst_rank        rank of the receiving engine
        staging_offset  position in the staging buffer; None: write directly into the blocks
        gather          maximum number of byte ranges in one request; ranges that are adjacent at
                        the receiver are combined

        Raises TransportError for bytes outside the permitted memory.
        """
        if staging_offset is None:
            keys, offsets = self._keys[self._keys["rank"] == dst_rank], runs.dst
        else:
            keys, offsets = self._keys, staging_offset + np.cumsum(runs.length) - runs.length
        indices = np.searchsorted(keys["first"], offsets, "right") - 1
        if indices.size and indices.min() < 0:
            raise TransportError(
                "a window of KV begins before the memory to which the sink permits writes"
            )
        chosen = keys[indices]
        key_offsets = offsets - chosen["first"]
        if (key_offsets + runs.length > chosen["length"]).any():
            raise TransportError(
                "a window of KV exceeds the memory to which the sink permits writes"
            )
        targets = chosen["address"] + key_offsets.astype(np.uint64)
        return list(_combine(targets, chosen["key"], runs, gather))


def _combine(
    targets: NDArray[np.uint64], keys: NDArray[np.uint32], runs: ByteRuns, gather: int
) -> Iterator[Write]:
    pending: Write | None = None
    end = 0
    columns = (targets.tolist(), keys.tolist(), runs.src.tolist(), runs.length.tolist())
    for target, key, src, length in zip(*columns, strict=True):
        if (
            pending is not None
            and target == end
            and key == pending.key
            and len(pending.pieces) < gather
        ):
            pending.pieces.append((src, length))
        else:
            if pending is not None:
                yield pending
            pending = Write(target, key, [(src, length)])
        end = target + length
    if pending is not None:
        yield pending


def digest_of(region: Region, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Return the xxh3-64 checksum of these pieces of a region in order."""
    state, memory = xxhash.xxh3_64(), region.bytes.data
    for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        state.update(memory[start : start + length])
    return state.intdigest()


def _scatter(staged: NDArray[np.uint8], runs: ByteRuns, region: Region) -> None:
    offset, memory = 0, region.bytes
    for start, length in zip(runs.dst.tolist(), runs.length.tolist(), strict=True):
        memory[start : start + length] = staged[offset : offset + length]
        offset += length
