"""Tests that a KV agent predicts which units of KV (windows) arrive next."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.memory_regions import GenerationCheck, Region
from kvtransfer.layout.transfer_plan import plan_transfer
from kvtransfer.transfer.receive_tracker import ReceiveTracker
from kvtransfer.transfer.window_forecast import WindowForecast
from kvtransfer.transport_interface import WindowHead

LAYOUT = KvLayout(layers=8, kv_heads=2, head_dim=4, dtype=KvDtype.BF16, block_tokens=4, tp=2)
PLAN = plan_transfer(LAYOUT, LAYOUT, [0, 2, 4, 6], [9, 7, 5, 3], 16, group_layers=2)
RUN = PLAN.runs(0, 0).n_bytes // 4
HEADS = [
    WindowHead(5, group, *window)
    for group in range(PLAN.groups)
    for window in PLAN.windows(group, RUN)
]


def heads_behind(
    forecast: WindowForecast,
    tracker: ReceiveTracker,
    index: int,
    most: int = 99,
    n_bytes: int = 1 << 20,
) -> list[WindowHead]:
    return [head for head, _ in forecast.following(HEADS[index], tracker, most, n_bytes)]


def test_windows_follow_in_the_order_of_the_plan_up_to_the_next_group() -> None:
    forecast, tracker = WindowForecast(5, PLAN, RUN), ReceiveTracker(PLAN)
    per_group = len(HEADS) // PLAN.groups
    for index in range(len(HEADS)):
        group = HEADS[index].group
        expected = HEADS[index + 1 : (group + 2) * per_group]
        assert heads_behind(forecast, tracker, index) == expected


def test_a_forecast_is_limited_in_windows_and_in_bytes_with_the_current_one() -> None:
    forecast, tracker = WindowForecast(5, PLAN, RUN), ReceiveTracker(PLAN)
    first = HEADS[0]
    tracker.begin(first.group, first.pair, first.first, first.count, first.n_bytes)
    assert heads_behind(forecast, tracker, 0, most=3) == HEADS[1:4]
    assert heads_behind(forecast, tracker, 0, n_bytes=3 * RUN) == HEADS[1:3]
    assert heads_behind(forecast, tracker, 0, n_bytes=RUN) == []
    tracker.mark_verified(first.group, first.pair, first.first, first.count)
    assert heads_behind(forecast, tracker, 0, n_bytes=3 * RUN) == HEADS[1:4]


def test_a_window_that_has_begun_ends_the_forecast() -> None:
    forecast, tracker = WindowForecast(5, PLAN, RUN), ReceiveTracker(PLAN)
    third = HEADS[3]
    tracker.begin(third.group, third.pair, third.first, third.count, third.n_bytes)
    assert heads_behind(forecast, tracker, 0) == HEADS[1:3]


def test_the_runs_are_the_plans() -> None:
    forecast, tracker = WindowForecast(5, PLAN, RUN), ReceiveTracker(PLAN)
    for head, runs in forecast.following(HEADS[0], tracker, 3, 1 << 20):
        planned = PLAN.runs(head.group, head.pair).cut(head.first, head.count)
        assert runs.dst.tolist() == planned.dst.tolist()


def test_a_window_in_another_order_ends_the_forecast_for_good() -> None:
    forecast, tracker = WindowForecast(5, PLAN, RUN), ReceiveTracker(PLAN)
    assert heads_behind(forecast, tracker, 6)
    assert heads_behind(forecast, tracker, 2) == []
    assert heads_behind(forecast, tracker, len(HEADS) - 2) == []


@pytest.mark.parametrize("change", ["generation", "promise"])
def test_a_check_of_generations_fails_after_a_change(change: str) -> None:
    region = Region.over(np.zeros(64, np.uint8), 8, name="cache")
    blocks, live = np.array([1, 5]), np.ones(1, np.uint32)
    check = GenerationCheck(region, blocks, region.generations_of(blocks), live)
    assert check()
    region.bump([2])
    assert check()
    if change == "generation":
        region.bump([5])
    else:
        live[0] = 0
    assert not check()
