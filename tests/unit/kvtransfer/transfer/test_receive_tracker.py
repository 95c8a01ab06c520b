"""Tests that arriving KV is accepted in any order, if it is planned and has not arrived before."""

from __future__ import annotations

import pytest

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.transfer_plan import plan_transfer
from kvtransfer.transfer.receive_tracker import ReceiveTracker, WindowError

LAYOUT = KvLayout(layers=5, kv_heads=2, head_dim=4, dtype=KvDtype.BF16, block_tokens=4, tp=2)
PLAN = plan_transfer(LAYOUT, LAYOUT, [0, 2, 4, 6], [9, 7, 5, 3], 16, group_layers=2)
RUN = PLAN.runs(0, 0).n_bytes // 4


def test_groups_complete_in_any_order_and_layers_are_counted_in_order() -> None:
    arrivals, reports = ReceiveTracker(PLAN), []
    for group in (2, 0, 1):
        for window in reversed(list(PLAN.windows(group, 1))):
            arrivals.begin(group, *window)
            reports.append((arrivals.mark_verified(group, *window[:3]), arrivals.complete_layers))
    assert reports == [(False, 0)] * 7 + [(True, 0)] + [(False, 0)] * 7 + [(True, 2)] + [
        (False, 2)
    ] * 7 + [(True, 5)]
    assert (arrivals.is_complete, arrivals.n_bytes) == (True, PLAN.n_bytes)


def test_begun_is_not_landed() -> None:
    arrivals = ReceiveTracker(PLAN)
    for group in range(PLAN.groups):
        for window in PLAN.windows(group, 1 << 20):
            arrivals.begin(group, *window)
    assert (arrivals.is_complete, arrivals.complete_layers, arrivals.n_bytes) == (False, 0, 0)


def test_the_runs_of_a_window_are_the_plans() -> None:
    runs = ReceiveTracker(PLAN).begin(0, 1, 1, 2, 2 * RUN)
    assert runs.dst.tolist() == PLAN.runs(0, 1).dst[1:3].tolist()


@pytest.mark.parametrize("again", [(0, 2), (0, 1), (1, 1), (1, 2), (0, 4), (1, 3)])
def test_no_run_is_written_twice(again: tuple[int, int]) -> None:
    arrivals = ReceiveTracker(PLAN)
    arrivals.begin(0, 0, 0, 2, 2 * RUN)
    arrivals.mark_verified(0, 0, 0, 2)
    with pytest.raises(WindowError, match="arrived before"):
        arrivals.begin(0, 0, *again, again[1] * RUN)
    arrivals.begin(0, 0, 2, 2, 2 * RUN)


@pytest.mark.parametrize(
    "window",
    [
        (3, 0, 0, 1, RUN),
        (0, 2, 0, 1, RUN),
        (0, 0, 4, 1, RUN),
        (0, 0, -1, 1, RUN),
        (-1, 0, 0, 1, RUN),
        (0, 0, 0, 0, 0),
    ],
)
def test_a_window_that_is_not_in_the_plan_is_refused(
    window: tuple[int, int, int, int, int],
) -> None:
    with pytest.raises(WindowError, match="a received window"):
        ReceiveTracker(PLAN).begin(*window)


def test_a_window_of_another_size_is_refused() -> None:
    with pytest.raises(WindowError, match="bytes are planned"):
        ReceiveTracker(PLAN).begin(0, 0, 0, 1, RUN - 1)


def test_only_what_has_begun_can_land_and_only_once() -> None:
    arrivals = ReceiveTracker(PLAN)
    with pytest.raises(WindowError, match="were not begun"):
        arrivals.mark_verified(0, 0, 0, 1)
    arrivals.begin(0, 0, 0, 1, RUN)
    arrivals.mark_verified(0, 0, 0, 1)
    with pytest.raises(WindowError, match="were not begun"):
        arrivals.mark_verified(0, 0, 0, 1)
    assert arrivals.n_bytes == RUN
