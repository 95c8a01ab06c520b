"""Tests that BlockReport answers connections to its Unix socket with the state of a block pool."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest

from kvtransfer.engines.vllm.block_report import BlockReport, PoolState


def _ask(path: Path) -> object:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30.0)
        connection.connect(str(path))
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return json.loads(b"".join(parts))


def test_each_connection_gets_the_state_of_that_moment(tmp_path: Path) -> None:
    states = [PoolState([1, 2, 2**64 - 1], 5), PoolState(["00ff"] * 100_000, 0)]
    report = BlockReport(tmp_path / "pool", lambda: states.pop(0))
    assert _ask(tmp_path / "pool") == {"cached": [1, 2, 2**64 - 1], "free": 5}
    assert _ask(tmp_path / "pool") == {"cached": ["00ff"] * 100_000, "free": 0}
    report.close()


def test_only_this_user_can_connect_and_closing_removes_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    report = BlockReport(path, lambda: PoolState([], 0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    report.close()
    assert not path.exists()


def test_a_socket_left_by_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    BlockReport(path, lambda: PoolState([1], 0))
    second = BlockReport(path, lambda: PoolState([2], 0))
    assert _ask(path) == {"cached": [2], "free": 0}
    second.close()


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BlockReport(tmp_path / "absent" / "pool", lambda: PoolState([], 0))
