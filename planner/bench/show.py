"""Terminal output of a benchmark run: a progress line while it runs, and tables at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from command_line import table_lines
from planner.bench.bench_options import BenchPlan
from planner.bench.json_report import BenchReport
from planner.bench.open_and_closed_loop import RunProgress
from planner.bench.percentiles import Summary, percentile

if TYPE_CHECKING:
    from rich.console import Console

_RECENT = 200


class LiveProgress:
    """A progress bar on a terminal, as a context manager. Pass its method `watch` to run().

    It counts requests if the plan limits their number, otherwise seconds.
    """

    def __init__(self, plan: BenchPlan, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
        )
        self._bar = Progress(*columns, console=console, transient=True)
        most_requests = plan.requests or plan.limit
        self._by_time = most_requests is None
        self._task = self._bar.add_task("bench", total=most_requests or plan.duration_s, line="")

    def __enter__(self) -> LiveProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def watch(self, progress: RunProgress) -> None:
        """Redraw the progress bar with the present state of the benchmark run."""
        done = progress.sent - progress.in_flight
        completed = progress.elapsed_s if self._by_time else done
        self._bar.update(self._task, completed=completed, line=describe(progress))


def describe(progress: RunProgress) -> str:
    """Return the progress of a benchmark run as one line of text.

    The line has the numbers of finished requests, running requests and errors, and the recent
    median TTFT.
    """
    recent = progress.records[-_RECENT:]
    errors = sum(record.error is not None for record in progress.records)
    times = sorted(
        record.ttft_s for record in recent if record.ttft_s is not None and record.error is None
    )
    ttft = f"TTFT p50 {percentile(times, 50) * 1e3:.0f} ms" if times else "no token yet"
    done, running = progress.sent - progress.in_flight, progress.in_flight
    return f"{done} done, {running} running, {errors} errors, {ttft}"


def table(report: BenchReport) -> Iterator[str]:
    """Yield the latencies of a report line by line: a title, then a table of percentiles."""
    yield _title(report)
    summaries = (
        ("TTFT", report.ttft),
        ("TPOT", report.tpot),
        ("ITL", report.itl),
        ("whole", report.e2e),
    )
    yield from table_lines(
        ("", "mean", "p50", "p90", "p95", "p99", "max"),
        [[f"{name}, ms", *_cells(summary)] for name, summary in summaries],
    )


def _title(report: BenchReport) -> str:
    plan = report.plan
    load = (
        f"{plan.rate:g}/s"
        if plan.rate
        else f"x{plan.speed:g}"
        if plan.trace
        else f"{plan.concurrency} users"
    )
    source = plan.trace.name if plan.trace else plan.shape
    end = ", interrupted" if report.interrupted else ""
    return f"{plan.model}: {source}, {load}, {report.duration_s:.1f} s{end}"


def _cells(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["–"] * 6
    values = (summary.mean, summary.p50, summary.p90, summary.p95, summary.p99, summary.max)
    return [f"{value * 1e3:.1f}" for value in values]


def lines(report: BenchReport) -> list[str]:
    """Return a report's numbers that are not latencies: counts, rates, cache hits, errors."""
    failed = len(report.records) - len(report.completed)
    rows = [
        f"{len(report.completed)} answered, {failed} failed, at most {report.peak} at once",
        f"{report.per_second(len(report.completed)):.2f} requests/s, "
        f"{report.per_second(report.output_tokens):,.0f} output tokens/s, "
        f"{report.per_second(report.prompt_tokens):,.0f} prompt tokens/s",
    ]
    slo = report.plan.slo
    if slo.ttft_s is not None or slo.tpot_s is not None:
        bounds = [
            f"{name} <= {value * 1e3:.0f} ms"
            for name, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
            if value
        ]
        rows.append(
            f"goodput {report.good_fraction:.1%}, {report.per_second(report.good):.2f}/s "
            f"({', '.join(bounds)})"
        )
    if report.cached_ratio is not None:
        rows.append(f"prompt tokens from prefix caches: {report.cached_ratio:.1%}")
    if report.errors:
        rows.append(
            "errors: "
            + ", ".join(f"{kind} {count}" for kind, count in sorted(report.errors.items()))
        )
    if report.lag is not None and report.lag.p99 > 0.02:
        rows.append(
            f"this client sent late, p99 {report.lag.p99 * 1e3:.0f} ms: "
            "it cannot generate this load"
        )
    return rows
