"""Tests of how long a supervisor waits until a worker that it has started is ready."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.workers import worker_process
from gateway.workers.worker_process import READY_TIMEOUT_S, Worker, seconds_without_cpu
from tests.virtual_time import VIRTUAL_TIME

pytestmark = VIRTUAL_TIME


def starting(folder: Path) -> Worker:
    # Return a worker whose process runs and does not listen yet.
    settings: Any = SimpleNamespace(worker=SimpleNamespace(number=0, admin=str(folder / "admin")))
    process: Any = SimpleNamespace(pid=1, returncode=None, stdin=None)
    return Worker(settings, process)


@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_time_without_cpu_does_not_count_until_a_worker_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    # `share` is the fraction of the time in which the worker has no CPU.
    worker, began = starting(tmp_path), monotonic()
    monkeypatch.setattr(
        worker_process, "seconds_without_cpu", lambda pid: share * (monotonic() - began)
    )
    assert not await worker.wait_until_ready()
    waited_s = monotonic() - began
    assert waited_s == pytest.approx(READY_TIMEOUT_S / (1.0 - share), rel=0.01)
    await worker.close()


def test_the_time_without_cpu_of_an_unknown_process_is_zero() -> None:
    assert seconds_without_cpu(os.getpid()) >= 0.0
    assert seconds_without_cpu(2**30) == 0.0
