"""Tests of the order in which a gateway runs its batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gateway.batch.batch_runner import group_by_tenant


def batch(tenant: str, expires_at: int, name: str) -> Any:
    return SimpleNamespace(name=name, record=SimpleNamespace(tenant=tenant, expires_at=expires_at))


def test_of_each_tenant_the_batch_whose_window_ends_first_runs_first() -> None:
    batches = [batch("b", 90, "day"), batch("a", 70, "only"), batch("b", 30, "hour")]
    queues = group_by_tenant(batches)
    assert [[one.name for one in queue] for queue in queues] == [["hour", "day"], ["only"]]


def test_batches_with_the_same_end_keep_their_order() -> None:
    batches = [batch("a", 50, name) for name in ("first", "second", "third")]
    assert [one.name for one in group_by_tenant(batches)[0]] == ["first", "second", "third"]
