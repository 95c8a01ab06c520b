"""Tests of sending and receiving KV over RDMA without a device: keys, writes, control messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import TransportError, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.rdma.control import (
    ControlDecoder,
    ControlMessage,
    GrantWithdrawn,
    OwnerMessage,
    QueuePairReady,
    QueuePairSetup,
    RdmaTrailer,
    encode,
)
from kvtransfer.transports.rdma.memory_grants import (
    GrantedMemory,
    RemoteGrant,
    digest_of,
    rank_ranges,
)
from kvtransfer.transports.rdma.receiver import RdmaReceiver
from kvtransfer.transports.rdma.sender import OutgoingWindow, RdmaSender
from kvtransfer.transports.rdma.verbs import LocalRange, QueuePairAddress

BLOCK, BLOCKS = 64, 32


class Key:
    def __init__(self, number: int) -> None:
        self.remote_key, self.open, self.stuck = number, True, 0

    def close(self) -> None:
        if self.stuck:
            self.stuck -= 1
            raise TransportError("the test's memory cannot be deregistered")
        self.open = False


class Registry:
    def __init__(self, room: int = 1 << 30) -> None:
        self.keys: list[Key] = []
        self.covered: list[tuple[int, int]] = []
        self.room = room

    def register(self, address: int, length: int, *, writable_by_peer: bool) -> Key:
        assert writable_by_peer
        if len(self.keys) >= self.room:
            raise TransportError("the test's device can register no more memory")
        self.keys.append(Key(100 + len(self.keys)))
        self.covered.append((address, length))
        return self.keys[-1]


class Wire:
    def __init__(self) -> None:
        self.posted: list[tuple[int, list[LocalRange], tuple[int, int], bool, int | None]] = []

    def write(
        self,
        number: int,
        pieces: list[LocalRange],
        target: tuple[int, int],
        *,
        signalled: bool,
        immediate: int | None = None,
    ) -> None:
        self.posted.append((number, pieces, target, signalled, immediate))


def region(name: str = "r") -> Region:
    return Region.over(
        np.random.default_rng(3).integers(0, 256, BLOCK * BLOCKS, np.uint8), BLOCK, name=name
    )


def runs(src: Sequence[int], dst: Sequence[int], length: int = BLOCK) -> ByteRuns:
    offsets = [np.asarray(blocks, np.int64) * BLOCK for blocks in (src, dst)]
    return ByteRuns(offsets[0], offsets[1], np.full(offsets[0].size, length, np.int64))


def head(transfer: int, moves: ByteRuns, first: int = 0) -> WindowHead:
    return WindowHead(transfer, 0, 0, first, moves.count, moves.n_bytes)


@given(st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True))
def test_keys_cover_the_reserved_blocks_of_every_rank_and_not_one_byte_more(
    blocks: list[int],
) -> None:
    ranks = [region("0"), region("1")]
    result = np.zeros((2, BLOCK * BLOCKS), int)
    for rank, first, length in rank_ranges(ranks, blocks):
        result[rank, first : first + length] += 1
    wanted = np.zeros(BLOCKS, int)
    wanted[blocks] = 1
    assert (result == np.repeat(wanted, BLOCK)).all()
    joined = np.flatnonzero(np.diff(np.sort(blocks)) > 1).size + 1
    assert len(rank_ranges(ranks, blocks)) == 2 * joined


def test_a_block_outside_the_region_cannot_be_granted() -> None:
    with pytest.raises(ValueError, match="not all within the region"):
        rank_ranges([region()], [BLOCKS])


@given(st.data(), st.integers(1, 8))
def test_work_requests_write_every_byte_as_planned(data: st.DataObject, gather: int) -> None:
    blocks = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=12, unique=True))
    most_keys = data.draw(st.sampled_from([1, 100]))
    into, out_of = region("into"), region("out")
    into.bytes[:] = 0
    opening = GrantedMemory(Registry(), [into], blocks, most_keys)
    grant = RemoteGrant(opening.grant)
    moves = runs(data.draw(st.permutations(range(len(blocks)))), blocks)
    offset = grant.claim(moves.n_bytes)
    assert (offset is None) == (opening.arena is None)
    base = into if opening.arena is None else Region.over(opening.arena, 1, name="arena")
    for write in grant.writes(moves, 0, offset, gather):
        assert 1 <= len(write.pieces) <= gather
        cursor = write.address - base.address
        for start, length in write.pieces:
            base.bytes[cursor : cursor + length] = out_of.bytes[start : start + length]
            cursor += length
    assert opening.check_arrival(moves, into, offset, digest_of(out_of, moves.src, moves.length))
    for src, dst in zip(moves.src.tolist(), moves.dst.tolist(), strict=True):
        assert (into.bytes[dst : dst + BLOCK] == out_of.bytes[src : src + BLOCK]).all()


def test_what_the_grant_does_not_cover_cannot_be_written() -> None:
    opening = GrantedMemory(Registry(), [region()], [4, 5, 8], 100)
    grant = RemoteGrant(opening.grant)
    assert len(grant.writes(runs([0, 1], [4, 5]), 0, None, 16)) == 1
    for outside in (
        runs([0], [3]),
        runs([0], [5], BLOCK + 1),
        runs([0], [9]),
        runs([0], [4], 5 * BLOCK),
    ):
        with pytest.raises(TransportError, match="permit"):
            grant.writes(outside, 0, None, 16)
    with pytest.raises(TransportError, match="permit"):
        grant.writes(runs([0], [4]), 1, None, 16)
    staged = RemoteGrant(GrantedMemory(Registry(), [region()], [4, 5, 8], 1).grant)
    staged.claim(2 * BLOCK)
    with pytest.raises(TransportError, match="permit"):
        staged.writes(runs([0, 1], [4, 5]), 0, staged.claim(2 * BLOCK), 16)


@given(st.binary(max_size=80))
def test_invalid_grant_bytes_are_refused(data: bytes) -> None:
    try:
        RemoteGrant(data)
    except TransportError:
        return
    assert data[:1] in (b"\0", b"\1")
    assert (len(data) - 1) % 30 == 0


def test_a_full_device_leaves_nothing_registered_and_the_peer_can_write_nothing() -> None:
    registry = Registry(room=2)
    arrivals = RdmaReceiver(registry, 100)
    assert arrivals.grant(1, [region()], [1, 3, 5]) == b""
    assert [key.open for key in registry.keys] == [False, False]
    assert arrivals.is_granted(1)
    arrivals.fence(1)
    assert not arrivals.is_granted(1)


def test_a_fence_closes_every_key_and_so_does_the_end() -> None:
    registry = Registry()
    arrivals = RdmaReceiver(registry, 100)
    one, two = (arrivals.grant(transfer, [region()], [1, 3]) for transfer in (1, 2))
    assert one
    assert two
    arrivals.fence(1)
    assert [key.open for key in registry.keys] == [False, False, True, True]
    arrivals.close()
    assert not any(key.open for key in registry.keys)
    assert arrivals.grant(3, [region()], [1]) == b""


def test_a_key_that_the_device_holds_on_to_keeps_its_fence_open_and_no_other_key() -> None:
    registry = Registry()
    arrivals = RdmaReceiver(registry, 100)
    arrivals.grant(1, [region()], [1, 3])
    registry.keys[0].stuck = 1
    with pytest.raises(TransportError, match="deregistered"):
        arrivals.fence(1)
    assert [key.open for key in registry.keys] == [True, False]
    assert arrivals.is_granted(1)
    assert arrivals.fence(1)
    assert not registry.keys[0].open


def test_closing_releases_all_keys_that_the_device_lets_it() -> None:
    registry = Registry()
    arrivals = RdmaReceiver(registry, 100)
    for transfer in (1, 2, 3):
        arrivals.grant(transfer, [region()], [1, 3])
    registry.keys[2].stuck = 9
    with pytest.raises(TransportError, match="deregistered"):
        arrivals.close()
    assert [key.open for key in registry.keys] == [False, False, True, False, False, False]


def test_a_fence_waits_for_a_running_grant_without_blocking_the_link() -> None:
    registry = Registry()
    arrivals = RdmaReceiver(registry, 100)
    register, calls = registry.register, list[object]()

    def meanwhile(address: int, length: int, *, writable_by_peer: bool) -> Key:
        # Neither call blocks, because no lock is held here.
        calls.extend((arrivals.fence(1), arrivals.is_granted(2)))
        return register(address, length, writable_by_peer=writable_by_peer)

    registry.register = meanwhile  # type: ignore[method-assign]
    assert arrivals.grant(1, [region()], [1])
    assert calls == [False, False]
    assert arrivals.fence(1)
    assert not registry.keys[0].open


def test_what_was_fenced_before_it_was_granted_is_not_granted() -> None:
    registry = Registry()
    arrivals = RdmaReceiver(registry, 100)
    assert arrivals.fence(1)
    assert arrivals.grant(1, [region()], [1]) == b""
    assert not registry.keys


def trailer(number: int, verdict: WindowVerdict = WindowVerdict.OK) -> RdmaTrailer:
    return RdmaTrailer(number, WindowHead(1, 0, 0, number, 1, BLOCK), verdict)


def test_a_window_is_complete_with_its_last_write_and_its_trailer_in_either_order() -> None:
    arrivals = RdmaReceiver(Registry(), 100)
    assert arrivals.on_written(0) is None
    assert arrivals.on_trailer(trailer(0)) == trailer(0)
    assert arrivals.on_trailer(trailer(1)) is None
    assert arrivals.on_written(1) == trailer(1)
    # A window that is written again, on a new pair of queues, has no effect.
    assert arrivals.on_written(1) is None
    assert arrivals.on_trailer(trailer(2, WindowVerdict.STALE)) == trailer(2, WindowVerdict.STALE)
    assert arrivals.on_written(2) is None
    assert arrivals.on_trailer(trailer(3)) is None


@pytest.mark.parametrize("half", ["written", "told"])
def test_incomplete_windows_are_limited(half: str) -> None:
    arrivals = RdmaReceiver(Registry(), 100)
    take = (
        arrivals.on_written
        if half == "written"
        else lambda number: arrivals.on_trailer(trailer(number))
    )
    assert [take(number) for number in range(1024)] == [None] * 1024
    with pytest.raises(TransportError, match="incomplete"):
        take(1024)


class Source:
    def __init__(self, blocks: Sequence[int] = range(8)) -> None:
        self.memory, self.ended = region("out"), list[OutgoingWindow]()
        self.wire = Wire()
        self.out = RdmaSender(lambda _: 9, self.ended.append, gather=4, checksums=True)
        self.out.accept(1, GrantedMemory(Registry(), [region("into")], blocks, 100).grant)

    def put(self, transfer: int = 1, count: int = 2, first: int = 0) -> OutgoingWindow:
        moves = runs(range(first, first + count), range(first, first + count))
        return self.out.put(
            head(transfer, moves, first), WindowSlice(moves, self.memory, 0, 0, lambda: self.holds)
        )

    holds = True


def test_the_last_write_of_a_window_carries_its_number_and_the_verdict_comes_after_it() -> None:
    source = Source()
    window = source.put(count=8)
    assert source.out.post(source.wire, epoch=3)
    assert [posted[0] for posted in source.wire.posted] == [
        3 << 32,
        3 << 32,
    ]  # 8 adjacent pieces, combined by 4
    assert [posted[3:] for posted in source.wire.posted] == [(False, None), (True, 0)]
    assert not window.is_done
    source.out.on_completion()
    assert (window.is_done, window.verdict, source.ended) == (True, WindowVerdict.OK, [window])


def test_blocks_that_change_owner_while_they_are_read_make_a_stale_window() -> None:
    source = Source()
    window = source.put()
    source.out.post(source.wire, 0)
    source.holds = False
    source.out.on_completion()
    assert window.verdict is WindowVerdict.STALE
    late = source.put()
    assert not source.out.post(source.wire, 0)
    assert (late.is_done, late.verdict) == (True, WindowVerdict.STALE)


def test_a_new_queue_pair_rewrites_windows_in_flight_except_refused_ones() -> None:
    source = Source()
    source.out.accept(2, GrantedMemory(Registry(), [region("into")], range(8), 100).grant)
    refused, other, dropped = source.put(1), source.put(2), source.put(2)
    source.out.post(source.wire, 0)
    source.out.on_refused(refused.number)
    assert not refused.is_done  # the device may still read until its pair is gone
    source.out.restart()
    assert (refused.is_done, refused.verdict) == (True, WindowVerdict.STALE)
    source.wire.posted.clear()
    later = source.put(1)
    source.out.post(source.wire, 1)
    assert [posted[0] for posted in source.wire.posted] == [
        1 << 32 | other.number,
        1 << 32 | dropped.number,
    ]
    assert later.verdict is WindowVerdict.STALE
    source.out.on_completion()
    source.out.on_completion()
    assert [other.verdict, dropped.verdict] == [WindowVerdict.OK, WindowVerdict.OK]


def test_dropped_windows_are_forgotten_or_end_stale() -> None:
    source = Source()
    begun = source.put()
    source.out.post(source.wire, 0)
    queued = source.put()
    source.out.drop(1)
    assert queued.is_dropped
    assert not source.out.post(source.wire, 0)
    source.out.on_completion()
    assert begun.verdict is WindowVerdict.STALE
    assert source.ended == [begun]


def test_only_so_much_is_handed_to_the_device_at_once_and_all_in_the_end() -> None:
    source = Source(range(BLOCKS))
    windows = [source.put(count=1, first=first % BLOCKS) for first in range(100)]
    source.out.post(source.wire, 0)
    assert len(source.wire.posted) == 16
    for window in windows:
        source.out.on_completion()
        source.out.post(source.wire, 0)
        assert window.is_done
    assert len(source.wire.posted) == 100


SAYINGS : list [ ControlMessage ] = [ QueuePairSetup ( 0 , QueuePairAddress ( 1 , 2 , "::1" , 0 , 5 ) ) , QueuePairReady ( 0 ) , OwnerMessage ( b"x" * 300 ) , trailer ( 7 ) , GrantWithdrawn ( 5 ) , OwnerMessage ( b"" ) ]  # fmt: skip


@given(st.lists(st.integers(1, 50), max_size=40))
def test_control_messages_decode_from_any_fragmentation(cuts: list[int]) -> None:
    data, ear, heard = b"".join(map(encode, SAYINGS)), ControlDecoder(), []
    for cut in [*cuts, len(data)]:
        heard += ear.feed(data[:cut])
        data = data[cut:]
    assert heard == SAYINGS
    assert ear.room_bytes == ear.most_bytes + 4


@given(st.binary(max_size=200))
def test_noise_is_a_transport_error_or_waits_for_more(data: bytes) -> None:
    try:
        list(ControlDecoder().feed(data))
    except TransportError:
        return


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(TransportError, match="exceeds the limit"):
        list(ControlDecoder().feed((1 << 30).to_bytes(4, "little")))


def test_an_unproven_peer_may_send_24_kib_at_a_time_and_a_proven_one_more() -> None:
    ear = ControlDecoder()
    ear.feed(encode(OwnerMessage(bytes(23 << 10))))
    assert 0 < ear.room_bytes < 2 << 10
    long = encode(OwnerMessage(bytes(1 << 20)))
    with pytest.raises(TransportError, match="exceeds the limit"):
        list(ControlDecoder().feed(long[:4]))
    known, heard = ControlDecoder(), list[ControlMessage]()
    for saying in known.feed(encode(OwnerMessage(b"it is me")) + long[:100]):
        heard.append(saying)
        known.raise_limit()  # a proof applies to the next message, even in the same read
    heard += known.feed(long[100:])
    assert heard == [OwnerMessage(b"it is me"), OwnerMessage(bytes(1 << 20))]
