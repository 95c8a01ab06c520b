"""How a run looks on a terminal: a live line while it goes on, a table at its end."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from planner.bench.loops import Progress
from planner.bench.plan import Plan
from planner.bench.report import Report
from planner.bench.stats import Summary, percentile

_RECENT = 200


class Live:
    """A progress bar on a console; a context manager whose `watch` is given to run().

    It counts requests where the plan bounds them, else seconds.
    """

    def __init__(self, plan: Plan, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
        )
        self._bar = Bar(*columns, console=console, transient=True)
        most_requests = plan.requests or plan.limit
        self._by_time = most_requests is None
        self._task = self._bar.add_task("bench", total=most_requests or plan.duration_s, line="")

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def watch(self, progress: Progress) -> None:
        """Redraws with what has happened so far."""
        done = progress.sent - progress.in_flight
        at = progress.elapsed_s if self._by_time else done
        self._bar.update(self._task, completed=at, line=describe(progress))


def describe(progress: Progress) -> str:
    """One line: done, running, errors, and the median TTFT of the latest requests."""
    recent = progress.records[-_RECENT:]
    errors = sum(record.error is not None for record in progress.records)
    times = sorted(record.ttft_s for record in recent if record.ttft_s is not None and record.error is None)
    ttft = f"TTFT p50 {percentile(times, 50) * 1e3:.0f} ms" if times else "no token yet"
    return f"{progress.sent - progress.in_flight} done, {progress.in_flight} running, {errors} errors, {ttft}"


def table(report: Report) -> Table:
    """Latencies by percentile, then the rest as rows of their own."""
    shown = Table(title=_title(report), title_justify="left")
    for name in ("", "mean", "p50", "p90", "p95", "p99", "max"):
        shown.add_column(name, justify="right" if name else "left")
    for name, summary in (("TTFT", report.ttft), ("TPOT", report.tpot), ("ITL", report.itl), ("whole", report.e2e)):
        shown.add_row(f"{name}, ms", *_cells(summary))
    return shown


def _title(report: Report) -> str:
    plan = report.plan
    load = f"{plan.rate:g}/s" if plan.rate else f"x{plan.speed:g}" if plan.trace else f"{plan.concurrency} users"
    what = plan.trace.name if plan.trace else plan.shape
    return f"{plan.model}: {what}, {load}, {report.duration_s:.1f} s{', interrupted' if report.interrupted else ''}"


def _cells(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["–"] * 6
    values = (summary.mean, summary.p50, summary.p90, summary.p95, summary.p99, summary.max)
    return [f"{value * 1e3:.1f}" for value in values]


def lines(report: Report) -> list[str]:
    """What does not fit the table: counts, rates, goodput, cache, errors."""
    failed = len(report.records) - len(report.completed)
    said = [
        f"{len(report.completed)} answered, {failed} failed, at most {report.peak} at once",
        f"{report.per_second(len(report.completed)):.2f} requests/s, "
        f"{report.per_second(report.output_tokens):,.0f} output tokens/s, "
        f"{report.per_second(report.prompt_tokens):,.0f} prompt tokens/s",
    ]
    slo = report.plan.slo
    if slo.ttft_s is not None or slo.tpot_s is not None:
        bounds = [
            f"{name} <= {value * 1e3:.0f} ms" for name, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if value
        ]
        said.append(f"goodput {report.good_fraction:.1%}, {report.per_second(report.good):.2f}/s ({', '.join(bounds)})")
    if report.cached_ratio is not None:
        said.append(f"prompt tokens from prefix caches: {report.cached_ratio:.1%}")
    if report.errors:
        said.append("errors: " + ", ".join(f"{kind} {count}" for kind, count in sorted(report.errors.items())))
    if report.lag is not None and report.lag.p99 > 0.02:
        said.append(f"this client sent late, p99 {report.lag.p99 * 1e3:.0f} ms: the load is more than it can make")
    return said
