"""Tests of a KV store and its client, connected by a real Unix socket within one process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvtransfer.store import unix_socket_server as service_module
from kvtransfer.store.block_keys import block_keys, chain_root
from kvtransfer.store.block_store import BlockStore
from kvtransfer.store.client import LEASE_BLOCKS, StoreClient, StoreLostError
from kvtransfer.store.disk_slots import FILE_NAME
from kvtransfer.store.slot_format import Parts
from kvtransfer.store.socket_io import receive_message
from kvtransfer.store.store_index import IN_MEMORY, ON_DISK
from kvtransfer.store.store_messages import (
    VERSION,
    AcquireBlocks,
    CountPrefix,
    Greeting,
    PutBlocks,
    ToStore,
    encode,
)
from kvtransfer.store.store_options import StoreOptions
from kvtransfer.store.unix_socket_server import StoreService

SLOT = 4096
OPTIONS = StoreOptions(slot_bytes=SLOT, memory_bytes=2 << 20, save_s=3600.0)
KEYS = block_keys(chain_root("model", "tenant"), os.urandom(64 * 300), 16)
DATA = [os.urandom(SLOT) for _ in KEYS]
PATIENCE_S = 60.0


def parts(data: bytes | bytearray) -> Parts:
    return [memoryview(data)[:1000], memoryview(data)[1000:]]


@contextmanager
def running(path: Path, **changes: object) -> Iterator[StoreService]:
    service = StoreService(BlockStore(msgspec.structs.replace(OPTIONS, **changes)), path / "s")
    try:
        yield service
    finally:
        service.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[StoreService]:
    with running(tmp_path) as running_service:
        yield running_service


@pytest.fixture
def client(service: StoreService, tmp_path: Path) -> Iterator[StoreClient]:
    with StoreClient(tmp_path / "s", PATIENCE_S) as connected:
        yield connected


def put(client: StoreClient, first: int, last: int) -> int:
    return client.put(KEYS[first:last], [parts(data) for data in DATA[first:last]])


def got(client: StoreClient, first: int, last: int) -> list[bytes]:
    copies = [bytearray(SLOT) for _ in range(first, last)]
    count = client.get(KEYS[first:last], [parts(copy) for copy in copies])
    return [bytes(copy) for copy in copies[:count]]


def greeted(path: Path, *messages: ToStore) -> socket.socket:
    # Return a connection that has sent these messages, for a test of misbehaviour.
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(PATIENCE_S)
    raw.connect(str(path / "s"))
    for message in (Greeting(VERSION), *messages):
        raw.sendall(encode(message))
    return raw


def wait_until_cut(raw: socket.socket) -> None:
    while raw.recv(1 << 16):
        pass
    raw.close()


def until_gone(service: StoreService, clients: int) -> None:
    # Wait until the server has removed the client, which happens at the end of its thread.
    deadline = time.monotonic() + PATIENCE_S
    while service.clients > clients and time.monotonic() < deadline:
        time.sleep(0.001)
    assert service.clients <= clients


def test_what_one_client_stores_another_one_reads(service: StoreService, tmp_path: Path) -> None:
    with StoreClient(tmp_path / "s") as writer, StoreClient(tmp_path / "s") as reader:
        assert reader.geometry == service.store.memory.geometry
        assert put(writer, 0, 100) == 100
        assert reader.count_prefix(KEYS) == 100
        assert reader.places(KEYS[98:102]) == bytes([IN_MEMORY, IN_MEMORY, 0, 0])
        assert got(reader, 0, 100) == DATA[:100]
        assert got(reader, 0, 110) == DATA[:100], "the prefix that is stored"
        assert got(reader, 100, 110) == []
        assert reader.stats()["leases"] == 0


def test_a_stored_block_is_not_sent_again(client: StoreClient) -> None:
    assert put(client, 0, 10) == 10
    assert put(client, 5, 15) == 5
    assert client.stats()["stored"] == 15


def test_blocks_may_be_shorter_than_a_slot_but_not_longer(client: StoreClient) -> None:
    assert client.put(KEYS[:2], [[memoryview(b"")], [memoryview(b"abc")]]) == 2
    copies = [bytearray(0), bytearray(3)]
    assert client.get(KEYS[:2], [[memoryview(copy)] for copy in copies]) == 2
    assert copies[1] == b"abc"
    with pytest.raises(ValueError, match="a block is too large"):
        client.put(KEYS[2:3], [[memoryview(bytes(SLOT + 1))]])
    assert client.count_prefix(KEYS) == 2, "the client is of use afterwards"


def test_a_reader_with_memory_of_another_size_gets_nothing(client: StoreClient) -> None:
    put(client, 0, 1)
    assert client.get(KEYS[:1], [[memoryview(bytearray(SLOT - 1))]]) == 0


def test_the_same_tokens_of_another_tenant_are_a_miss(client: StoreClient) -> None:
    tokens = os.urandom(64 * 4)
    mine, theirs = (
        block_keys(chain_root("model", tenant), tokens, 16) for tenant in ("mine", "theirs")
    )
    client.put(mine, [parts(data) for data in DATA[:4]])
    assert client.count_prefix(mine) == 4
    assert client.count_prefix(theirs) == 0
    copies = [bytearray(SLOT) for _ in theirs]
    assert client.get(theirs, [parts(copy) for copy in copies]) == 0
    assert not any(map(any, copies))


def test_memory_is_bounded_and_the_newest_prompts_stay(client: StoreClient) -> None:
    slots = client.geometry.slots
    for first in range(0, len(KEYS), 50):
        tokens = os.urandom(64 * slots)
        keys = block_keys(chain_root("m", "t"), tokens, 16)[:50]
        client.put(keys, [parts(data) for data in DATA[first : first + 50]])
        assert client.count_prefix(keys) == 50
    for _ in range(5):
        keys = block_keys(chain_root("m", "t"), os.urandom(64 * 200), 16)
        client.put(keys, [parts(data) for data in DATA[:200]])
    stats = client.stats()
    assert stats["memory_blocks"] == slots < stats["stored"]
    assert stats["lost"] == stats["stored"] - slots
    assert client.count_prefix(keys) == 200


def test_a_writer_that_leaves_in_the_middle_of_a_block_leaves_nothing(
    service: StoreService, client: StoreClient, tmp_path: Path
) -> None:
    raw = greeted(tmp_path, PutBlocks(KEYS[:2], [SLOT, SLOT]))
    receive_message(raw)
    receive_message(raw)
    raw.sendall(bytes(16) + DATA[0][: SLOT // 2])
    while service.store.wanted(KEYS[:1]):
        pass
    raw.close()
    until_gone(service, 1)
    assert client.count_prefix(KEYS[:2]) == 0
    assert put(client, 0, 2) == 2
    assert got(client, 0, 2) == DATA[:2]
    assert client.stats()["aborted"] == 1


def test_bytes_that_do_not_fit_their_digest_are_not_stored(
    client: StoreClient, tmp_path: Path
) -> None:
    raw = greeted(tmp_path, PutBlocks(KEYS[:1], [SLOT]))
    raw.sendall(bytes(16) + DATA[0])
    raw.shutdown(socket.SHUT_WR)
    wait_until_cut(raw)
    assert client.count_prefix(KEYS[:1]) == 0
    assert client.stats()["aborted"] == 1


def test_a_writer_that_stops_sending_is_cut(tmp_path: Path) -> None:
    with running(tmp_path, io_s=0.05) as service:
        raw = greeted(tmp_path, PutBlocks(KEYS[:1], [SLOT]))
        wait_until_cut(raw)
        until_gone(service, 0)
        with StoreClient(tmp_path / "s", PATIENCE_S) as client:
            assert put(client, 0, 1) == 1


def test_a_lease_ends_with_its_connection(
    service: StoreService, client: StoreClient, tmp_path: Path
) -> None:
    put(client, 0, 3)
    raw = greeted(tmp_path, AcquireBlocks(KEYS[:3]), CountPrefix(KEYS[:3]))
    while client.stats()["leases"] != 1:
        pass
    raw.close()
    until_gone(service, 1)
    assert client.stats()["leases"] == 0


def test_blocks_without_room_are_received_and_dropped(
    service: StoreService, client: StoreClient
) -> None:
    slots = client.geometry.slots
    owner, all_keys = -1, [os.urandom(32) for _ in range(slots)]
    client.put(all_keys, [[memoryview(b"x")]] * slots)
    number, pinned = service.store.acquire(owner, all_keys)
    assert len(pinned) == slots
    assert put(client, 0, 40) == 0
    assert client.stats()["refused"] == 40
    service.store.release(owner, number)
    assert put(client, 0, 40) == 40


@pytest.mark.parametrize(
    "raw_bytes",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\x03\0\0\0abc",
        encode(Greeting(VERSION)),
        encode(CountPrefix([b"short"])),
        encode(PutBlocks(KEYS[:1], [])),
        encode(PutBlocks(KEYS[:1], [-1])),
        encode(AcquireBlocks(KEYS[:1] * 1025)),
        encode(PutBlocks(KEYS[:1] * 4097, [1] * 4097)),
    ],
)
def test_a_client_that_breaks_the_protocol_is_cut_alone(
    client: StoreClient, tmp_path: Path, raw_bytes: bytes
) -> None:
    raw = greeted(tmp_path)
    raw.sendall(raw_bytes)
    wait_until_cut(raw)
    assert put(client, 0, 1) == 1


def test_a_client_of_another_version_is_refused(service: StoreService, tmp_path: Path) -> None:
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(tmp_path / "s"))
    raw.sendall(encode(Greeting(VERSION + 1)))
    assert raw.recv(1) == b""
    raw.close()


def test_processes_of_other_users_are_refused(
    service: StoreService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(service_module, "_is_same_user", lambda connection: False)
    with pytest.raises(StoreLostError):
        StoreClient(tmp_path / "s")


def test_more_clients_than_allowed_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, max_clients=1) as service:
        with StoreClient(tmp_path / "s"), pytest.raises(StoreLostError):
            StoreClient(tmp_path / "s")
        until_gone(service, 0)
        StoreClient(tmp_path / "s").close()


def test_a_socket_has_one_store_and_one_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "s"))
    left.close()
    with running(tmp_path):
        with pytest.raises(OSError, match="another store"):
            StoreService(BlockStore(OPTIONS), tmp_path / "s")
        StoreClient(tmp_path / "s").close()
    with pytest.raises(StoreLostError, match="no store"):
        StoreClient(tmp_path / "s")


def test_a_client_of_a_store_that_ends_reports_it(tmp_path: Path) -> None:
    with running(tmp_path):
        client = StoreClient(tmp_path / "s")
        put(client, 0, 1)
    for call in (client.stats, lambda: client.count_prefix(KEYS), lambda: put(client, 1, 2)):
        with pytest.raises(StoreLostError):
            call()
    client.close()
    with pytest.raises(StoreLostError):
        client.get(KEYS[:1], [parts(bytearray(SLOT))])


# The disk tier


def on_disk(path: Path) -> dict[str, object]:
    return {
        "memory_bytes": 40 * (SLOT + 700) + 200 * 512,
        "disk_bytes": 200 * (SLOT + 128) + 8192,
        "directory": str(path / "disk"),
    }


def test_a_prompt_longer_than_memory_returns_from_disk(tmp_path: Path) -> None:
    with running(tmp_path, **on_disk(tmp_path)) as service, StoreClient(tmp_path / "s") as client:
        assert client.geometry.slots < LEASE_BLOCKS
        for first in range(0, 150, 30):
            put(client, first, first + 30)
            assert service.store.save_step() == 30
        assert client.count_prefix(KEYS) == 150
        assert set(client.places(KEYS[:30])) == {ON_DISK}
        assert got(client, 0, 40) == DATA[:40]
        assert service.store.stats()["loaded"] > 0
        assert service.store.stats()["lost"] == 0


def test_a_restarted_store_finds_its_blocks_on_disk(tmp_path: Path) -> None:
    with running(tmp_path, **on_disk(tmp_path)), StoreClient(tmp_path / "s") as client:
        put(client, 0, 30)
    with running(tmp_path, **on_disk(tmp_path)), StoreClient(tmp_path / "s") as client:
        assert set(client.places(KEYS[:30])) == {ON_DISK}
        assert got(client, 0, 30) == DATA[:30]


def test_a_block_that_is_damaged_on_disk_is_a_miss_and_is_stored_again(tmp_path: Path) -> None:
    with running(tmp_path, **on_disk(tmp_path)) as service, StoreClient(tmp_path / "s") as client:
        put(client, 0, 30)
        geometry = service.store.options.disk_geometry
    path = tmp_path / "disk" / FILE_NAME
    content = bytearray(path.read_bytes())
    assert geometry is not None
    # The blocks were saved in reverse order, so this finds the slot of block 7.
    slot = next(
        number
        for number in range(30)
        if content[geometry.data_offset(number) :].startswith(DATA[7])
    )
    content[geometry.data_offset(slot) + 99] ^= 4
    path.write_bytes(content)
    with running(tmp_path, **on_disk(tmp_path)) as service, StoreClient(tmp_path / "s") as client:
        assert got(client, 0, 30) == DATA[:7]
        assert service.store.stats()["corrupt"] == 1
        assert put(client, 0, 30) == 1
        assert got(client, 0, 30) == DATA[:30]


def test_a_full_disk_is_no_failure_of_readers_or_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, **on_disk(tmp_path)) as service, StoreClient(tmp_path / "s") as client:

        def fail(fd: int, data: memoryview, offset: int) -> int:
            raise OSError(28, "No space left on device")

        put(client, 0, 5)
        monkeypatch.setattr(os, "pwrite", fail)
        assert service.store.save_step() == 0
        monkeypatch.undo()
        assert got(client, 0, 5) == DATA[:5]
        assert service.store.stats()["failed"] == 5
