"""Tests of the terminal output of `penstock bench`: a progress line, then a table."""

from __future__ import annotations

import io

from rich.console import Console

from planner.bench import BenchPlan, BenchRecord, BenchReport, RunProgress
from planner.bench.show import LiveProgress, describe, lines, table


def answered(ttft_s: float) -> BenchRecord:
    return BenchRecord(0, 0, 0.0, 0.0, 1.0, ttft_s, 1.0, [1.0 - ttft_s], 10, 2, 0, 200)


def progress(*records: BenchRecord, in_flight: int = 0) -> RunProgress:
    plan = BenchPlan(url="http://x", model="m", concurrency=1, duration_s=10.0)
    return RunProgress(
        plan,
        elapsed_s=5.0,
        sent=len(records) + in_flight,
        in_flight=in_flight,
        records=list(records),
    )


def test_the_line_counts_and_gives_the_median_first_token() -> None:
    failed = BenchRecord(0, 0, 0.0, 0.0, 1.0, error="http_503")
    line = describe(progress(answered(0.1), answered(0.2), answered(0.3), failed, in_flight=2))
    assert line == "4 done, 2 running, 1 errors, TTFT p50 200 ms"


def test_the_live_line_shows_the_wait_for_the_first_token() -> None:
    assert describe(progress(in_flight=3)) == "0 done, 3 running, 0 errors, no token yet"


def test_the_live_line_appears_on_a_terminal_and_is_gone_after_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    state = progress(answered(0.1))
    with LiveProgress(state.plan, console) as live:
        live.watch(state)
    assert "1 done" in screen.getvalue()


def test_the_bar_is_full_when_all_requests_are_done_however_long_they_may_take() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    for plan, total in (
        (BenchPlan(url="http://x", requests=4, duration_s=60.0), 4),
        (BenchPlan(url="http://x", limit=7, duration_s=60.0), 7),
        (BenchPlan(url="http://x", duration_s=60.0), 60.0),
    ):
        with LiveProgress(plan, console) as live:
            live.watch(RunProgress(plan, elapsed_s=30.0, sent=2))
            task = live._bar.tasks[0]
            assert (task.total, task.completed) == (total, 30.0 if total == 60.0 else 2)


def test_a_client_that_sends_late_reports_it() -> None:
    late = BenchRecord(0, 0, 0.0, 0.5, 1.0, 0.6, 1.0, [0.4], 10, 2, 0, 200)
    text = lines(BenchReport(progress().plan, [late]))
    assert any("sent late" in line for line in text)


def test_the_table_has_a_dash_where_nothing_was_measured() -> None:
    assert "–" in "\n".join(table(BenchReport(progress().plan, [])))
