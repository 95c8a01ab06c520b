"""Tests of an engine's connection to a KV store that is lost, silent, back or too small."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.store.block_store import BlockStore
from kvtransfer.store.client import StoreClient, StoreLostError
from kvtransfer.store.reconnecting_client import FIRST_RETRY_S, LAST_RETRY_S, StoreConnection
from kvtransfer.store.store_options import StoreOptions
from kvtransfer.store.unix_socket_server import StoreService

OPTIONS = StoreOptions(slot_bytes=4096, memory_bytes=1 << 20)


class Now:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[StoreConnection, Now, list[str], Path]]:
    now, warnings = Now(), list[str]()
    connection = StoreConnection(tmp_path / "s", 4096, 0.1, warnings.append, now)
    yield connection, now, warnings, tmp_path / "s"
    connection.close()
    connection.close()


def count(client: StoreClient) -> int:
    return client.stats()["memory_blocks"]


def test_a_call_without_a_store_returns_what_it_was_given(
    parts: tuple[StoreConnection, Now, list[str], Path],
) -> None:
    connection, _, warnings, _ = parts
    assert [connection.call(count, -1) for _ in range(3)] == [-1, -1, -1]
    assert connection.lost_calls == 3
    assert len(warnings) == 1, "one warning for one loss"
    with pytest.raises(StoreLostError):
        connection.open()


def test_a_store_that_comes_back_is_used_again(
    parts: tuple[StoreConnection, Now, list[str], Path],
) -> None:
    connection, now, warnings, path = parts
    service = StoreService(BlockStore(OPTIONS), path)
    assert connection.call(count, -1) == 0
    service.close()
    assert connection.call(count, -1) == -1
    service = StoreService(BlockStore(OPTIONS), path)
    now.seconds += FIRST_RETRY_S
    assert connection.call(count, -1) == 0
    service.close()
    assert connection.call(count, -1) == -1
    assert len(warnings) == 2


def test_attempts_to_reach_a_silent_store_become_rare(
    parts: tuple[StoreConnection, Now, list[str], Path],
) -> None:
    # Each attempt costs the timeout, in which an engine's scheduler stands still.
    connection, now, _, path = parts
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        attempts = []
        for second in range(200):
            now.seconds = float(second)
            before = connection._retry_at_s
            assert connection.call(count, -1) == -1
            if connection._retry_at_s != before:
                attempts.append(second)
    assert attempts == [0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181]
    assert attempts[-1] - attempts[-2] == LAST_RETRY_S


def test_a_store_with_too_small_slots_is_not_used(
    parts: tuple[StoreConnection, Now, list[str], Path],
) -> None:
    _, now, _, path = parts
    service = StoreService(BlockStore(OPTIONS), path)
    warnings: list[str] = []
    connection = StoreConnection(path, 4097, 1.0, warnings.append, now)
    assert connection.call(count, -1) == -1
    assert "do not fit" in warnings[0]
    connection.close()
    service.close()
