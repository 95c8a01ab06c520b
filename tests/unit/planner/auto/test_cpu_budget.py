"""Tests of the limit on the CPU time of simulations, on a simulated clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.auto.cpu_budget import SLICE_S, CpuBudget


@given(st.lists(st.floats(0.0001, 0.1), max_size=200), st.floats(0.01, 0.5))
def test_the_process_computes_at_most_its_share_of_the_time(
    steps_s: list[float], share: float
) -> None:
    cpu_s = slept_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept_s
        slept_s += seconds

    budget = CpuBudget(share, lambda: cpu_s, sleep)
    for step_s in steps_s:
        cpu_s += step_s
        budget.pause()
    assert cpu_s - SLICE_S <= share * (cpu_s + slept_s) * 1.000001
