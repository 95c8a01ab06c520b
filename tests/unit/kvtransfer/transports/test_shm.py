"""Tests of KV transfers through shared memory: access, checks, and reused blocks."""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.byte_ranges import ByteRuns
from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.layout.memory_regions import Region
from kvtransfer.protocol.frame import FrameKind, encode_frame, pack_head
from kvtransfer.transport_interface import TransportError, WindowHead, WindowSlice, WindowVerdict
from kvtransfer.transports.copy_runs import are_within, copy_runs, split_by_bytes
from kvtransfer.transports.shm import Shm, generation_mark
from tests.contract.kvtransfer.links import BLOCK_BYTES, BLOCKS, Owner

SIZE = BLOCKS * BLOCK_BYTES
RUNS = ByteRuns(
    np.array([0, BLOCK_BYTES + 10]), np.array([5, 3 * BLOCK_BYTES]), np.array([100, 3000])
)
HEAD = WindowHead(1, 0, 0, 0, 2, 3100)


class Source:
    def __init__(self, sock: socket.socket, sink_owner: Owner, sink_region: Region) -> None:
        self.sock, self.sink_owner, self.sink_region = sock, sink_owner, sink_region
        self.memory = MemoryFileRegion.create(BLOCKS, BLOCK_BYTES, name="theirs")
        self.memory.bytes[:] = np.random.default_rng(1).integers(1, 256, SIZE, dtype=np.uint8)

    def share(
        self, *fds: int, blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES, regions: int = 1
    ) -> None:
        sizes = (blocks.to_bytes(8, "little") + block_bytes.to_bytes(8, "little")) * regions
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([encode_frame(FrameKind.REGIONS, sizes)], rights)

    def announce(self, mark: int, *, current: bool = True, head: WindowHead = HEAD) -> None:
        self.sock.sendall(
            encode_frame(
                FrameKind.SHARED, pack_head(head) + bytes([current]) + mark.to_bytes(8, "little")
            )
        )

    def lost(self) -> str:
        return str(self.sink_owner.wait("lost")[0])


@contextmanager
def dialled(*, proven: bool) -> Iterator[Source]:
    sink_owner, sink_region, end = (
        Owner(),
        MemoryFileRegion.create(BLOCKS, BLOCK_BYTES, name="into"),
        Shm(),
    )
    end.start(sink_owner, [sink_region])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen()
        link = end.dial("@" + listener.getsockname()[1:].decode())
        sock, _ = listener.accept()
        if proven:
            link.secure(bytes(32))
        sink_owner.place = lambda head: WindowSlice(RUNS, sink_region, 0, 0)
        with sock:
            yield Source(sock, sink_owner, sink_region)
    end.close()


@pytest.fixture
def source() -> Iterator[Source]:
    with dialled(proven=True) as result:
        yield result


def naive(runs: ByteRuns, memory: np.ndarray) -> np.ndarray:
    sink_region = np.zeros(SIZE, np.uint8)
    for src, dst, length in zip(runs.src, runs.dst, runs.length, strict=True):
        sink_region[dst : dst + length] = memory[src : src + length]
    return sink_region


def test_a_sink_fetches_what_was_announced(source: Source) -> None:
    source.share(source.memory.fd or 0)
    source.announce(0)
    assert source.sink_owner.wait("landed") == [(HEAD, WindowVerdict.OK)]
    assert np.array_equal(source.sink_region.bytes, naive(RUNS, source.memory.bytes))


@pytest.mark.parametrize("block", [0, 1])
def test_the_sink_detects_blocks_that_changed_owner_by_itself(source: Source, block: int) -> None:
    source.share(source.memory.fd or 0)
    mark = generation_mark(source.memory, RUNS)
    source.memory.bump([block])
    source.announce(mark)
    assert source.sink_owner.wait("landed") == [(HEAD, WindowVerdict.STALE)]


def test_other_blocks_may_change_hands_meanwhile(source: Source) -> None:
    source.share(source.memory.fd or 0)
    mark = generation_mark(source.memory, RUNS)
    source.memory.bump(range(2, BLOCKS))
    source.announce(mark)
    assert source.sink_owner.wait("landed") == [(HEAD, WindowVerdict.OK)]


def test_a_window_announced_as_stale_is_not_read(source: Source) -> None:
    source.share(source.memory.fd or 0)
    source.announce(0, current=False)
    assert source.sink_owner.wait("landed") == [(HEAD, WindowVerdict.STALE)]
    assert not source.sink_region.bytes.any()


def test_memory_that_could_shrink_is_not_mapped(source: Source) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE + 4096)
    source.share(fd)
    assert "cannot be mapped" in source.lost()


@pytest.mark.parametrize("wrong", ["size", "none", "more", "nonsense"])
def test_descriptors_must_be_what_their_frame_says(source: Source, wrong: str) -> None:
    fd = source.memory.fd or 0
    match wrong:
        case "size":
            source.share(fd, blocks=BLOCKS + 1)
        case "none":
            source.share()
        case "more":
            source.share(fd, fd)
        case "nonsense":
            source.share(fd, blocks=1 << 62, block_bytes=1 << 63)
    assert source.lost()
    assert len(os.listdir("/proc/self/fd")) < 200


@pytest.mark.parametrize("says", ["regions", "window", "taken"])
def test_data_before_the_proof_ends_the_link(says: str) -> None:
    with dialled(proven=False) as stranger:
        match says:
            case "regions":
                stranger.sock.sendall(encode_frame(FrameKind.REGIONS, bytes(16)))
            case "window":
                stranger.announce(0)
            case "taken":
                stranger.sock.sendall(encode_frame(FrameKind.TAKEN, pack_head(HEAD)))
        assert "before its proof" in stranger.lost()
        assert not stranger.sink_owner.all("incoming") + stranger.sink_owner.all("sent")


def test_no_descriptor_is_accepted_from_an_unproven_peer() -> None:
    with dialled(proven=False) as stranger:
        rights = array.array("i", [stranger.memory.fd or 0])
        stranger.sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert "file descriptors that were not expected" in stranger.lost()


def test_regions_are_shared_once(source: Source) -> None:
    source.share(source.memory.fd or 0)
    source.share(source.memory.fd or 0)
    assert source.lost()


def test_a_window_of_memory_that_was_never_shared_ends_the_link(source: Source) -> None:
    source.announce(0)
    assert "whose memory it does not share" in source.lost()


def test_a_window_of_another_size_than_planned_ends_the_link(source: Source) -> None:
    source.share(source.memory.fd or 0)
    source.announce(0, head=WindowHead(1, 0, 0, 0, 2, 3101))
    assert "bytes are planned" in source.lost()
    assert not source.sink_region.bytes.any()


@pytest.mark.parametrize("runs", [(SIZE - 5, 0, 6), (0, SIZE - 5, 6), (-1, 0, 6)])
def test_runs_beyond_either_region_are_never_followed(
    source: Source, runs: tuple[int, int, int]
) -> None:
    src, dst, length = (np.array([number]) for number in runs)
    source.sink_owner.place = lambda head: WindowSlice(
        ByteRuns(src, dst, length), source.sink_region, 0, 0
    )
    source.share(source.memory.fd or 0)
    source.announce(0, head=WindowHead(1, 0, 0, 0, 1, 6))
    assert "does not lie within the memory region of rank" in source.lost()


def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    end, other = Shm(), Shm()
    end.start(Owner(), [])
    address = other.start(Owner(), [])
    monkeypatch.setattr("kvtransfer.transports.shm.os.getuid", lambda: 12_345)
    with pytest.raises(TransportError, match="belongs to another user"):
        end.dial(address)
    end.close()
    other.close()


def test_memory_of_the_engines_own_is_refused_from_the_start() -> None:
    region = Region.over(bytearray(8192), 4096, name="engine")
    with pytest.raises(TransportError, match="memory files"):
        Shm().start(Owner(), [region])


@given(
    st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(1, 3 * BLOCK_BYTES)),
        min_size=1,
        max_size=30,
    ),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_mark_changes_exactly_with_the_blocks_that_are_read(
    pieces: list[tuple[int, int]], data: st.DataObject
) -> None:
    region = MemoryFileRegion.create(BLOCKS, BLOCK_BYTES, name="x")
    pieces = [(src, min(length, SIZE - src)) for src, length in pieces]
    src, length = (np.array(column) for column in zip(*pieces, strict=True))
    runs = ByteRuns(src, src, length)
    read = {
        block
        for index, size in pieces
        for block in range(index // BLOCK_BYTES, (index + size - 1) // BLOCK_BYTES + 1)
    }
    block = data.draw(st.integers(0, BLOCKS - 1))
    before = generation_mark(region, runs)
    region.bump([block])
    assert (generation_mark(region, runs) != before) == (block in read)
    region.close()


@given(
    st.sampled_from([1, 48, 512, 4096, 16 << 10]),
    st.integers(1, 60),
    st.booleans(),
    st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_runs_are_copied_whatever_their_shape(
    length: int, count: int, even: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.permutation(SIZE // length)[:count]
    lengths = np.full(len(slots), length) if even else rng.integers(1, length + 1, len(slots))
    sources = rng.permutation(SIZE // length)[: len(slots)] * length
    runs = ByteRuns(
        sources if even else rng.integers(0, SIZE - length, len(slots)), slots * length, lengths
    )
    memory, sink_region = rng.integers(0, 256, SIZE, dtype=np.uint8), np.zeros(SIZE, np.uint8)
    steps = list(split_by_bytes(runs, 10_000))
    assert sum(step.count for step in steps) == runs.count
    for step in steps:
        copy_runs(memory, sink_region, step)
    assert np.array_equal(sink_region, naive(runs, memory))


def test_what_lies_within_a_region() -> None:
    region = MemoryFileRegion.create(2, 4096, name="x")
    one = lambda at, size: are_within(region, np.array([at]), np.array([size]))  # noqa: E731
    assert one(0, 8192)
    assert one(8191, 1)
    assert not one(8191, 2)
    assert not one(-1, 2)
    assert not one(0, 0)
    assert not are_within(region, np.array([], np.int64), np.array([], np.int64))
    region.close()


@pytest.mark.parametrize("does", ["dial", "start"])
def test_a_failure_to_create_a_socket_is_a_transport_error(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    way = Shm()
    monkeypatch.setattr(socket, "socket", no_more)
    with pytest.raises(TransportError, match="Too many open files"):
        way.dial("@x") if does == "dial" else way.start(Owner(), [])


def test_a_machine_whose_policy_denies_such_sockets_has_no_shm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denied = Mock(bind=Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    monkeypatch.setattr("kvtransfer.transports.shm._socket", lambda: denied)
    with pytest.raises(
        TransportError, match=r"the transport shm cannot listen: .*Permission denied"
    ):
        Shm().start(Owner(), [])
    denied.close.assert_called_once_with()
