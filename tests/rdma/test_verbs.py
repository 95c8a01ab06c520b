"""Tests that an RDMA device itself refuses writes to memory whose registration has ended."""

from __future__ import annotations

import select
from collections.abc import Iterator

import numpy as np
import pytest

from kvtransfer.layout.memory_files import MemoryFileRegion
from kvtransfer.transport_interface import TransportError
from kvtransfer.transports.rdma.verbs import (
    RECEIVED,
    Completion,
    CompletionQueue,
    Device,
    LocalRange,
    ProtectionDomain,
    QueuePair,
    RegisteredMemory,
    is_refused,
)

PAGE = 4096


class VerbsPair:
    """Two connected ends (queue pairs) on one RDMA device: a writer and a receiver.

    Each has its own protection domain and memory.
    """

    def __init__(self) -> None:
        self.device = Device()
        self.near, self.far = ProtectionDomain(self.device), ProtectionDomain(self.device)
        self.completions = CompletionQueue(self.device, 64)
        self.writer = QueuePair(self.near, self.completions, 0, 8, 8)
        self.sink = QueuePair(self.far, self.completions, 1, 8, 8)
        self.writer.connect(self.sink.card)
        self.sink.connect(self.writer.card)
        self.source, self.place = (
            MemoryFileRegion.create(4, PAGE, name=name) for name in ("source", "place")
        )
        self.source.bytes[:] = np.arange(self.source.bytes.size, dtype=np.uint8)
        self.open: list[RegisteredMemory] = []

    def grant(
        self, domain: ProtectionDomain, first: int, length: int, *, writable: bool = True
    ) -> RegisteredMemory:
        memory = domain.register(self.place.address + first, length, writable_by_peer=writable)
        self.open.append(memory)
        return memory

    def write(self, at: int, length: int, key: int) -> list[Completion]:
        # Write the beginning of the source's memory to offset `at` at the sink.
        #
        # Returns the completions of both sides.
        piece = LocalRange(self.source.address, length, self.near.key_of(self.source))
        self.sink.post_receive()
        self.completions.arm()
        self.writer.write(
            5, [piece], (self.place.address + at, key), signalled=True, immediate=0xFFFF_FFFF
        )
        completions: list[Completion] = []
        while not any(completion.number == 5 for completion in completions):
            assert select.select([self.completions.fd], [], [], 20.0)[0], "the device said nothing"
            self.completions.clear_event()
            self.completions.arm()
            completions += self.completions.poll()
        return completions

    def refuses(self, at: int, length: int, key: int) -> bool:
        return any(
            completion.number == 5 and is_refused(completion.status)
            for completion in self.write(at, length, key)
        )

    def close(self) -> None:
        self.writer.close()
        self.sink.close()
        self.completions.close()
        for memory in self.open:
            memory.close()
        self.near.close()
        self.far.close()
        self.device.close()
        for region in (self.source, self.place):
            region.close()


@pytest.fixture
def bench() -> Iterator[VerbsPair]:
    verbs_pair = VerbsPair()
    yield verbs_pair
    verbs_pair.close()


def test_a_key_allows_writes_to_its_bytes_and_the_immediate_value_arrives(bench: VerbsPair) -> None:
    key = bench.grant(bench.far, 100, 1000).remote_key
    completions = bench.write(100, 1000, key)
    assert {
        completion.number: (completion.status, completion.immediate) for completion in completions
    } == {5: (0, 0), RECEIVED + 1: (0, 0xFFFF_FFFF)}
    assert (bench.place.bytes[100:1100] == bench.source.bytes[:1000]).all()
    assert bench.place.bytes.astype(int).sum() == bench.source.bytes[:1000].astype(int).sum()


@pytest.mark.parametrize(("at", "length"), [(99, 2), (1000, 101), (0, 10), (2 * PAGE, 1)])
def test_one_byte_beside_the_key_is_refused(bench: VerbsPair, at: int, length: int) -> None:
    key = bench.grant(bench.far, 100, 1000).remote_key
    assert bench.refuses(at, length, key)
    assert not bench.place.bytes.any()


def test_after_deregistration_the_device_refuses(bench: VerbsPair) -> None:
    memory = bench.grant(bench.far, 0, PAGE)
    assert not bench.refuses(0, PAGE, memory.remote_key)
    bench.open.remove(memory)
    memory.close()
    bench.place.bytes[:] = 0
    assert bench.refuses(0, PAGE, memory.remote_key)
    assert not bench.place.bytes.any()


def test_a_memory_key_of_another_link_is_refused(bench: VerbsPair) -> None:
    other = ProtectionDomain(bench.device)
    memory = other.register(bench.place.address, PAGE, writable_by_peer=True)
    assert bench.refuses(0, PAGE, memory.remote_key)
    assert not bench.place.bytes.any()
    memory.close()
    other.close()


def test_memory_registered_for_our_own_reading_cannot_be_written(bench: VerbsPair) -> None:
    assert bench.refuses(0, 8, bench.grant(bench.far, 0, PAGE, writable=False).remote_key)
    assert not bench.place.bytes.any()


def test_a_guessed_key_is_refused(bench: VerbsPair) -> None:
    assert bench.refuses(0, 8, 0x1234)


def test_a_missing_device_is_a_transport_error() -> None:
    with pytest.raises(TransportError, match="no RDMA device"):
        Device("mlx5_77")
