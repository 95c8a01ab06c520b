"""Load generator for an OpenAI-compatible server: `await run(plan)` returns a BenchReport.

The package has workloads, open and closed loops, the timing of streamed answers, and reports as
JSON. Trace readers are in planner/traces. The comparison with other gateways is in bench.
"""

from planner.bench.answer_timeline import AnswerTimeline
from planner.bench.bench_options import BenchPlan, BenchSlo, PlanError, with_defaults
from planner.bench.client import BenchClient, BenchError, BenchRecord
from planner.bench.json_report import BenchReport, is_good
from planner.bench.open_and_closed_loop import RunProgress, run
from planner.bench.percentiles import Summary, percentile, summarise

__all__ = [
    "AnswerTimeline",
    "BenchClient",
    "BenchError",
    "BenchPlan",
    "BenchRecord",
    "BenchReport",
    "BenchSlo",
    "PlanError",
    "RunProgress",
    "Summary",
    "is_good",
    "percentile",
    "run",
    "summarise",
    "with_defaults",
]
