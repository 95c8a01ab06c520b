"""Tests of which KV transport (tcp, shm, rdma) two agents choose for their link."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.protocol.agent_messages import AgentCard
from kvtransfer.transports.transport_choice import better_transport, host_id

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype=KvDtype.BF16, block_tokens=16)


def card(host: str, *transports: str) -> AgentCard:
    return AgentCard(
        "a", bytes(16), LAYOUT, host=host, addresses=dict.fromkeys(transports, "somewhere")
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "way"),
    [
        (("h", "tcp", "shm"), ("h", "tcp", "shm"), "shm"),
        (("h", "tcp", "shm"), ("other", "tcp", "shm"), None),
        (("", "tcp", "shm"), ("", "tcp", "shm"), None),
        (("h", "tcp", "shm"), ("h", "tcp"), None),
        (("h", "tcp", "rdma"), ("other", "tcp", "rdma"), "rdma"),
        (("h", "tcp", "rdma", "shm"), ("h", "tcp", "rdma", "shm"), "shm"),
        (("h", "tcp", "rdma"), ("other", "tcp"), None),
    ],
)
def test_shared_memory_on_one_host_then_rdma_then_what_they_met_by(mine, theirs, way) -> None:  # type: ignore[no-untyped-def]
    assert better_transport(card(*mine), card(*theirs), mine[1:], "tcp") == way


def test_agents_that_met_by_the_best_transport_stay_with_it() -> None:
    assert (
        better_transport(
            card("h", "shm", "rdma", "tcp"),
            card("h", "shm", "rdma", "tcp"),
            ["shm", "rdma", "tcp"],
            "shm",
        )
        is None
    )


def test_another_process_of_this_host_has_the_same_host_id() -> None:
    command = [
        sys.executable,
        "-c",
        "from kvtransfer.transports.transport_choice import host_id; print(host_id())",
    ]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        == host_id()
    )


def test_where_proc_is_masked_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", masked)
    assert host_id() == ""
