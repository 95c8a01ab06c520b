"""Property tests of ReceiveTracker, which records what KV has arrived, in any order."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout.kv_layout import KvDtype, KvLayout
from kvtransfer.layout.transfer_plan import plan_transfer
from kvtransfer.transfer.receive_tracker import ReceiveTracker, WindowError

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=4, dtype=KvDtype.BF16, block_tokens=2, tp=2)
PLAN = plan_transfer(LAYOUT, LAYOUT, range(0, 12, 2), range(12, 0, -2), 12, group_layers=2)
windows = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 5), st.integers(1, 3))


@given(announced=st.lists(windows, max_size=60))
def test_a_group_is_complete_exactly_when_each_of_its_runs_has_come_once(
    announced: list[tuple[int, int, int, int]],
) -> None:
    arrivals = ReceiveTracker(PLAN)
    came: set[tuple[int, int, int]] = set()
    for group, pair, first, count in announced:
        runs = {(group, pair, run) for run in range(first, first + count)}
        n_bytes = int(PLAN.runs(group, pair).length[first : first + count].sum())
        fits = first + count <= 6 and not runs & came
        with contextlib.suppress(WindowError):
            arrivals.begin(group, pair, first, count, n_bytes)
            assert fits
            came |= runs
            complete = arrivals.mark_verified(group, pair, first, count)
            assert complete == all(
                (group, part, run) in came for part in (0, 1) for run in range(6)
            )
            continue
        assert not fits
    first_group = sum(group == 0 for group, _, _ in came)
    assert arrivals.is_complete == (len(came) == 2 * 2 * 6)
    assert arrivals.complete_layers == (
        3 if arrivals.is_complete else 2 if first_group == 2 * 6 else 0
    )
