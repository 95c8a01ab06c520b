"""Tests of the result tables of `make bench`: medians, ratios to other gateways, goals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import compare_routers_table
    import traffic_cells

    yield traffic_cells, compare_routers_table
    for name in ("traffic_cells", "compare_routers_table", "compared_systems", "intervals"):
        sys.modules.pop(name, None)


def test_ratios_are_taken_within_rounds_and_only_of_rounds_that_both_systems_finished(modules):
    cells, table = modules
    row = cells.Row("request", "µs CPU", "cpu", {"nginx": 1.7})
    results = table.Results([row])
    # The machine was half as fast in round 1, and nginx failed in round 2.
    for round_number, (ours, nginx) in enumerate([(30, 20), (60, 40), (33, None), (34, 20)]):
        results.add(row, "penstock", round_number, ours)
        if nginx is not None:
            results.add(row, "nginx", round_number, nginx)

    assert table.compare(results, row, "nginx") == table.Comparison(1.5, 1.5, 1.7)
    assert [(v.value, v.met) for v in table.verdicts(results)] == [(1.5, True)]


def test_a_system_without_results_has_no_ratio_and_no_verdict(modules):
    cells, table = modules
    row = cells.Row("request", "µs CPU", "cpu", {"smg": 0.35})
    results = table.Results([row], problems={"smg": "not installed"})
    results.add(row, "penstock", 0, 40.0)

    assert table.compare(results, row, "smg") is None
    assert table.verdicts(results) == []
    assert "Not measured: smg: not installed" in table.markdown(results)


def test_a_row_of_latencies_is_compared_by_differences(modules):
    cells, table = modules
    row = cells.Row("TTFT, p99", "ms", "p99", {"direct": 1.0}, added=True)
    results = table.Results([row])
    for round_number, (ours, direct) in enumerate([(6.0, 5.0), (9.0, 7.5), (5.0, 4.8)]):
        results.add(row, "penstock", round_number, ours)
        results.add(row, "direct", round_number, direct)

    assert table.compare(results, row, "direct").value == pytest.approx(1.0)
    assert "+1.00 (+0.20 to +1.50)" in table.markdown(results)
