"""Load on an OpenAI server, and what came back: `await run(plan)` gives a Report.

Lives here: workloads, the open and the closed loop, timing of streamed answers, the JSON that other tools can read.
Not here: reading traces (planner/traces) and the peer comparison (tests/bench).
"""

from planner.bench.client import BenchError, Client, Record
from planner.bench.loops import Progress, run
from planner.bench.plan import Plan, PlanError, Slo, checked
from planner.bench.report import Report, is_good
from planner.bench.stats import Summary, percentile, summarise
from planner.bench.timeline import Timeline

__all__ = [
    "BenchError",
    "Client",
    "Plan",
    "PlanError",
    "Progress",
    "Record",
    "Report",
    "Slo",
    "Summary",
    "Timeline",
    "checked",
    "is_good",
    "percentile",
    "run",
    "summarise",
]
